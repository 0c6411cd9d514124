"""Megatron's timers in a log, in the form of `Timers.log` of Megatron Core 0.17.1, for each
--timing-log-option.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hp_tool.cli.main import build
from hp_tool.domain.parts import STEP_KEYS
from hp_tool.errors import InputError
from hp_tool.formats.timers import is_log, read_timers
from hp_tool.questions import schema
from hp_tool.traces.explain.logged import GROUPS, explain_log, logged_parts
from hp_tool.wording.words import layout_arithmetic
from tests.traces.test_explain import QUERY

STEP = (
    " [2026-03-01 10:00:00.123456] iteration {iteration:8d}/     500 | consumed samples:         "
    "1280 | elapsed time per "
    "iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 148.3 | learning rate: "
    "1.200000E-05 | "
    "global batch size:   128 | lm loss: 9.100000E+00 | grad norm: 1.234 | number of skipped "
    "iterations:   0 |\n"
)
LEVEL_1 = {
    "forward-backward": 800.0,
    "all-grads-sync": 50.0,
    "params-all-gather": 30.0,
    "optimizer-inner-step": 60.0,
    "optimizer": 100.0,
}
LEVEL_2 = {"batch-generator": 5.0, "forward-compute": 200.0, "backward-compute": 400.0}
SETUP = {"model-and-optimizer-setup": 9000.0}


def block(timers: dict[str, float], option: str, *, slow: dict[int, float] | None = None) -> str:
    """What four ranks print; the passes of `slow` ranks take that many times as long."""
    of = {
        name: [
            ms * ((slow or {}).get(rank, 1.0) if name.endswith("-compute") else 1.0)
            for rank in range(4)
        ]
        for name, ms in timers.items()
    }
    dotted = {name: f"    {(name + ' ').ljust(48, '.')}" for name in of}
    if option == "max":
        return "max time across ranks (ms):\n" + "".join(
            f"{dotted[name]}: {max(ms):.2f}\n" for name, ms in of.items()
        )
    if option == "minmax":
        lines = (f"{dotted[name]}: ({min(ms):.2f}, {max(ms):.2f})\n" for name, ms in of.items())
        return "(min, max) time across ranks (ms):\n" + "".join(lines)
    lines = (
        f"  {name}:\n" + "".join(f"     rank {r:2d}: {each:.2f}\n" for r, each in enumerate(ms))
        for name, ms in of.items()
    )
    return "times across ranks (ms):\n" + "".join(lines)


def log(
    path: Path, option: str, *, timers: dict[str, float], slow: dict[int, float] | None = None
) -> Path:
    text = (
        block(SETUP, option)
        + STEP.format(iteration=1, ms=20_000.0)
        + block({"forward-backward": 1.0}, option)
    )
    for iteration in (10, 20, 30):
        text += STEP.format(iteration=iteration, ms=990.0 + iteration) + block(
            timers, option, slow=slow
        )
    path.write_text(text + block({"evaluate": 7000.0}, option))
    return path


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
def test_a_step_is_split_by_its_timers_and_sums_to_itself(tmp_path: Path, option: str) -> None:
    path = log(tmp_path / "log", option, timers=LEVEL_1 | LEVEL_2)
    assert is_log(path)
    steps = read_timers(path)
    assert [each.step_s for each in steps] == pytest.approx([1.0, 1.01, 1.02])
    seconds = logged_parts(steps[0])
    expected = {
        "passes": 0.6,
        "pipeline": 0.15,
        "data_parallel": 0.08,
        "optimizer": 0.07,
        "rest": 0.1,
    }
    assert seconds == pytest.approx(expected)
    assert sum(seconds.values()) == pytest.approx(1.0)
    answer = explain_log(steps)
    assert answer.step_s == pytest.approx(1.01) and not answer.findings and answer.steps == 3


def test_a_log_without_timers_is_told_the_flags_that_give_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(STEP.format(iteration=iteration, ms=1000.0) for iteration in (10, 20)))
    assert is_log(path)
    with pytest.raises(InputError, match="has no timers of steps: run with --timing-log-level 2"):
        read_timers(path)


def test_timers_of_level_1_do_not_tell_the_pipeline(tmp_path: Path) -> None:
    seconds = logged_parts(read_timers(log(tmp_path / "log", "minmax", timers=LEVEL_1))[0])
    assert (
        seconds["passes_and_pipeline"] == pytest.approx(0.75)
        and not {"passes", "pipeline"} & seconds.keys()
    )


def test_what_no_timer_told_is_no_zero_but_part_of_the_rest(tmp_path: Path) -> None:
    path = log(tmp_path / "log", "all", timers={"forward-backward": 800.0})
    assert logged_parts(read_timers(path)[0]) == pytest.approx(
        {"passes_and_pipeline": 0.8, "rest": 0.2}
    )
    answer = explain_log(read_timers(path), query=schema.parse_query(QUERY))
    assert answer.estimate is not None and answer.estimate.time is not None
    predicted_s = {part.name: part.predicted_s for part in answer.parts}
    told = answer.estimate.time.parts_s
    assert predicted_s["rest"] == pytest.approx(
        told["overhead"] + told["optimizer"] + told["data_parallel"]
    )
    assert sum(each.predicted_s or 0.0 for each in answer.parts) == pytest.approx(
        answer.estimate.time.step_s
    )


def test_a_timer_longer_than_the_step_is_refused(tmp_path: Path) -> None:
    steps = read_timers(log(tmp_path / "log", "all", timers=LEVEL_1 | {"forward-backward": 5000.0}))
    with pytest.raises(
        InputError, match=r"Timer forward-backward is 5\.\d+ s, longer than the step \(1\.01"
    ):
        explain_log(steps)


def test_a_slow_rank_is_named_where_ranks_are_and_hinted_at_where_not(tmp_path: Path) -> None:
    named = explain_log(
        read_timers(log(tmp_path / "all", "all", timers=LEVEL_1 | LEVEL_2, slow={2: 1.2}))
    )
    assert named.findings[0].text.startswith("Rank 2 takes 120.0 ms longer")
    assert next(each for each in named.timers if each.timer == "forward-compute").longest_rank == 2
    some = explain_log(
        read_timers(log(tmp_path / "minmax", "minmax", timers=LEVEL_1 | LEVEL_2, slow={2: 1.2}))
    )
    assert (
        some.findings[0].text.startswith("A rank takes up to 120.0 ms longer")
        and "all names it" in some.findings[0].text
    )
    most = explain_log(
        read_timers(log(tmp_path / "max", "max", timers=LEVEL_1 | LEVEL_2, slow={2: 1.2}))
    )
    assert not most.findings


def test_each_part_of_a_prediction_is_in_one_group() -> None:
    for left_out in ({"passes", "pipeline"}, {"passes_and_pipeline"}):
        parts_of = [
            part for name, group in GROUPS.items() if name not in left_out for part in group
        ]
        assert sorted(parts_of) == sorted(STEP_KEYS)


def test_beside_a_prediction_and_as_a_command(tmp_path: Path) -> None:
    path = log(tmp_path / "train.log", "all", timers=LEVEL_1 | LEVEL_2 | {"all-grads-sync": 150.0})
    answer = explain_log(read_timers(path), query=schema.parse_query(QUERY))
    assert (
        answer.estimate is not None
        and answer.estimate.time is not None
        and answer.estimate.parallel is not None
    )
    assert sum(each.predicted_s or 0.0 for each in answer.parts) == pytest.approx(
        answer.estimate.time.step_s
    )
    (tmp_path / "job.json").write_text(json.dumps(QUERY))
    command = ["explain", str(path), "--query", str(tmp_path / "job.json")]
    shown = CliRunner().invoke(build(), command)
    assert (
        shown.exit_code == 0
        and "forward-compute" in shown.output
        and "data-parallel communication" in shown.output
    )
    assert f"Predicted for {layout_arithmetic(answer.estimate.parallel)}" in shown.output
    told = CliRunner().invoke(build(), [*command, "--json"])
    assert json.loads(told.output) == json.loads(schema.to_json(answer))


def test_a_log_without_timers_of_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(block(SETUP, "minmax") + STEP.format(iteration=1, ms=1.0))
    with pytest.raises(InputError, match="--timing-log-level 2"):
        read_timers(path)
