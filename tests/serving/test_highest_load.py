"""The load as an unknown: what trying every load would find, and what must hold of it for any
query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hp_tool.cost.arrays import FloatArray
from hp_tool.domain.query import Query
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions import answers, schema, serving
from hp_tool.questions.serving.highest_load import QUEUE_LATENCIES, highest_loads, sustains_load
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.space.serving import serving_space
from tests.serving.test_serving_answers import query

few = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
fewer = settings(few, max_examples=10)
arrivals = st.sampled_from(("closed", "poisson"))
UNKNOWN: dict[str, Any] = {"concurrency": None}
TRIED = 700
"""Loads that brute force tries: queries below bear fewer."""


@st.composite
def queries(draw: st.DrawFn) -> dict[str, Any]:
    """Any model, engine, lengths and targets, with few slots, so that every load can be tried."""
    model = draw(st.sampled_from(("llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b")))
    targets = {
        "ttft_s": (0.2, 1.0, 5.0),
        "tpot_s": (0.008, 0.02, 0.05),
        "request_latency_s": (3.0, 20.0),
        "tpot_p99_s": (0.03,),
        "ttft_p90_s": (0.3, 2.0),
    }
    limits = {name: draw(st.none() | st.sampled_from(values)) for name, values in targets.items()}
    inference = {
        "input_length": draw(st.sampled_from((64, 1500, 8000))),
        "output_length": draw(st.sampled_from((1, 2, 300))),
        "engine": draw(st.sampled_from(("vllm", "sglang", "trtllm"))),
        "think_time_s": draw(st.sampled_from((0.0, 0.0, 5.0))),
        "prefix_cache_hit_rate": draw(st.sampled_from((0.0, 0.5))),
    }
    return {
        "kind": "inference",
        "model": model,
        "cluster": {
            "gpu": draw(st.sampled_from(("h100-sxm-80gb", "h200-sxm-141gb"))),
            "num_gpus": draw(st.sampled_from((2, 4))),
        },
        "inference": inference,
        "parallel": {
            "max_num_seqs": draw(st.sampled_from((1, 7, 48))),
            "pipeline_parallel_size": 1,
        },
        "targets": {name: limit for name, limit in limits.items() if limit is not None},
    }


def laid(base: dict[str, Any], **changes: Any) -> Query:
    return schema.parse_query(base | {"inference": base["inference"] | changes})


def found_loads(asked: Query) -> FloatArray:
    problem = resolve_serving(asked)
    candidates, _ = serving_space(query=asked.parallel, case=problem, concurrency=(1,))
    loads = highest_loads(problem, candidates)
    assert loads is not None
    return loads


def borne(base: dict[str, Any], loads: tuple[int, ...]) -> np.ndarray:
    """(configurations, loads): which each configuration bears, as given ones."""
    asked = laid(base, concurrency=1)
    problem = resolve_serving(asked)
    candidates, _ = serving_space(query=asked.parallel, case=problem, concurrency=loads)
    return sustains_load(problem.cost_candidates(candidates)).reshape(-1, len(loads))


KINK = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 4},
    "inference": {"input_length": 64, "output_length": 1, "engine": "vllm", "think_time_s": 5.0},
    "parallel": {"max_num_seqs": 7, "pipeline_parallel_size": 1},
    "targets": {"ttft_p90_s": 0.3},
}
"""More are in flight than run, and nobody waits yet: the others are still on the way."""


@few
@given(queries())
@example(KINK)
def test_the_search_finds_what_trying_every_load_does(base: dict[str, Any]) -> None:
    loads = found_loads(schema.parse_query(base))
    tried = borne(base, tuple(range(1, TRIED)))
    waits = any(name in QUEUE_LATENCIES for name in base["targets"])
    for load, each in zip(loads, tried, strict=True):
        places = np.flatnonzero(each)
        best = int(places[-1]) + 1 if len(places) else 1
        if best == TRIED - 1:  # more may be borne than was tried
            assert load >= best or not waits
        else:  # without a target that a queue breaks, no more are in flight than run at once
            assert load == best if waits else load <= best


@few
@given(queries(), st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_lists_and_ranges_narrow_it(base: dict[str, Any], values: list[int]) -> None:
    listed = found_loads(laid(base, concurrency=values))
    for load, each in zip(listed, borne(base, tuple(sorted(set(values)))), strict=True):
        places = np.flatnonzero(each)
        assert load == sorted(set(values))[places[-1] if len(places) else 0]
    low, high = min(values), max(values)
    within = found_loads(laid(base, concurrency={"min": low, "max": high}))
    for load, each in zip(within, borne(base, tuple(range(low, high + 1))), strict=True):
        assert load == low + (np.flatnonzero(each)[-1] if each.any() else 0)


@fewer
@given(queries(), st.sampled_from((0.9, 0.5)), arrivals)
def test_tighter_targets_never_carry_more(base: dict[str, Any], share: float, arrival: str) -> None:
    tighter = base | {"targets": {name: share * limit for name, limit in base["targets"].items()}}
    loose, tight = (found_loads(laid(each, load={"arrival": arrival})) for each in (base, tighter))
    assert np.all(tight <= loose * (1 + 1e-12))


@fewer
@given(queries(), arrivals)
def test_littles_law_and_the_memory_bound_hold(base: dict[str, Any], arrival: str) -> None:
    for row in serving.recommend(
        query=laid(base, load={"arrival": arrival}), top=4
    ).recommendations:
        e = row.estimate
        assert (
            e.feasible
            and e.concurrency
            and e.request_rate_per_second
            and e.request_latency_s
            and e.memory
            and e.tpot_s is not None
        )
        # A replica that one request leaves idle counts as one busy with it: fewer requests than
        # replicas.
        if e.concurrency >= row.parallel.data_parallel_size:
            assert e.request_rate_per_second * e.request_latency_s == pytest.approx(
                e.concurrency, rel=1e-9
            )
        assert e.users == int(
            e.concurrency + e.request_rate_per_second * base["inference"]["think_time_s"] + 1e-6
        )
        problem = resolve_serving(laid(base))
        if problem.model.num_experts is None and problem.output_length > 1:
            reading = (
                0.9 * e.memory.weights_bytes / problem.cluster.gpu.memory_bandwidth_bytes_per_second
            )
            assert (
                e.tpot_s
                >= reading
                * (problem.model.num_hidden_layers - 1)
                / problem.model.num_hidden_layers
                * 0.9
            )


def test_the_answer_is_valid_input_and_says_what_it_costs() -> None:
    asked = query(
        inference=UNKNOWN | {"think_time_s": 20.0}, targets={"ttft_s": 1.0, "tpot_s": 0.03}
    )
    answer = answers.answer_recommend(asked, top=3)
    best = answer.recommendations[0]
    e = best.estimate
    assert isinstance(e.concurrency, int) and e.users and e.users > e.concurrency
    again = query(
        inference={"concurrency": e.concurrency, "think_time_s": 20.0},
        parallel=schema.to_dict(best.parallel),
        targets={"ttft_s": 1.0, "tpot_s": 0.03},
    )
    assert serving.estimate(query=again) == e
    more = schema.to_dict(asked)["inference"] | {"concurrency": e.concurrency + 1}
    assert not serving.estimate(
        query=query(
            inference=more,
            parallel=schema.to_dict(best.parallel),
            targets={"ttft_s": 1.0, "tpot_s": 0.03},
        )
    ).feasible
    price, request = e.cost_per_million_tokens, e.request_rate_per_second
    assert price is not None and request is not None
    hourly = float(str(e.provenance["price_per_gpu_hour"]))
    assert (price.input * 4000 + price.output * 1000) / 1e6 == pytest.approx(
        8 * hourly / 3600 / request
    )
    assert answer.throughput_front and answer.throughput_front[-1].estimate.concurrency


def test_a_miss_names_the_nearest_and_the_load_it_bears() -> None:
    missed = answers.answer_recommend(
        query(inference={"concurrency": 4000}, targets={"tpot_s": 0.02, "ttft_s": 1.0}), top=3
    )
    assert missed.recommendations == () and len(missed.nearest_misses) == 3
    e = missed.nearest_misses[0].estimate
    assert e.reasons and e.highest_load and e.highest_load < 4000  # type: ignore[union-attr]
    impossible = answers.answer_recommend(query(inference=UNKNOWN, targets={"tpot_s": 1e-6}), top=3)
    assert impossible.recommendations == () and impossible.throughput_front is None
    assert impossible.nearest_misses[0].estimate.reasons[0].code == "target_missed"
    large = answers.answer_recommend(
        query(model="llama-3.1-405b", cluster={"gpu": "l40s-48gb", "num_gpus": 4}), top=3
    )
    assert [row.estimate.reasons[0].code for row in large.nearest_misses] == ["memory"] * 3
    late = answers.answer_recommend(
        query(inference=UNKNOWN | {"request_rate_per_second": 500.0}), top=3
    )
    assert (
        late.nearest_misses[0].estimate.reasons[0].code == "overloaded"
        and late.nearest_misses[0].estimate.highest_load
    )


def test_pools_carry_the_highest_load_too() -> None:
    sizes = {"prefill_tensor_parallel_size": [1, 2], "decode_tensor_parallel_size": 2}
    bounds = {"tpot_s": 0.02, "ttft_s": 3.0}
    found = answers.answer_recommend(
        query(inference=UNKNOWN | {"disaggregated": sizes}, targets=bounds), top=3
    ).disaggregated
    assert found
    for row in found[:2]:
        one = {
            "prefill_replicas": row.prefill.replicas,
            "decode_replicas": row.decode.replicas,
            "prefill_tensor_parallel_size": row.prefill.tensor_parallel_size,
            "decode_tensor_parallel_size": 2,
        }
        load = row.estimate.concurrency
        for concurrency, meets in ((load, True), (load + 1, False)):
            again = query(
                inference={"concurrency": concurrency, "disaggregated": one}, targets=bounds
            )
            assert bool(answers.answer_recommend(again, top=1).disaggregated) == meets
        assert row.estimate.users == load


@pytest.mark.parametrize(
    ("inference", "field"),
    [
        ({"request_rate_per_second": 3.0}, "inference.concurrency"),
        ({"concurrency": {"min": 9, "max": 3}}, "inference.concurrency"),
        ({"concurrency": []}, "inference.concurrency"),
    ],
)
def test_what_cannot_be_is_refused_by_name(inference: dict[str, Any], field: str) -> None:
    with pytest.raises((InputError, UnsupportedError)) as refused:
        answers.answer_recommend(query(inference=inference), top=1)
    assert refused.value.field == field
