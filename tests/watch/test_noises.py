"""What is told of jobs whose noise remembers, follows a day, or stops for evaluation, through the
command and the detector.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.watch.__main__ import delays, false_alarms
from benchmarks.watch.simulated import FAULTS, KINDS, bursts, every_tenth, step_times
from hp_tool.domain.watch import Expected, StepReport
from hp_tool.watch.job import Job
from hp_tool.watch.slowdowns.changes import Changes
from tests.command_line import hp_tool
from tests.watch.test_watch_command import QUERY, megatron


@pytest.mark.parametrize("kind", KINDS)
def test_clean_jobs_of_any_noise_raise_no_alarm(kind: str) -> None:
    assert false_alarms(jobs=2, kind=kind) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_clean_jobs_of_any_noise_raise_at_most_one_alarm(kind: str) -> None:
    assert false_alarms(jobs=100, kind=kind) <= 1


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["published", "daily wave"])
def test_what_makes_a_job_slower_is_told_in_time(kind: str, fault: str) -> None:
    plant, within = FAULTS[fault]
    waits = delays(jobs=6, after=500, kind=kind, plant=plant, beyond=500)
    assert all(each is not None and each >= 1 for each in waits)
    assert sum(each is not None and each <= within for each in waits) >= 5


@pytest.mark.parametrize("length", [1, 5, 12])
def test_pauses_for_evaluation_are_no_slowdown(length: int) -> None:
    """From the first thousandth step on, so that no baseline has seen one."""
    times = step_times(np.random.default_rng(0), steps=4000)
    times[np.arange(4000) % 1000 >= 1000 - length] *= 3.0
    assert Changes().add(times.tolist()) == []


def test_a_daily_wave_s_fall_and_rise_is_no_slowdown() -> None:
    times = np.exp(0.03 * np.sin(2 * np.pi * np.arange(6000) / 1440)) * np.exp(
        np.random.default_rng(1).normal(0, 0.005, 6000)
    )
    job = Job()
    job.add([StepReport(seq=n + 1, step_s=float(each)) for n, each in enumerate(times)])
    assert job.verdict(expected=None, sources=[]).status == "as_expected"


def test_every_tenth_slow_step_is_told_with_its_period_and_throughput(tmp_path: Path) -> None:
    times = 6.5 * np.exp(np.random.default_rng(2).normal(0.0, 0.02, 600))
    every_tenth(times, 300)
    log = tmp_path / "job.log"
    log.write_text(megatron(times))
    ended = hp_tool("watch", str(log))
    assert ended.returncode == 4 and "every 10th step" in ended.stdout
    slowdown = json.loads(hp_tool("watch", str(log), "--json").stdout)["slowdown"]
    assert (slowdown["shape"], slowdown["period"]) == ("recurring", 10)
    assert slowdown["factor"] == pytest.approx(
        1.3, rel=0.05
    )  # nine of 1 and one of 4 against ten of 1
    assert abs(slowdown["since_step"] - 301) <= 10 and slowdown["told_step"] <= 401


def test_recurring_slow_steps_that_end_are_told_as_ended() -> None:
    times = np.exp(np.random.default_rng(3).normal(0.0, 0.02, 900))
    every_tenth(times[:600], 300)
    job = Job()
    job.add([StepReport(seq=n + 1, step_s=float(each)) for n, each in enumerate(times)])
    assert job.verdict(expected=None, sources=[]).status == "as_expected"
    assert [each.kind for each in job.changes.regimes] == ["start", "recurring", "faster"]


def test_checkpoints_from_the_start_on_are_the_job_s_own_whatever_their_phase() -> None:
    """Every twentieth step saves; after a restart at step 1,003 saves come at another phase."""
    times = np.exp(np.random.default_rng(4).normal(0.0, 0.02, 3000))
    times[7:1000:20] += 2.0
    times[1003::20] += 2.0
    assert Changes().add(times.tolist()) == []


def test_bursts_are_told_even_while_the_job_is_at_its_pace(tmp_path: Path) -> None:
    times = 6.5 * np.exp(np.random.default_rng(5).normal(0.0, 0.02, 860))
    bursts(times, 300)  # to 330, 500 to 530, 700 to 730
    log = tmp_path / "job.log"
    log.write_text(megatron(times))
    ended = hp_tool("watch", str(log))
    assert ended.returncode == 4 and "in bursts" in ended.stdout
    slowdown = json.loads(hp_tool("watch", str(log), "--json").stdout)["slowdown"]
    assert (
        slowdown["shape"] == "recurring" and 1.02 < slowdown["factor"] < 1.1
    )  # 30 of 200 steps 30% slower


def test_bursts_are_told_until_the_next_is_overdue_by_half_of_the_gap_between_them() -> None:
    """Bursts at 300 and 500 are 200 steps apart: told up to 300 steps after the last has ended."""
    times = np.exp(np.random.default_rng(5).normal(0.0, 0.005, 900))
    for first in (300, 500):
        times[first : first + 30] *= 1.3
    job, told = Job(), []
    for number, each in enumerate(times, start=1):
        job.add([StepReport(seq=number, step_s=float(each))])
        slowdown = job.verdict(expected=None, sources=[]).slowdown
        if slowdown is not None and slowdown.shape == "recurring":
            told.append(number)
    firsts = [regime.first for regime in job.changes.regimes if regime.kind == "shift"]
    ended = job.changes.regimes[-1].first
    assert firsts == [300, 500] and 530 <= ended <= 535
    assert told == list(range(told[0], ended + 300 + 1))


def ramp(steps: int = 300) -> list[tuple[float, int]]:
    """(seconds, sequences) of steps whose batch doubles twice; 2 s of each step do not grow with
    it.
    """
    noise = np.exp(np.random.default_rng(6).normal(0.0, 0.01, steps))
    batches = [64 if n < 100 else 128 if n < 200 else 256 for n in range(steps)]
    return [
        (float(each * (2.0 + 0.05 * batch)), batch)
        for each, batch in zip(noise, batches, strict=True)
    ]


def test_a_batch_that_megatron_prints_as_it_grows_is_no_slowdown(tmp_path: Path) -> None:
    lines = [
        f" iteration {n + 1:8d}/   90000 | consumed samples: {n} | elapsed time per iteration "
        f"(ms): {1e3 * seconds:.1f} | "
        f"learning rate: 1.0E-04 | global batch size: {batch:5d} | lm loss: 2.0E+00 |\n"
        for n, (seconds, batch) in enumerate(ramp())
    ]
    log = tmp_path / "job.log"
    log.write_text("".join(lines))
    ended = hp_tool("watch", str(log))
    assert (ended.returncode, ended.stdout) == (0, "")
    now = json.loads(hp_tool("watch", str(log), "--json").stdout)["now"]
    assert now["step_s"] == pytest.approx(
        2.0 + 0.05 * 256, rel=0.02
    )  # of a step of the newest batch
    slower = [
        line.replace("(ms): ", "(ms): 1") if n >= 240 else line for n, line in enumerate(lines)
    ]
    log.write_text("".join(slower))
    assert hp_tool("watch", str(log)).returncode == 4


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_reported_work_is_judged_by_its_unit(tmp_path: Path, unit: str) -> None:
    log = tmp_path / "job.jsonl"
    factor = 4096 if unit == "tokens" else 1
    lines = [
        json.dumps({"step": n, "step_s": seconds, unit: batch * factor})
        for n, (seconds, batch) in enumerate(ramp())
    ]
    log.write_text("\n".join(lines))
    assert hp_tool("watch", str(log)).returncode == 0
    log.write_text(
        "\n".join(
            json.dumps({"step": n, "step_s": seconds}) for n, (seconds, _) in enumerate(ramp())
        )
    )
    assert hp_tool("watch", str(log)).returncode == 4  # nothing says that the batch grew


def test_a_job_on_its_way_to_the_query_s_batch_is_not_compared_with_its_prediction(
    tmp_path: Path,
) -> None:
    expected = Expected(step_s=1.0, interval=(0.9, 1.1), num_gpus=8, samples=256.0)
    job = Job()
    job.add([StepReport(seq=n + 1, step_s=10.0, samples=128.0) for n in range(100)])
    assert job.verdict(expected=expected, sources=[]).status == "as_expected"
    job = Job()
    job.add([StepReport(seq=n + 1, step_s=10.0, samples=256.0) for n in range(100)])
    assert job.verdict(expected=expected, sources=[]).status == "slower_than_it_should_be"
    assert "global_batch_size: 256" in QUERY
