"""The documentation site builds without a warning, and has what is generated from code."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[1]


def public_functions(package: str) -> dict[str, list[str]]:
    """Documented functions by page."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "hp_tool" / package).rglob("*.py"):
        if path.stem == "__init__":
            continue
        functions = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        names = [
            node.name
            for node in functions
            if not node.name.startswith("_") and ast.get_docstring(node)
        ]
        found[str(path.relative_to(ROOT / "hp_tool").with_suffix(".html"))] = names
    return found


def test_the_navigation_lists_every_page() -> None:
    listed = re.findall(
        r": ([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    assert set(listed) - {"index", "architecture", "changelog"} == {
        page.stem for page in (ROOT / "docs").glob("*.md")
    }


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if (
        find_spec("mkdocs") is None
        or find_spec("mkdocstrings") is None
        or find_spec("material") is None
    ):
        skip_or_fail(
            component="DOCS", reason="the docs extra is not installed: pip install 'hp-tool[docs]'"
        )
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    functions = public_functions("cost")
    assert sum(map(len, functions.values())) > 50
    for page, names in functions.items():
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert all(f">{name}<" in text or f"{name}</span>" in text for name in names), page
    assert "hp-tool db backup" in (tmp_path / "reference" / "commands.html").read_text(
        encoding="utf-8"
    )
    assert "/v1/searches/{search_id}/events" in (tmp_path / "reference" / "http.html").read_text(
        encoding="utf-8"
    )
    described = json.loads((tmp_path / "openapi.json").read_text(encoding="utf-8"))
    assert "/v1/searches/{search_id}/events" in described["paths"]
    assert 'href="../openapi.json"' in (tmp_path / "reference" / "http.html").read_text(
        encoding="utf-8"
    )
    assert "recommendations" in (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {
        page.stem for page in tmp_path.glob("*.html")
    }
