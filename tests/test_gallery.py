"""The examples run, and show what they say they show."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import NOTEBOOKS, executed, text

ASKS_A_SERVER = {"report_from_training"}
"""Run where there is one: tests/service/test_async_client.py."""
EXAMPLES = sorted(
    path
    for path in (Path(__file__).parents[1] / "examples").glob("*.py")
    if path.stem not in ASKS_A_SERVER
)


@functools.cache
def example(name: str) -> Any:
    """The module of an example, whose figures are computed once."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES[0].parent / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "figures"):
        module.figures = functools.cache(module.figures)  # type: ignore[attr-defined]
    return module


def figures(name: str) -> Any:
    return example(name).figures()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_its_figures(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert path.read_text(encoding="utf-8").endswith('if __name__ == "__main__":\n    main()\n')
    example(path.stem).main()
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == text(executed(path)), (
        "run: python -m tests.notebooks"
    )


def test_there_is_a_notebook_for_each_question() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["choose", "serve", "tune"]


def test_headlines_of_sequence_parallelism_and_selective_recomputation() -> None:
    rows = figures("headline_figures")
    plain, sharded, both, full = rows.values()
    assert not plain["fits"] and both["fits"]
    assert plain["activations_gib"] / both["activations_gib"] == pytest.approx(
        5.0, rel=0.1
    )  # the paper's "5x"
    assert full["step_s"] / sharded["step_s"] - 1.0 > 0.3
    assert both["step_s"] / sharded["step_s"] - 1.0 < 0.05
    assert full["days"] - both["days"] > 6.0
    assert full["gpu_hours"] - both["gpu_hours"] == pytest.approx(
        24.0 * 1024 * (full["days"] - both["days"])
    )
    assert full["dollars"] > both["dollars"]


def test_longer_sequences_want_more_context_parallelism() -> None:
    sizes = [row.parallel.context_parallel_size for row in figures("long_context").values()]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_dynamic_context_parallelism_helps_short_sequences_and_only_those() -> None:
    gains = {name: found.gain for name, found in figures("dynamic_context").items()}
    assert gains["synthetic-web-text"] > gains["synthetic-long-sft"] > 1.05
    assert gains["full-rows"] == pytest.approx(1.0)


def test_what_is_served_meets_its_targets() -> None:
    answer = figures("serving_under_targets")
    assert all(
        row.estimate.ttft_s <= 1.0 and row.estimate.tpot_s <= 0.02 for row in answer.recommendations
    )
    assert answer.rejections["target_missed"] > 0
