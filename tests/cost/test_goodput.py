"""The model of failures against its closed forms, the paper it comes from, a simulation, and a
published training.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import lambertw

from hp_tool import catalog
from hp_tool.cost.goodput import (
    MTBF_PER_GPU_S,
    best_interval_s,
    goodput,
    time_stretch,
    young_interval_s,
)
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.result import Goodput
from hp_tool.domain.workload import ReliabilitySpec, TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions import schema, training
from tests.cost.cases import case_of

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 2048, "global_batch_size": 1536, "total_tokens": 300e9},
}


def kept(reliability: ReliabilitySpec, *, model: str, gpu: str, num_gpus: int) -> Goodput:
    found = goodput(
        case=case_of(
            model=catalog.model(model),
            cluster=catalog.cluster(ClusterQuery(gpu=gpu, num_gpus=num_gpus)),
            workload=TrainingWorkload(
                sequence_length=8192, global_batch_size=num_gpus, reliability=reliability
            ),
        )
    )
    assert found is not None
    return found


def with_training(**training: Any) -> dict[str, Any]:
    return QUERY | {"training": QUERY["training"] | training}


CHECKPOINTS, MTBFS, RESTARTS = (
    st.floats(0.1, 3_600.0),
    st.floats(600.0, 1e7),
    st.floats(0.0, 7_200.0),
)


@pytest.mark.parametrize(
    ("mtbf_s", "interval_minutes"), [(86_400.0, 117.0), (21_600.0, 57.0), (900.0, 9.1)]
)
def test_optima_of_dalys_figures(mtbf_s: float, interval_minutes: float) -> None:
    # Figures 3 to 5 of the paper: checkpoints of five minutes.
    assert best_interval_s(checkpoint_s=300.0, mtbf_s=mtbf_s) / 60.0 == pytest.approx(
        interval_minutes, rel=0.01
    )


@given(checkpoint_s=CHECKPOINTS, mtbf_s=MTBFS, restart_s=RESTARTS, factor=st.floats(0.2, 5.0))
def test_no_other_interval_is_better(
    checkpoint_s: float, mtbf_s: float, restart_s: float, factor: float
) -> None:
    costs = {"checkpoint_s": checkpoint_s, "mtbf_s": mtbf_s}
    best = best_interval_s(**costs)
    least = time_stretch(interval_s=best, restart_s=restart_s, **costs)
    assert time_stretch(interval_s=factor * best, restart_s=restart_s, **costs) >= least * (
        1.0 - 1e-6
    )


@given(checkpoint_s=CHECKPOINTS, ratio=st.floats(1e4, 1e8))
def test_youngs_optimum_where_checkpoints_are_short(checkpoint_s: float, ratio: float) -> None:
    costs = {"checkpoint_s": checkpoint_s, "mtbf_s": ratio * checkpoint_s}
    assert best_interval_s(**costs) == pytest.approx(young_interval_s(**costs), rel=0.01)


@given(interval_s=st.floats(60.0, 1e5), checkpoint_s=CHECKPOINTS, restart_s=RESTARTS)
def test_without_failures_checkpoints_alone_cost(
    interval_s: float, checkpoint_s: float, restart_s: float
) -> None:
    stretch = time_stretch(
        interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=1e13
    )
    assert stretch == pytest.approx((interval_s + checkpoint_s) / interval_s, rel=1e-6)


@pytest.mark.parametrize("mtbf_s", [3_600.0, 14_400.0, 86_400.0])
def test_simulated_failures(mtbf_s: float) -> None:
    interval_s, checkpoint_s, restart_s, segments = 1_800.0, 60.0, 600.0, 20_000
    draw = random.Random(7)

    def survives(span_s: float) -> tuple[bool, float]:
        failure_s = draw.expovariate(1.0 / mtbf_s)
        return failure_s >= span_s, min(failure_s, span_s)

    elapsed = 0.0
    for _ in range(segments):
        done = False
        while not done:
            done, spent = survives(interval_s + checkpoint_s)
            elapsed += spent
            restarted = done
            while not restarted:
                restarted, spent = survives(restart_s)
                elapsed += spent
    expected = time_stretch(
        interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s
    )
    assert elapsed / (segments * interval_s) == pytest.approx(expected, rel=0.02)


@given(checkpoint_s=CHECKPOINTS, mtbf_s=MTBFS)
def test_the_optimum_is_lamberts_function(checkpoint_s: float, mtbf_s: float) -> None:
    exact = mtbf_s * (1.0 + lambertw(-math.exp(-1.0 - checkpoint_s / mtbf_s)).real)
    assert best_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s) == pytest.approx(
        exact, rel=1e-6
    )


def test_llama_3_kept_more_than_nine_tenths() -> None:
    # arXiv 2407.21783, section 3.3.4: effective training time above 90% on 16,384 H100.
    found = kept(ReliabilitySpec(), model="llama-3.1-405b", gpu="h100-sxm-80gb", num_gpus=16_384)
    assert 0.90 < found.fraction < 0.97
    assert found.mtbf_s == pytest.approx(54 * 86_400 / 419) == MTBF_PER_GPU_S / 16_384
    assert found.checkpoint_bytes == pytest.approx(14.0 * 405.9e9, rel=0.001)
    assert "2407.21783" in found.source


def test_what_is_given_is_used_and_no_source_is_claimed_for_it() -> None:
    given = ReliabilitySpec(
        mtbf_per_gpu_hours=1_000.0, checkpoint_s=30.0, checkpoint_interval_s=900.0, restart_s=120.0
    )
    found = kept(given, model="llama-3-8b", gpu="h100-sxm-80gb", num_gpus=96)
    assert (found.mtbf_s, found.checkpoint_s, found.checkpoint_interval_s, found.restart_s) == (
        37_500.0,
        30.0,
        900.0,
        120.0,
    )
    assert found.source == "as given"


def test_a_job_that_never_gets_through_a_checkpoint_has_no_goodput() -> None:
    hopeless = ReliabilitySpec(
        mtbf_per_gpu_hours=1e-3, checkpoint_s=1e7, checkpoint_interval_s=1e-3, restart_s=1e7
    )
    assert (
        0.0
        < kept(hopeless, model="llama-3-8b", gpu="h100-sxm-80gb", num_gpus=10_000).fraction
        < 1e-100
    )


def test_estimates_tell_calendar_days_where_failures_are_asked_for() -> None:
    plain, reliable = (
        training.recommend(query=schema.parse_query(query), top=1).recommendations[0]
        for query in (QUERY, with_training(reliability={}))
    )
    without, found = plain.estimate, reliable.estimate
    assert plain.parallel == reliable.parallel and found.days == without.days
    assert (
        without.goodput is None
        and without.effective_days is None
        and without.calendar_days == without.days
    )
    assert found.goodput is not None and 0.9 < found.goodput.fraction < 1.0
    assert (
        found.effective_days
        == pytest.approx((found.days or 0.0) / found.goodput.fraction)
        == found.calendar_days
    )
    assert found.cost == pytest.approx((without.cost or 0.0) / found.goodput.fraction)
    assert found.gpu_hours == pytest.approx((found.effective_days or 0.0) * 24 * 1024)


def test_limits_count_calendar_days() -> None:
    rows = training.recommend(
        query=schema.parse_query(with_training(reliability={}) | {"rank_by": "mean"}), top=20
    ).recommendations
    best = min((row.estimate for row in rows), key=lambda each: each.effective_days or math.inf)
    assert best.days is not None and best.effective_days is not None
    between = QUERY | {"constraints": {"max_days": 0.5 * (best.days + best.effective_days)}}
    assert training.recommend(query=schema.parse_query(between), top=1).recommendations
    failing = with_training(
        reliability={}, offload="none"
    )  # offload, tried where nothing else is in time, would be
    missed = training.recommend(query=schema.parse_query(between | failing), top=1)
    assert not missed.recommendations
    nearest = missed.nearest_misses[0].estimate  # with its own free knobs, so maybe a little faster
    assert (
        nearest.reasons[0].code == "target_missed"
        and nearest.reasons[0].needed == nearest.effective_days
    )
    assert (
        nearest.effective_days is not None
        and 0.99 * best.effective_days <= nearest.effective_days <= 1.02 * best.effective_days
    )


def test_bad_times_and_adapters_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        schema.parse_query(with_training(reliability={"restart_s": -1.0}))
    assert refused.value.field == "training.reliability.restart_s"
    with pytest.raises(UnsupportedError) as unsupported:
        training.recommend(
            query=schema.parse_query(with_training(reliability={}, task="lora", lora={"rank": 8}))
        )
    assert unsupported.value.field == "training.reliability"
