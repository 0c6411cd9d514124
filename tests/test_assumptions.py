"""Chosen figures: each is used, says what it means and what chose it, and stands on its page; few
answers read the file.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from hp_tool.catalog import documents
from hp_tool.loop.assumptions import FILE, Assumptions, DevicePriors, assumed
from hp_tool.loop.calibration import Prior
from scripts.assumptions_table import PAGE, with_tables

ROOT = Path(__file__).parents[1]
GROUPS = get_type_hints(Assumptions)
FIGURES = [(group, each.name) for group, kind in GROUPS.items() for each in fields(kind)]


def test_the_file_holds_what_the_types_name_and_no_more() -> None:
    document = documents.read(FILE)
    assert [(group, name) for group, entries in document.items() for name in entries] == FIGURES


def test_each_figure_has_its_type_and_says_what_it_is(subtests: pytest.Subtests) -> None:
    for group, name in FIGURES:
        with subtests.test(group=str(group), name=str(name)):
            entry = documents.read(FILE)[group][name]
            assert entry.keys() == {"value", "unit", "means", "evidence"}
            assert entry["unit"] and entry["means"].endswith(".") and entry["evidence"]
            for command in re.findall(r"python -m ([\w.]+)", entry["evidence"]):
                assert any(
                    (ROOT / command.replace(".", "/")).with_suffix(end).exists()
                    for end in (".py", "")
                ), command
            value, hint = (
                getattr(getattr(assumed(), group), name),
                get_type_hints(GROUPS[group])[name],
            )
            if hint in (int, float):
                assert type(value) is hint
            elif isinstance(value, tuple):
                assert {type(each) for each in value} == {float}
            else:
                assert isinstance(value, Mapping) and {type(each) for each in value.values()} == {
                    float
                }
                with pytest.raises(TypeError):
                    value["gpu"] = 1.0  # type: ignore[index]


def test_each_figure_is_used() -> None:
    used = {
        use
        for path in (ROOT / "hp_tool").rglob("*.py")
        if "assumed()" in (text := path.read_text(encoding="utf-8"))
        for use in uses(ast.parse(text))
    }
    priors = {
        ("device_priors", each.name)
        for each in fields(Prior)
        if each.name not in ("name", "run_log_sd")
    }  # `prior_for` takes them all, and the noise of repeats
    assert {each.name for each in fields(DevicePriors)} == {name for _, name in priors}
    assert used | priors == set(FIGURES)


def uses(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(group, figure) of `assumed().group.figure`, and of `x.figure` in a function that sets x to
    `assumed().group`.
    """
    for function in (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ):
        names = {
            target.id: group
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target, value in pairs(node)
            if isinstance(target, ast.Name) and (group := group_of(value))
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                group = (
                    names.get(node.value.id)
                    if isinstance(node.value, ast.Name)
                    else group_of(node.value)
                )
                if group:
                    yield group, node.attr


def pairs(assign: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    (target,) = assign.targets[:1]
    if isinstance(target, ast.Tuple) and isinstance(assign.value, ast.Tuple):
        return list(zip(target.elts, assign.value.elts, strict=False))
    return [(target, assign.value)]


def group_of(node: ast.expr) -> str | None:
    """The group of `assumed().group`."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
    ):
        return node.attr if node.value.func.id == "assumed" else None
    return None


def test_the_page_shows_them() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python scripts/assumptions_table.py"
    assert all(f"| `{name}` |" in page for _, name in FIGURES)


def test_an_answer_without_a_calibration_does_not_read_them() -> None:
    query = {
        "model": "gpt-22b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
        "parallel": {"tensor_parallel_size": 8},
    }
    query |= {"kind": "training", "training": {"sequence_length": 2048, "global_batch_size": 8}}
    code = (
        "import hp_tool; from hp_tool.loop.assumptions import assumed; assert "
        f"hp_tool.recommend({json.dumps(query)}, top=1)"
        ".recommendations; import hp_tool.loop.calibration, hp_tool.loop.tuning; "
        "print(assumed.cache_info().misses)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.split() == ["0"]
