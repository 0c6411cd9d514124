"""The cost model's pages: every module has its section, formulas link their functions, and the
example is what is computed.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from scripts.cost_sections import FUNCTION, PAGES, cost_sections, linked_functions

ROOT = Path(__file__).parents[1]
TEXT = PAGES[0].read_text(encoding="utf-8")
PRINTED = 5e-4
"""Relative error of a number with four digits."""


def test_every_module_belongs_to_one_section() -> None:
    named = [module for modules in cost_sections().values() for module in modules]
    folder = ROOT / "hp_tool" / "cost"
    assert sorted(named) == sorted(set(folder.rglob("*.py")) - {folder / "__init__.py"})


@cache
def documented(module: Path) -> set[str]:
    """What a module's page on the site has an entry for."""
    nodes = (
        node
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    return {
        node.name for node in nodes if not node.name.startswith("_") and ast.get_docstring(node)
    }


def test_every_link_leads_to_a_function() -> None:
    links = list(linked_functions())
    assert len(links) > 100
    assert [
        (module.name, name)
        for module, name in links
        if not module.is_file() or name not in documented(module)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_formula_names_its_functions(page: Path) -> None:
    """A block of formulas is followed by links, in its own section and before the next block."""
    for section in re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        _, *blocks = re.split(r"^```\n(?=.* = )", section, flags=re.MULTILINE)
        for block in blocks:
            formula, _, text = block.partition("\n```\n")
            assert FUNCTION.search(text), formula


def test_every_efficiency_file_is_written_as_its_row_says() -> None:
    rows = re.findall(r"^\| `(\S+)` \|.*\| (?:`(fit_\w+)`|By hand) \|$", TEXT, re.MULTILINE)
    patterns = {
        re.sub(r"{(\S+)}", lambda m: f"({m[1].replace(',', '|')})", name).replace("*", ".*"): fit
        for name, fit in rows
    }
    folder = ROOT / "hp_tool" / "catalog" / "data" / "efficiency"
    for file in folder.rglob("*.yaml"):
        name = str(file.relative_to(folder).with_suffix(""))
        (command,) = [fit for pattern, fit in patterns.items() if re.fullmatch(pattern, name)]
        program = "benchmarks.accuracy.fit_cpu" if command == "fit_cpu" else "evidence.fit"
        written = f"# Written by python -m {program};" if command else "# By hand"
        assert file.read_text(encoding="utf-8").startswith(written), name


def computed() -> tuple[dict[str, float], dict[str, float]]:
    """(bytes, seconds) by part, of the example's own arithmetic."""
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["memory"], names["seconds"]


def test_the_example_is_what_an_estimate_says() -> None:
    estimate = hp_tool.estimate(ROOT / "examples" / "gpt3-175b.yaml").estimate
    assert estimate is not None and estimate.memory is not None and estimate.time is not None
    memory, seconds = computed()
    assert memory == pytest.approx(estimate.memory.parts_bytes, rel=1e-9)
    assert seconds == pytest.approx(
        {name: value for name, value in estimate.time.parts_s.items() if value}, rel=1e-9
    )


def test_the_example_prints_its_own_numbers() -> None:
    memory, seconds = computed()
    expected = {**memory, **seconds}
    rows = re.findall(
        r"^\| (?:`(\w+)` \| ([\d.e]+) |\| )\| \| `(\w+)` \| ([\d.e]+) \|$", TEXT, re.MULTILINE
    )
    printed = {name: float(number) for row in rows for name, number in (row[:2], row[2:]) if name}
    assert printed == pytest.approx(expected, rel=PRINTED)
    (sums,) = re.findall(r"^\| sum \| ([\d.e]+) \| \| sum \| ([\d.e]+) \|$", TEXT, re.MULTILINE)
    assert [float(number) for number in sums] == pytest.approx(
        [sum(memory.values()), sum(seconds.values())], rel=PRINTED
    )
