"""Tails at a request rate, goodput under targets, and the requests that a cache holds to their last
token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hp_tool.domain.serving import InferenceEstimate
from hp_tool.domain.targets import Targets
from hp_tool.questions import serving
from hp_tool.questions.serving.estimates import request_bounds
from tests.serving.test_serving_answers import query

RATE = {"concurrency": None, "request_rate_per_second": 6.0}


def found(*, targets: dict[str, float] | None = None, **inference: Any) -> InferenceEstimate:
    changes = {"targets": targets} if targets else {}
    return serving.estimate(
        query=query(inference=inference, parallel={"tensor_parallel_size": 4}, **changes)
    )


def test_independent_arrivals_spread_every_latency() -> None:
    tails = found(**RATE).tails
    assert tails is not None
    for tail in (tails.ttft_s, tails.tpot_s, tails.request_latency_s):
        assert tail.p50 < tail.p90 < tail.p99


def test_the_tail_grows_with_the_rate() -> None:
    cache = {"kv_cache_precision": "fp8"}  # room for the highest of these rates
    rows = [
        found(concurrency=None, request_rate_per_second=rate, **cache)
        for rate in (1.0, 3.0, 6.0, 8.0)
    ]
    assert all(row.tails is not None for row in rows)
    p99 = [row.tails.request_latency_s.p99 for row in rows if row.tails]
    spread = [row.tails.tpot_s.p99 / row.tails.tpot_s.p50 for row in rows if row.tails]
    assert all(a < b for a, b in pairwise(p99)) and all(a < b for a, b in pairwise(spread))


def test_a_target_on_a_tail_holds_the_tail_that_is_shown() -> None:
    tails = found(**RATE).tails
    assert tails is not None
    met, missed = (
        found(**RATE, targets={"ttft_p99_s": share * tails.ttft_s.p99}) for share in (1.001, 0.999)
    )
    assert met.feasible and [reason.code for reason in missed.reasons] == ["target_missed"]


@pytest.mark.parametrize("load", [RATE, {"concurrency": 256}], ids=["open", "closed"])
def test_goodput_is_the_share_of_requests_within_the_bounds(load: dict[str, Any]) -> None:
    tails = found(**load).tails
    assert tails is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        good = found(**load, targets={"ttft_s": getattr(tails.ttft_s, name) * (1 + 1e-9)}).goodput
        assert good is not None
        alike = (
            load["concurrency"] is not None and name == "p50"
        )  # those outside the wave, who wait equally long
        assert good.fraction > 0.75 if alike else good.fraction == pytest.approx(share, abs=0.006)


def test_goodput_falls_as_targets_tighten_and_is_none_without() -> None:
    plain = found(**RATE)
    assert (
        plain.goodput is None
        and plain.tpot_s is not None
        and plain.request_rate_per_second is not None
    )
    fractions = []
    for factor in (2.0, 1.1, 1.0, 0.9, 0.5):
        good = found(**RATE, targets={"tpot_s": factor * plain.tpot_s}).goodput
        assert good is not None
        assert good.requests_per_second_per_gpu == pytest.approx(
            good.fraction * plain.request_rate_per_second / 8
        )
        fractions.append(good.fraction)
    assert (
        fractions[0] == 1.0
        and fractions[-1] == 0.0
        and fractions == sorted(fractions, reverse=True)
    )
    assert 0.3 < fractions[2] < 0.7


def test_more_targets_never_admit_more_requests() -> None:
    plain = found(concurrency=256)
    assert plain.tails is not None
    first, later = {"ttft_s": plain.tails.ttft_s.p90}, {"tpot_s": plain.tails.tpot_s.p90}
    each = [
        found(concurrency=256, targets=targets).goodput for targets in (first, later, first | later)
    ]
    assert each[2].fraction <= min(each[0].fraction, each[1].fraction)  # type: ignore[union-attr]
    assert each[2].fraction < 1.0  # type: ignore[union-attr]


def test_a_request_is_held_to_the_tighter_quantile_and_else_to_the_mean() -> None:
    assert request_bounds(Targets(ttft_s=1.0, ttft_p90_s=3.0, ttft_p99_s=2.0, tpot_s=0.03)) == {
        "ttft_s": 2.0,
        "tpot_s": 0.03,
    }
    assert request_bounds(Targets(request_latency_s=9.0)) == {"request_latency_s": 9.0}
    assert request_bounds(Targets()) == {}


def test_a_cache_that_holds_every_last_token_is_never_overflowed() -> None:
    plain = found(concurrency=64)
    assert plain.memory is not None and plain.max_concurrency is not None and plain.replicas == 2
    safe = plain.max_concurrency_without_preemption
    assert safe is not None and 0 < safe <= plain.max_concurrency
    at = found(concurrency=safe, output_length=1000)
    assert at.memory is not None and not at.kv_cache_limited
    whole = (
        at.memory.kv_cache_bytes / (4000 + 0.75 * 1000) * (4000 + 1000)
    )  # the engine's share of the output, to all of it
    assert whole <= at.memory.kv_cache_capacity_bytes * (1 + 1e-9)
    assert whole > 0.99 * at.memory.kv_cache_capacity_bytes
