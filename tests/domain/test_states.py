"""States: one object carries what the store, the terminal, the API and pages know of them."""

import json
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from hp_tool.domain.measurement import MeasurementStatus
from hp_tool.domain.states import RUN_STATES, Facts, Outcome, Phase, RunState, SearchState, State
from service.dashboard.page import _environment
from service.dashboard.verdict import runs_verdict


class Extended(State):
    """States with one that no interface has heard of."""

    OK = "ok", Facts(tone="good", ended=True)
    MELTED = "melted", Facts(tone="bad", ended=True, label="overheated", happened="was cooked")


def test_a_new_state_reaches_json_and_words_from_its_declaration() -> None:
    adapter = TypeAdapter(Extended)
    melted = adapter.validate_json('"melted"')
    assert melted is Extended.MELTED
    assert adapter.dump_json(melted) == b'"melted"'
    assert adapter.json_schema()["enum"] == ["ok", "melted"]
    assert (f"{melted}", melted.label, melted.happened) == ("melted", "overheated", "was cooked")
    assert (melted.failed, melted.final, melted.is_open, Extended.OK.failed) == (
        True,
        True,
        False,
        False,
    )


def test_every_status_of_a_measurement_has_its_facts() -> None:
    assert set(get_args(MeasurementStatus)) == {str(outcome) for outcome in Outcome}


def test_pages_know_every_state_of_a_run() -> None:
    assert set(RUN_STATES) == {*RunState, *Outcome}
    assert (RUN_STATES["submitted"].label, RUN_STATES["submitted"].failed) == ("running", False)
    assert {key for key, state in RUN_STATES.items() if state.tone in ("warn", "bad")} == {
        "oom",
        "timeout",
        "crashed",
    }


def test_only_paused_and_failed_searches_are_resumed() -> None:
    assert [state for state in SearchState if state.resumable] == ["paused", "failed"]
    assert [state for state in SearchState if state.final] == ["succeeded", "cancelled"]


def test_a_phase_is_filled_with_its_steps() -> None:
    words = [phase.happened.format(warmup="1 step", steps=2, of_steps=9) for phase in Phase]
    assert words[2:4] == ["warming up, 1 step done", "measuring, step 2 of 9"]


def test_pages_show_a_new_state_in_its_words_and_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RUN_STATES, "melted", Extended.MELTED)  # type: ignore[arg-type]
    looks = _environment.from_string("{{ run_states | state_looks | tojson }}").render()
    assert json.loads(looks)["melted"] == {"label": "overheated", "tone": "bad", "failed": True}
    table: Any = SimpleNamespace(best=None, number=(0, 1), state=("melted", "melted"))
    assert runs_verdict(table) == "2 runs were cooked."
