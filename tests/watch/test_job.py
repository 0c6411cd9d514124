"""Verdicts: what is told of a job, and which ranks or parts explain it."""

import json
import math

import numpy as np
import pytest

from hp_tool.domain.watch import Expected, StepBatch, StepReport, Verdict
from hp_tool.watch import Job, Source
from hp_tool.watch.slowdowns.causes import RankTimes
from hp_tool.watch.words import cause_sentences

RANKS = 4


def run(
    own: np.ndarray,
    communication: np.ndarray,
    *,
    expected: Expected | None = None,
    restart_every: int = 10_000,
) -> Verdict:
    """The verdict on a synchronous job. `own`, `communication`: [steps, ranks] seconds."""
    job, sources = Job(), [Source() for _ in range(own.shape[1])]
    for number, (each, exchange) in enumerate(zip(own, communication, strict=True)):
        step_s = float((each + exchange).max())
        for rank, source in enumerate(sources):
            parts = {"compute": float(each[rank]), "communication": step_s - float(each[rank])}
            report = StepReport(seq=number + 1, step=100 + number, step_s=step_s, parts_s=parts)
            fresh = source.take(
                StepBatch(source=f"s{rank}", rank=rank, host=f"node{rank // 2}", reports=(report,))
            )
            if rank == 0:
                job.add(fresh)
        if number % restart_every == restart_every - 1:
            job = Job.of(json.loads(json.dumps(job.state())))
    return job.verdict(expected=expected, sources=sources)


def steady(steps: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return 0.8 * np.exp(rng.normal(0, 0.02, (steps, RANKS))), 0.2 * np.exp(
        rng.normal(0, 0.02, (steps, RANKS))
    )


def test_a_process_takes_little_space_whatever_it_names_its_parts() -> None:
    source = Source()
    for seq in range(1, 201):
        parts = {f"{number:02}{'x' * 198}": 0.123456789012345 for number in range(20)}
        source.take(
            StepBatch(
                source="s", reports=(StepReport(seq=seq, step_s=1.23456789012345, parts_s=parts),)
            )
        )
    assert len(json.dumps(source.state())) < 32_000


def test_nothing_is_said_of_a_job_that_runs_as_it_did() -> None:
    verdict = run(*steady())
    assert (verdict.status, verdict.text, verdict.slowdown, verdict.steps) == (
        "as_expected",
        (),
        None,
        400,
    )


def test_one_slow_rank_is_named_with_its_host() -> None:
    own, exchange = steady()
    own[300:, 2] *= 1.3
    verdict = run(own, exchange)
    assert verdict.status == "slower_than_it_was"
    assert verdict.causes[0].kind == "some_ranks"
    assert (verdict.causes[0].ranks, verdict.causes[0].hosts) == ((2,), ("node1",))
    assert verdict.slowdown is not None
    assert abs(verdict.slowdown.since_step - 400) <= 3
    assert verdict.slowdown.told_step <= 420
    assert verdict.slowdown.shape == "sudden"
    assert verdict.slowdown.interval[0] < verdict.slowdown.factor < verdict.slowdown.interval[1]


def test_the_same_verdict_where_the_state_was_stored_between_steps() -> None:
    own, exchange = steady()
    own[300:, 2] *= 1.3
    assert run(own, exchange, restart_every=7) == run(own, exchange)


def test_slow_compute_on_all_ranks_and_slow_links_are_told_apart() -> None:
    own, exchange = steady()
    own[300:] *= 1.2
    assert next(each.kind for each in run(own, exchange).causes) == "all_ranks"
    own, exchange = steady()
    exchange[300:] *= 2.0
    (cause,) = run(own, exchange).causes
    assert (cause.kind, cause.part) == ("communication", "communication")
    assert cause.share == pytest.approx(1.0, abs=0.15)


def test_a_slow_rank_is_named_even_if_a_busy_machine_slows_all() -> None:
    """The rank's work doubles; that of the others takes 15% longer; the step, mostly waiting,
    22%.
    """
    before = {"compute": 0.10, "communication": 0.13}
    after = [{"compute": 0.115, "communication": 0.165}, {"compute": 0.20, "communication": 0.08}]
    ranks = [RankTimes(rank=rank, before=before, after=after[rank == 1]) for rank in range(3)]
    causes = cause_sentences(ranks, hosts={}, factor=1.22, step_s=0.28)
    assert (causes[0].kind, causes[0].ranks) == ("some_ranks", (1,))


def test_a_slowdown_that_grows_is_told_from_a_sudden_one() -> None:
    own, exchange = steady(1500)
    own *= np.exp(np.clip(np.arange(1500) - 400, 0, None) * 3e-4)[:, None]
    verdict = run(own, exchange)
    assert verdict.slowdown is not None
    assert verdict.slowdown.shape == "growing"


def test_a_job_that_is_back_at_its_pace_is_quiet_again() -> None:
    own, exchange = steady(600)
    own[300:400] *= 1.4
    assert run(own, exchange).status == "as_expected"


def test_slower_than_it_should_be_counts_the_doubt_of_the_expectation() -> None:
    expected = Expected(step_s=0.8, interval=(0.7, 0.92), num_gpus=16, price_per_gpu_hour=2.0)
    verdict = run(*steady(), expected=expected)
    assert verdict.status == "slower_than_it_should_be"
    assert verdict.lag is not None
    assert verdict.lag.factor == pytest.approx(1.0 / 0.8, rel=0.05)
    loss = verdict.loss_per_day
    assert loss is not None
    assert loss.hours == pytest.approx(24 * (1 - 1 / verdict.lag.factor))
    assert loss.cost == pytest.approx(loss.hours * 16 * 2.0)
    wide = Expected(step_s=0.8, interval=(0.6, 1.1), num_gpus=16)
    assert run(*steady(), expected=wide).status == "as_expected"


def test_a_rank_that_began_anew_is_held_against_its_first_life() -> None:
    """After a restart from a checkpoint every rank reports under another name, and one comes back
    on a slow device.
    """
    own, exchange = steady()
    own[300:, 1] *= 1.5
    step_s = (own + exchange).max(axis=1)
    job, sources = Job(), []
    for life in (range(300), range(300, 400)):
        lives = [Source() for _ in range(RANKS)]
        sources += lives
        for number in life:
            for rank, source in enumerate(lives):
                source.seen = job.changes.steps
                parts = {"compute": float(own[number, rank])}
                report = StepReport(
                    seq=number - life[0] + 1, step_s=float(step_s[number]), parts_s=parts
                )
                fresh = source.take(StepBatch(source="s", rank=rank, reports=(report,)))
                if rank == 0:
                    job.add(fresh)
    verdict = job.verdict(expected=None, sources=sources)
    assert (verdict.ranks, verdict.causes[0].ranks) == (RANKS, (1,))


def test_steps_that_come_twice_or_out_of_turn_count_once() -> None:
    source = Source()
    reports = tuple(StepReport(seq=seq, step_s=1.0) for seq in (2, 1, 2, 3))
    assert [each.seq for each in source.take(StepBatch(source="a", reports=reports))] == [1, 2, 3]
    assert source.take(StepBatch(source="a", reports=reports)) == []
    assert (source.steps, source.last_seq) == (3, 3)
    assert math.isclose(source.state()["last_seq"], 3)
