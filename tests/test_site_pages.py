"""The documentation's reference of Python names modules that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest


def test_every_module_of_the_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    from site_pages import python

    named = re.findall(r"^::: (\S+)", python(), flags=re.MULTILINE)
    assert named and [name for name in named if importlib.util.find_spec(name) is None] == []
