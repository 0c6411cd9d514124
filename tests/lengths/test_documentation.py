"""What docs/lengths.md writes works, and the gains it prints are what the command gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.accuracy.dynamic_context import evaluate
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.domain.query import OwnFile
from hp_tool.domain.workload import TrainingWorkload

PAGE = (Path(__file__).parents[2] / "docs" / "lengths.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_distributions_of_the_page_are_ones(tmp_path: Path) -> None:
    training, *own = BLOCKS
    assert (
        sequence_lengths(
            TrainingWorkload(**yaml.safe_load(training)["training"]).sequence_lengths or ""
        ).mean
        > 0
    )
    assert len(own) == 2
    for block in own:
        path = tmp_path / "own.yaml"
        path.write_text(block)
        assert sequence_lengths(OwnFile(path)).mean > 0


def test_the_gains_of_the_page_are_those_of_the_command() -> None:
    printed = re.findall(r"\| `(\S+)` \| (\S+) \| (\S+) \|", PAGE)
    names = [name for name, _, _ in printed]
    assert len(names) >= 4
    for place, scenario in enumerate(evaluate(names)["scenarios"]):
        assert scenario["fits"]
        for row, columns in zip(scenario["rows"], printed, strict=True):
            gain = columns[place + 1]
            assert row["gain"] == pytest.approx(
                1.0 if gain == "none" else float(gain.rstrip("x")), abs=0.006
            )
