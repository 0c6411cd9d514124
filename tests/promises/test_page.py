"""docs/promises.md and the tests of the promises name each other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.promises import test_promises
from tests.promises.audit import PROMISES

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## (?P<title>.+)\n(?P<text>(?:(?!## ).*\n)+)", re.MULTILINE)


def test_each_promise_has_the_test_of_its_name() -> None:
    sections = {
        match["title"].lower().replace(" ", "_"): match["text"]
        for match in SECTION.finditer((ROOT / "docs" / "promises.md").read_text())
    }
    for promise, text in sections.items():
        (file,) = re.findall(rf"`(tests/\S+\.py)::test_{promise}`", text)
        assert f"\ndef test_{promise}(" in (ROOT / file).read_text()
    audited = {promise.__name__ for promise in PROMISES}
    assert audited <= sections.keys()
    assert all(hasattr(test_promises, f"test_{promise}") for promise in audited)
