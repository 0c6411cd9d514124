"""Pictures of recommendations: the bars are the answer's figures, and files are what their suffix
says.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.cli.main import main
from hp_tool.domain.units import GIB
from hp_tool.errors import InputError, MissingExtraError
from hp_tool.wording import plots
from tests.conftest import skip_or_fail

TRAINING: Any = {
    "model": "gpt-22b",
    "gpu": "a100-sxm-80gb",
    "num_gpus": 16,
    "sequence_length": 2048,
    "global_batch_size": 16,
}
SERVING: Any = {
    "model": "qwen3-32b",
    "gpu": "h200-sxm-141gb",
    "num_gpus": 8,
    "inference": {"input_length": 4000, "output_length": 1000, "concurrency": 64, "engine": "vllm"},
}


@pytest.fixture(autouse=True, scope="module")
def _plotly() -> None:
    pytest.importorskip("plotly", reason="the plot extra is not installed")


def bars(figure: Any, legend: str) -> list[float]:
    """Length of each row's stack in one half of the picture."""
    columns = [trace.x for trace in figure.data if trace.legend == legend]
    return [sum(values) for values in zip(*columns, strict=True)]


def test_the_stacks_are_step_time_and_memory() -> None:
    rows = hp_tool.recommend(**TRAINING, top=4).recommendations
    figure = plots.recommendations_figure(rows, title="x")
    estimates: list[Any] = [row.estimate for row in rows]
    assert bars(figure, "legend") == pytest.approx([e.time.step_s for e in estimates])
    assert bars(figure, "legend2") == pytest.approx([e.memory.total_bytes / GIB for e in estimates])
    assert figure.layout.shapes[0].x0 == pytest.approx(estimates[0].memory.capacity_bytes / GIB)
    assert len(set(plots.row_labels(rows))) == len(rows)


def test_the_stacks_of_serving() -> None:
    rows = hp_tool.recommend(**SERVING, top=3).recommendations
    figure = plots.recommendations_figure(rows, title="x")
    assert bars(figure, "legend") == pytest.approx([row.estimate.request_latency_s for row in rows])  # type: ignore[union-attr]
    assert bars(figure, "legend2") == pytest.approx(
        [row.estimate.memory.total_bytes / GIB for row in rows]
    )  # type: ignore[union-attr]


def test_the_command_writes_a_page_that_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [
        "--model=gpt-22b",
        "--gpu=a100-sxm-80gb",
        "--num-gpus=8",
        "--sequence-length=2048",
        "--global-batch-size=16",
    ]
    page = tmp_path / "plot.html"
    monkeypatch.setattr(
        sys, "argv", ["hp-tool", "recommend", *flags, "--no-calibration", f"--plot={page}"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    text = page.read_text(encoding="utf-8")
    assert "gpt-22b on 8 a100-sxm-80gb" in text
    assert '<script src="http' not in text


def test_other_suffixes_are_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"\.html"):
        plots.check_path(tmp_path / "plot.gif")
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[plot\]"):
        plots.check_path(tmp_path / "plot.png")
    plots.check_path(tmp_path / "plot.html")


@pytest.mark.components
def test_a_png(tmp_path: Path) -> None:
    if find_spec("kaleido") is None:
        skip_or_fail(
            component="CHROMIUM",
            reason="the plot extra is not installed: pip install 'hp-tool[plot]'",
        )
    figure = plots.recommendations_figure(
        hp_tool.recommend(**TRAINING, top=2).recommendations, title="x"
    )
    try:
        plots.write_figure(figure, path=tmp_path / "plot.png")
    except MissingExtraError as error:
        skip_or_fail(component="CHROMIUM", reason=error.message)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
