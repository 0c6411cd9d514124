"""docs/sizing.md: its query is one, its table of laws is what the laws say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hp_tool.questions.budgets import answer_sizing, parse_sizing
from hp_tool.questions.sizing.laws import LAWS

PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_query_is_answered() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    found = answer_sizing(parse_sizing(block)).sizing
    assert found.feasible and found.effective_days == pytest.approx(30.0)
    assert found.tokens_per_parameter == pytest.approx(200.0, rel=0.1)


def test_the_table_of_laws() -> None:
    rows = re.findall(r"^\| `(\S+)` \| ([\d.]+) \| ([\d.e]+) \|", PAGE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(LAWS)
    for name, exponent, parameters in rows:
        assert LAWS[name].exponent == pytest.approx(float(exponent), abs=5e-4)
        assert LAWS[name].parameters(5.76e23) == pytest.approx(float(parameters), rel=2e-3)
