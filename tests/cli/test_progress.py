"""What a person hears of a search on standard error."""

from __future__ import annotations

import pytest

from hp_tool.cli.search_output import SearchProgress


def test_who_interrupts_a_search_hears_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), SearchProgress() as progress:
        progress.on_event("started", {"search_id": "4f1c9a0e5b7d2c38", "budget_runs": 8})
        raise KeyboardInterrupt
    assert "continue with: hp-tool tune --resume 4f1c9a0e5b7d2c38" in capsys.readouterr().err
