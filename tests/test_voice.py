"""Names say what a value is, and a docstring's first line can be read alone."""

from __future__ import annotations

from pathlib import Path

from benchmarks.structure.count import files_now
from benchmarks.structure.voice import ROOTS, docstrings, names, places

ROOT = Path(__file__).parents[1]
SOURCE = '''"""The same of a module."""
def find(rows, asked, *said, **told):
    """At most one row."""
    found = [given for given in rows]
    for held in found: print(held.found, asked=1)
    return lambda given: found
class Row:
    """Ofcourse not."""
    found: int
    def of(self):
        """A row

        of the same."""
'''


def test_a_name_that_says_nothing_and_a_line_that_leans_on_another_are_counted() -> None:
    assert sorted(names(SOURCE)) == [
        (2, "asked"), (2, "said"), (2, "told"), (4, "found"), (4, "given"), (5, "held"), (6, "given"), (9, "found"),
    ]  # fmt: skip
    assert sorted(docstrings(SOURCE)) == [(1, "The same of a module."), (2, "At most one row.")]


def test_no_name_says_nothing_and_no_docstring_leans_on_another_line() -> None:
    left = places(files_now(ROOT, roots=ROOTS))
    assert not left, "\n".join(["rename, or describe what is returned:", *left])
