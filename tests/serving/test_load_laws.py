"""However a load is said: cached prompts never delay, tails rise, Little's law holds, a capacity is
borne when asked back.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import hp_tool
from hp_tool.domain.serving import InferenceEstimate, PoolEstimate

LENGTHS = {"input_length": 3000, "output_length": 300}
TRACE = {
    "input_tokens": {"median": 2500, "sigma": 0.6},
    "output_tokens": {"median": 300, "sigma": 0.5},
}
LOADS: dict[str, dict[str, Any]] = {
    "closed": LENGTHS | {"concurrency": 48},
    "rate": LENGTHS | {"request_rate_per_second": 4.0},
    "thinking": LENGTHS | {"concurrency": 24, "think_time_s": 5.0},
    "offline": LENGTHS | {"load": {"arrival": "offline"}},
    "lengths": {"trace": TRACE, "request_rate_per_second": 4.0},
    "pools": LENGTHS | {"concurrency": 48, "disaggregated": {"prefill_replicas": 1}},
    "pools at a rate": LENGTHS
    | {"request_rate_per_second": 4.0, "disaggregated": {"prefill_replicas": 1}},
}
TARGETS = {"ttft_p95_s": 1.5, "tpot_p90_s": 0.03}


def answer(inference: dict[str, Any], **changes: Any) -> InferenceEstimate | PoolEstimate:
    """One layout of Llama 3.1 8B on two H100, or one pair of pools."""
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 2}
    query = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": cluster,
        "inference": inference,
    } | changes
    if "disaggregated" not in inference:
        estimate = hp_tool.estimate(query | {"parallel": {"tensor_parallel_size": 1}}).estimate
        assert isinstance(estimate, InferenceEstimate)
        return estimate
    pools = hp_tool.recommend(query, top=1).disaggregated
    assert pools is not None
    return pools[0].estimate


@pytest.mark.parametrize("load", LOADS)
def test_cached_prompts_never_delay_and_never_serve_fewer(load: str) -> None:
    rows = [
        answer(LOADS[load] | {"prefix_cache_hit_rate": share}) for share in (0.0, 0.3, 0.6, 0.9)
    ]
    first = [row.ttft_s or 0.0 for row in rows]
    tokens = [row.output_tokens_per_second_per_gpu or 0.0 for row in rows]
    if load != "offline":  # latencies of an offline load count from admission, and more run at once
        assert first == sorted(first, reverse=True) and first[-1] < 0.95 * first[0]
    assert all(later >= (1 - 1e-3) * earlier for earlier, later in itertools.pairwise(tokens))


@pytest.mark.parametrize("load", LOADS)
def test_tails_rise_and_a_mean_is_within_them(load: str) -> None:
    row = answer(LOADS[load], targets={"ttft_p95_s": 100.0, "e2e_p99.9_s": 1000.0})
    assert row.tails is not None
    for name in ("ttft_s", "tpot_s", "request_latency_s"):
        seconds = getattr(row.tails, name).quantiles
        assert list(seconds) == ["p50", "p90", "p95", "p99", "p99.9"] and list(
            seconds.values()
        ) == sorted(seconds.values())
        assert getattr(row, name) <= seconds["p99.9"] * (1 + 1e-9)


@pytest.mark.parametrize("load", [name for name in LOADS if name != "lengths"])
def test_requests_in_flight_are_the_rate_times_the_latency(load: str) -> None:
    row = answer(LOADS[load])
    assert row.request_rate_per_second and row.request_latency_s
    assert row.request_rate_per_second * row.request_latency_s == pytest.approx(
        row.concurrency, rel=0.01
    )


@pytest.mark.parametrize(
    ("load", "key"),
    [
        (LENGTHS, "concurrency"),
        (LENGTHS | {"load": {"arrival": "poisson"}}, "request_rate_per_second"),
        (LENGTHS | {"prefix_cache_hit_rate": 0.5}, "concurrency"),
        (
            LENGTHS | {"load": {"arrival": "poisson"}, "prefix_cache_hit_rate": 0.5},
            "request_rate_per_second",
        ),
    ],
)
def test_a_capacity_is_borne_when_it_is_asked_back_and_no_more(
    load: dict[str, Any], key: str
) -> None:
    highest = answer(load, targets=TARGETS)
    assert isinstance(highest, InferenceEstimate) and highest.feasible
    most = getattr(highest, key)
    given = {name: value for name, value in load.items() if name != "load"}
    again = answer(given | {key: most}, targets=TARGETS)
    assert isinstance(again, InferenceEstimate) and again.feasible
    assert (again.ttft_s, again.tpot_s) == pytest.approx((highest.ttft_s, highest.tpot_s), rel=1e-6)
    more = answer(given | {key: most + 1 if key == "concurrency" else 1.02 * most}, targets=TARGETS)
    assert not more.feasible


CAPACITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared prefix": {"prefix_cache_hit_rate": 0.8},
    "windows": {"model": "gemma-4-26b-a4b"},
    "recurrent layers": {"model": "qwen3-next-80b-a3b", "precision": "int4"},
    "drafts": {"speculative": {"num_speculative_tokens": 2, "acceptance_rate": 0.7}},
    "bounded": {"max_model_len": 8192},
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("kind", CAPACITIES)
def test_what_an_answer_says_that_fits_is_feasible_when_asked(engine: str, kind: str) -> None:
    changes = dict(CAPACITIES[kind])
    model = changes.pop("model", "llama-3.1-8b")
    load = LENGTHS | {"concurrency": 1, "engine": engine} | changes
    first = answer(load, model=model)
    assert isinstance(first, InferenceEstimate) and first.feasible
    assert first.max_concurrency and first.kv_cache is not None

    together = answer(load | {"concurrency": first.max_concurrency}, model=model)
    assert isinstance(together, InferenceEstimate) and together.feasible
    assert together.parts_s is not None and together.parts_s["queue"] == 0.0
    assert together.max_concurrency == first.max_concurrency

    longest = {"input_length": first.kv_cache.max_context - 100, "output_length": 100}
    alone = answer(load | longest, model=model)
    assert isinstance(alone, InferenceEstimate) and alone.feasible
    assert alone.kv_cache is not None and alone.kv_cache.requests >= 1


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("groups", [1, 8])
def test_memory_falls_with_the_share_of_a_prefix(engine: str, groups: int) -> None:
    used, room = [], []
    for share in (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        shared = {"prefix_cache_hit_rate": share, "prefix_groups": groups} if share else {}
        found = answer(LENGTHS | {"concurrency": 64, "engine": engine} | shared)
        assert isinstance(found, InferenceEstimate)
        assert found.memory is not None and found.kv_cache is not None
        used.append(found.memory.kv_cache_bytes)
        room.append(found.kv_cache.requests)
    assert used == sorted(used, reverse=True) and used[-1] < 0.5 * used[0]
    assert room == sorted(room) and room[-1] > 2 * room[0]
