"""`python -m benchmarks.structure.voice [FOLDER ...]`: names that say nothing of their value, and docstrings that cannot be
read alone, one a line.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.structure.count import files_now

ROOT = Path(__file__).parents[2]
ROOTS = ("benchmarks", "hp_tool", "scripts", "service")
NAMES = frozenset(("found", "asked", "told", "said", "held", "given"))
"""As names of a variable, field or argument: what was done to get the value, not what it is."""
OPENING = re.compile(r"(The same|Of|As|By|At most)\b")
"""A first line that leans on the line or the name before it."""


@functools.lru_cache(maxsize=1)
def _tree(source: str) -> ast.Module:
    """Parse a file once for all that is looked for in it."""
    return ast.parse(source)


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for each variable that is assigned and each argument with one of NAMES."""
    for node in ast.walk(_tree(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in NAMES:
                yield node.lineno, name


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first line) for each docstring of a module, class or function that opens with OPENING."""
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if OPENING.match(first):
                yield getattr(node, "lineno", 1), first


def places(files: Mapping[str, str]) -> list[str]:
    """Return `path:line: what stands there` for all Python files, by path."""
    return [
        f"{path}:{line}: {text}"
        for path, source in sorted(files.items())
        if path.endswith(".py")
        for line, text in sorted([*names(source), *docstrings(source)])
    ]


if __name__ == "__main__":
    every = places(files_now(ROOT, roots=tuple(sys.argv[1:]) or ROOTS))
    print(*every, f"{len(every)} places", sep="\n")
