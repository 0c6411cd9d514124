"""What a person hears of a search on standard error."""

from __future__ import annotations

import io
import re
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from hp_tool.cli.search_output import SearchProgress
from tests.cli.shown import CONFIG

RUN: dict[str, Any] = {
    "number": 3,
    "parallel": asdict(CONFIG),
    "predicted": {"calibrated_step_s": 0.3996},
}


def test_who_interrupts_a_search_hears_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), SearchProgress() as progress:
        progress.on_event("started", {"search_id": "4f1c9a0e5b7d2c38", "budget_runs": 8})
        raise KeyboardInterrupt
    assert "continue with: hp-tool tune --resume 4f1c9a0e5b7d2c38" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_progress_is_one_line_with_its_counts_on_every_screen(width: int) -> None:
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    progress = SearchProgress(console)
    progress.on_event(
        "started",
        {"search_id": "4f1c9a0e5b7d2c38", "budget_runs": 8, "profile_runs": 2, "candidates": 1_234},
    )
    progress.on_event("run_started", RUN)
    with console.capture() as captured:
        console.print(progress._progress.get_renderable())
    (line,) = captured.get().splitlines()
    assert "2/8" in line and "0:00:0" in line and re.search(r"\d s run 4: TP 4 x PP 8", line)
    progress.on_event("pending", {"reason": "Resources"})
    with console.capture() as captured:
        console.print(progress._progress.get_renderable())
    assert "waiting for devices" in captured.get()


def test_a_log_file_gets_a_line_for_every_start_and_end() -> None:
    file = io.StringIO()
    with SearchProgress(Console(file=file, width=200)) as progress:
        progress.on_event(
            "started", {"search_id": "4f1c9a0e5b7d2c38", "budget_runs": 8, "candidates": 1_234}
        )
        progress.on_event("run_started", RUN)
        progress.on_event("run_finished", RUN | {"status": "ok", "step_s": 0.8645})
    started, run, ended = file.getvalue().splitlines()
    assert started == "search 4f1c9a0e5b7d2c38: at most 8 runs, 1,234 configurations to choose from"
    assert run == (
        "run 4: TP 4 x PP 8 x DP 32, VPP 6, MBS 1, SP, selective, ZeRO 1, predicted "
        "399.6 ms per step"
    )
    assert ended.endswith("predicted 399.6 ms, measured 864.5 ms")
