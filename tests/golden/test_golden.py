"""Predictions are those that the repository stores, alone, in a batch, in a grid and after
calibration.

What is meant to move says so in CHANGELOG.md, then `python -m tests.golden.update` stores it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.golden import compare, compute, update


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return compare.normal(compute.answers())


@pytest.mark.parametrize("family", ["alone", "grid", "fit", "corrected"])
def test_predictions_are_the_stored_ones(answers, family):
    stored = {
        key: answer for key, answer in compare.stored().items() if key.startswith(f"{family}/")
    }
    moved = compare.differences(stored, answers)
    told = "\n".join(map(str, moved[:20]))
    assert not moved, (
        f"{len(moved)} values moved; if they are meant to: CHANGELOG.md, python -m "
        f"tests.golden.update\n{told}"
    )


def test_every_query_has_its_stored_answer(answers):
    assert {key for key in answers if not key.startswith("batch/")} == compare.stored().keys()


def test_a_query_in_a_batch_gets_the_answer_it_gets_alone(answers):
    alone = {
        key.replace("alone/", "batch/"): _without_mends(answer)
        for key, answer in answers.items()
        if "alone/" in key
    }
    assert len(alone) > 400
    assert not compare.differences(alone, answers)


def test_a_value_that_moves_in_its_last_but_three_digits_is_seen(answers):
    changed = copy.deepcopy(answers)
    time = changed["alone/hand-000"]["estimate"]["time"]
    time["step_s"] *= 1 + 4e-12
    (seen,) = compare.differences(compare.stored(), changed)
    assert seen.place == "alone/hand-000/estimate/time/step_s"
    time["parts_s"]["new"] = 0.0
    del time["step_s"]
    (seen,) = compare.differences(compare.stored(), changed)
    assert seen.after == compare.ABSENT


@pytest.mark.parametrize("told", [False, True])
def test_what_moved_is_stored_only_with_a_changelog_that_says_so(
    answers, told, tmp_path, monkeypatch, capsys
):
    stored = copy.deepcopy(answers)
    stored["alone/hand-000"]["estimate"]["time"]["step_s"] *= 1.5
    changelog = (
        f"# Changelog\n\n## 1.0\n\n### Added\n\n- This.\n\n{update.HEADING}\n\n- That.\n\n## 0.1\n"
    )
    head = {f"tests/golden/answers/{name}": text for name, text in compare.files(stored).items()}
    listing, head["CHANGELOG.md"] = "\n".join(head), changelog
    monkeypatch.setattr(compute, "answers", lambda: answers.items())
    at_head = lambda _, command, *names: (  # noqa: E731
        listing if command == "ls-tree" else head[names[0].removeprefix("HEAD:")]
    )
    monkeypatch.setattr(update, "_at_head", at_head)
    (tmp_path / "tests/golden").mkdir(parents=True)
    entry = "That." if told else "This."
    (tmp_path / "CHANGELOG.md").write_text(
        changelog.replace(entry, f"{entry}\n- Steps are shorter.")
    )
    assert update.update(repository=tmp_path) == (0 if told else 1)
    assert "alone/hand-000/estimate/time/step_s" in capsys.readouterr().out
    assert (tmp_path / "tests/golden/answers/alone.jsonl").exists() == told


LEFT_OUT = ("fixes", "highest_load", "narrowest", "with_recipe")
"""Fields that a batch leaves out."""


def _without_mends(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what a batch leaves out."""
    return answer | {
        "estimate": {key: value for key, value in answer["estimate"].items() if key not in LEFT_OUT}
    }
