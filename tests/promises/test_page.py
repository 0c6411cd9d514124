"""Each section of docs/promises.md is a test of the same name."""

from __future__ import annotations

import re
from pathlib import Path

from tests.promises import test_promises
from tests.promises.audit import PROMISES

ROOT = Path(__file__).parents[2]


def test_each_promise_has_the_test_of_its_name() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    promises = {
        title.lower().replace(" ", "_") for title in re.findall(r"^## (.+)$", page, re.MULTILINE)
    }
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(promises) >= 16
    assert {name for name in promises if f"\ndef test_{name}(" not in tests} == set()
    audited = {promise.__name__ for promise in PROMISES}
    assert audited <= promises
    assert all(hasattr(test_promises, f"test_{promise}") for promise in audited)
