"""Serving queries end to end: the shape of an estimate, the reasons of a refusal, rankings under
targets.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.query import Query
from hp_tool.errors import InputError, NotFoundError, UnsupportedError
from hp_tool.questions import answers, schema, serving
from hp_tool.questions.serving.intervals import ratio_log_sd
from hp_tool.questions.serving.problem import resolve_serving
from tests.command_line import hp_tool

CONTRACT = {
    "feasible",
    "reasons",
    "memory",
    "ttft_s",
    "tpot_s",
    "request_latency_s",
    "output_tokens_per_second_per_gpu",
    "max_concurrency",
    "tails",
    "intervals",
    "provenance",
}


def query(*, inference: dict[str, Any] | None = None, **changes: Any) -> Query:
    """qwen3-32b in fp8 on 8 H200; keywords replace sections, `inference` adds to its own."""
    load = {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
        "engine": "vllm",
    }
    base: dict[str, Any] = {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8, "gpus_per_node": 8},
        "inference": load | (inference or {}),
    }
    return schema.parse_query(base | changes)


def test_an_estimate_has_the_contracts_fields_and_adds_up() -> None:
    parallel = {
        "tensor_parallel_size": 4,
        "expert_parallel_size": 1,
        "attention_data_parallel_size": 1,
    }
    answer = json.loads(schema.to_json(answers.answer_estimate(query(id="q", parallel=parallel))))
    found = answer["estimate"]
    assert answer["id"] == "q" and answer["status"] == "ok" and found.keys() >= CONTRACT
    assert (
        found["feasible"]
        and found["replicas"] == 2
        and found["parallel"]["data_parallel_size"] == 2
    )
    assert found["request_latency_s"] == pytest.approx(found["ttft_s"] + 999 * found["tpot_s"])
    assert found["request_latency_s"] == pytest.approx(sum(found["parts_s"].values()))
    assert found["output_tokens_per_second_per_gpu"] == pytest.approx(
        64 * 1000 / found["request_latency_s"] / 8
    )
    memory = found["memory"]
    parts = (
        "weights_bytes",
        "kv_cache_bytes",
        "activations_bytes",
        "logits_bytes",
        "overhead_bytes",
    )
    assert (
        memory["total_bytes"] == pytest.approx(sum(memory[name] for name in parts))
        and memory["kv_cache_bytes"] > 0
    )
    low, high = found["intervals"]["tpot_s"]
    assert low < found["tpot_s"] < high
    assert found["tails"]["ttft_s"]["p50"] <= found["tails"]["ttft_s"]["p99"]


def test_a_results_parallel_is_valid_input() -> None:
    best = serving.recommend(query=query()).recommendations[0]
    again = query(parallel=schema.to_dict(best.parallel))
    assert serving.estimate(query=again) == best.estimate


def test_recommendations_are_ranked_fit_and_meet_targets() -> None:
    targets = {"ttft_s": 0.6, "tpot_s": 0.016, "ttft_p90_s": 2.0}
    found = serving.recommend(query=query(targets=targets))
    rows = [row.estimate for row in found.recommendations]
    assert rows and found.space.feasible == len(rows) < found.space.legal
    assert [row.rank for row in found.recommendations] == list(range(1, len(rows) + 1))
    rates = [row.output_tokens_per_second_per_gpu for row in rows]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert all(row.feasible and row.ttft_s <= 0.6 and row.tpot_s <= 0.016 for row in rows)  # type: ignore[operator]
    assert all(row.tails and row.tails.ttft_s.p90 <= 2.0 for row in rows)
    assert found.rejections["target_missed"] == found.space.legal - found.space.feasible


@pytest.mark.parametrize(("objective", "figure"), [("ttft", "ttft_s"), ("tpot", "tpot_s")])
def test_an_objective_ranks_by_its_figure(objective: str, figure: str) -> None:
    found = serving.recommend(query=query(objective=objective)).recommendations
    values = [getattr(row.estimate, figure) for row in found]
    assert len(values) > 1 and values == sorted(values)


def test_fewest_gpus_that_still_meet_the_target() -> None:
    found = serving.recommend(query=query(objective="min_gpus", targets={"tpot_s": 0.03}))
    used = found.recommendations[0].estimate.provenance["num_gpus"]
    assert used in (1, 2, 4)
    least = min(row.estimate.tpot_s for row in serving.recommend(query=query()).recommendations)  # type: ignore[type-var]
    strict = serving.recommend(query=query(objective="min_gpus", targets={"tpot_s": 1.01 * least}))  # type: ignore[operator]
    assert strict.recommendations[0].estimate.provenance["num_gpus"] > used  # type: ignore[operator]


def test_a_missed_target_says_by_how_much() -> None:
    found = serving.estimate(
        query=query(parallel={"tensor_parallel_size": 1}, targets={"tpot_s": 0.01})
    )
    (reason,) = found.reasons
    assert not found.feasible and reason.code == "target_missed" and found.tpot_s == reason.needed
    assert (
        reason.available == 0.01
        and f"{found.tpot_s / 0.01:.2f} times the target of 10.0 ms" in reason.message
    )


def test_weights_that_do_not_fit_say_what_is_missing() -> None:
    large = query(model="llama-3.1-405b", parallel={"tensor_parallel_size": 2})
    found = serving.estimate(query=large)
    (reason,) = found.reasons
    assert (
        not found.feasible
        and reason.code == "memory"
        and found.ttft_s is None
        and found.max_concurrency == 0
    )
    assert reason.needed > reason.available > 0  # type: ignore[operator]
    assert "weights" in reason.message


@pytest.mark.parametrize(
    ("model", "parallel", "code"),
    [
        ("qwen3-32b", {"tensor_parallel_size": 3}, "heads_not_divisible"),
        ("qwen3-32b", {"tensor_parallel_size": 16}, "world_size_mismatch"),
        ("qwen3-32b", {"expert_parallel_size": 2}, "experts_not_divisible"),
        ("qwen3-32b", {"attention_data_parallel_size": 2}, "attention_data_parallel_needs_experts"),
        (
            "qwen3-30b-a3b",
            {"tensor_parallel_size": 2, "expert_parallel_size": 4},
            "experts_not_divisible",
        ),
        ("qwen3-32b", {"pipeline_parallel_size": 128}, "layers_not_divisible"),
    ],
)
def test_an_illegal_configuration_gives_its_reason(
    model: str, parallel: dict[str, int], code: str
) -> None:
    found = serving.estimate(query=query(model=model, parallel=parallel))
    assert not found.feasible and code in [reason.code for reason in found.reasons]
    assert found.ttft_s is None


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"inference": {"request_rate_per_second": 3.0}}, InputError, "inference.concurrency"),
        ({"inference": {"load": {"arrival": "poisson"}}}, UnsupportedError, "inference.load"),
        ({"inference": {"engine": "own"}}, UnsupportedError, "inference.engine"),
        ({"model": "bert-large"}, UnsupportedError, "model"),
        ({"model": "no-such-model"}, NotFoundError, None),
        ({"parallel": {"micro_batch_size": 4}}, InputError, "parallel.micro_batch_size"),
        ({"parallel": {"zero_stage": 2}}, InputError, "parallel.zero_stage"),
        (
            {"parallel": {"tensor_parallel_size": [1, 2]}},
            InputError,
            "parallel.tensor_parallel_size",
        ),
        ({"constraints": {"max_days": 1.0}}, InputError, "constraints.max_days"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], field: str | None
) -> None:
    with pytest.raises(error) as caught:
        serving.estimate(query=query(**changes))
    if field is not None:
        assert caught.value.field == field  # type: ignore[attr-defined]


def test_a_precision_no_device_of_the_kind_knows_is_served_with_widened_weights() -> None:
    a100 = {"gpu": "a100-sxm-80gb", "num_gpus": 8}
    found = serving.estimate(query=query(cluster=a100, parallel={"tensor_parallel_size": 8}))
    assert (
        found.feasible
        and found.provenance["matmul_precision"] == "bf16"
        and found.provenance["weight_bytes_each"] == 1.0
    )


def test_an_unknown_version_borrows_the_nearest_and_says_so() -> None:
    parallel = {"tensor_parallel_size": 8}
    known, borrowed = (
        serving.estimate(query=query(inference={"engine_version": version}, parallel=parallel))
        for version in ("0.12.0", "0.13.0")
    )
    assert borrowed.tpot_s == known.tpot_s
    assert (
        known.provenance["engine_efficiency_measured"] is True
        and borrowed.provenance["engine_efficiency_measured"] is False
    )
    assert known.intervals is not None and borrowed.intervals is not None
    assert borrowed.intervals.tpot_s[1] > known.intervals.tpot_s[1]


def test_experts_can_be_divided_in_every_way() -> None:
    mixture = query(model="qwen3-30b-a3b", inference={"precision": "bf16"})
    found = serving.recommend(query=mixture, top=1000)
    kinds = {
        (row.parallel.expert_parallel_size > 1, row.parallel.attention_data_parallel_size > 1)
        for row in found.recommendations
    }
    assert len(kinds) == 4
    for row in found.recommendations:
        c = row.parallel
        assert c.tensor_parallel_size * c.pipeline_parallel_size * c.data_parallel_size == 8


def test_a_request_rate_finds_its_concurrency() -> None:
    """The rate of a closed load, asked for as a rate, has about its latency: only the common wave
    is gone.
    """
    parallel = {"tensor_parallel_size": 4}
    closed = serving.estimate(query=query(parallel=parallel))
    rate = {"concurrency": None, "request_rate_per_second": closed.request_rate_per_second}
    found = serving.estimate(query=query(inference=rate, parallel=parallel))
    assert found.feasible and found.request_rate_per_second == pytest.approx(
        closed.request_rate_per_second
    )
    assert found.running_requests == pytest.approx(64, abs=2)
    assert found.request_latency_s == pytest.approx(closed.request_latency_s, rel=0.03)


def test_a_rate_beyond_full_batches_is_overload_with_the_devices_it_would_take() -> None:
    rate = {"concurrency": None, "request_rate_per_second": 1000.0}
    found = serving.estimate(query=query(inference=rate, parallel={"tensor_parallel_size": 4}))
    (reason,) = found.reasons
    assert reason.code == "overloaded" and reason.needed == 1000.0 and 0 < reason.available < 1000.0  # type: ignore[operator]
    assert found.ttft_s is None and "devices" in reason.message
    ranked = serving.recommend(query=query(inference=rate))
    assert ranked.recommendations == () and ranked.rejections["overloaded"] == ranked.space.legal


def test_latency_rises_with_the_request_rate() -> None:
    latencies = []
    for rate in (0.1, 1.0, 3.0, 6.0):
        load = {"concurrency": None, "request_rate_per_second": rate}
        latencies.append(
            serving.estimate(
                query=query(inference=load, parallel={"tensor_parallel_size": 4})
            ).request_latency_s
        )
    assert latencies == sorted(latencies) and len(set(latencies)) == 4  # type: ignore[type-var]


def test_experts_split_over_attention_groups_cost_more_traffic_than_experts_that_stay_whole() -> (
    None
):
    """Whole experts hear from the tokens that chose them; split ones need every token on every
    rank.
    """
    mixture = {"model": "qwen3-30b-a3b", "inference": {"precision": "bf16", "concurrency": 512}}
    split, whole = (
        serving.estimate(
            query=query(
                **mixture, parallel={"attention_data_parallel_size": 8, "expert_parallel_size": e}
            )
        )
        for e in (1, 8)
    )
    assert split.feasible and whole.feasible
    assert whole.request_latency_s < split.request_latency_s  # type: ignore[operator]


@pytest.mark.parametrize("objective", ["throughput_per_gpu", "ttft", "tpot"])
def test_rows_of_one_group_cannot_be_told_apart_from_its_first(objective: str) -> None:
    asked = query(objective=objective, inference={"concurrency": 128})
    rows, problem = serving.recommend(query=asked, top=50).recommendations, resolve_serving(asked)
    figure, name = (
        ("throughput", "output_tokens_per_second_per_gpu")
        if "gpu" in objective
        else (objective, f"{objective}_s")
    )
    bound = NORMAL_QUANTILE * ratio_log_sd(problem, figure=figure)
    groups = [row.group for row in rows]
    assert groups[0] == 1 and len(set(groups)) > 1 and groups == sorted(groups)  # type: ignore[type-var]
    first: dict[int | None, float] = {}
    for row in rows:
        value = getattr(row.estimate, name)
        apart = abs(math.log(value / first.setdefault(row.group, value)))
        assert apart <= bound
    starts = list(first.values())
    assert all(abs(math.log(b / a)) > bound for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize(
    ("engine", "precision", "element_bytes"),
    [
        ("trtllm", "bf16", 2),
        ("trtllm", "fp8", 1),
        ("trtllm", "nvfp4", 1),
        ("trtllm", "int4", 2),
        ("vllm", "fp8", 2),
        ("vllm", "nvfp4", 2),
        ("sglang", "nvfp4", 2),
    ],
)
def test_the_cache_is_as_wide_as_the_engine_keeps_it_for_a_checkpoint(
    engine: str, precision: str, element_bytes: int
) -> None:
    """NVIDIA's fp8 and nvfp4 checkpoints name an fp8 cache, which TensorRT-LLM follows; a query's
    own word wins.
    """
    load = {
        "input_length": 1024,
        "output_length": 256,
        "concurrency": 32,
        "engine": engine,
        "precision": precision,
    }
    base = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 1},
    }
    left_open, named = [
        json.dumps(base | {"inference": load | more})
        for more in ({}, {"kv_cache_precision": "bf16"})
    ]
    done = hp_tool("batch", "-", stdin=f"{left_open}\n{named}\n")
    used = [
        json.loads(line)["estimate"]["provenance"]["kv_element_bytes"]
        for line in done.stdout.splitlines()
    ]
    assert used == [element_bytes, 2]


@pytest.mark.parametrize(("stages", "layers"), [(1, 64), (2, 32), (3, 22), (5, 13), (7, 10)])
def test_the_fullest_of_uneven_stages_decides_how_many_sequences_fit(
    stages: int, layers: int
) -> None:
    """ceil(64 / p) of qwen3-32b's layers: a token's keys and values take 2 x 8 heads x 128 x 2
    bytes; vLLM's profile keeps room for 4000 tokens of input and three quarters of 1000 of output;
    its weights are 5120 (2 x 64 x 128 + 2 x 8 x 128 + 3 x 25600) bytes in fp8, and an end is an
    embedding or an output layer of 151,936 x 5120 in 16 bits.
    """
    cluster = {"gpu": "h200-sxm-141gb", "num_gpus": stages, "gpus_per_node": 8}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": stages}
    load = {"concurrency": 1, "kv_cache_precision": "bf16"}
    memory = serving.estimate(
        query=query(cluster=cluster, parallel=parallel, inference=load)
    ).memory
    assert memory is not None
    assert memory.kv_cache_bytes == pytest.approx(4750 * layers * 2 * 8 * 128 * 2)
    ends = (2 if stages == 1 else 1) * 2 * 151_936 * 5120
    assert memory.weights_bytes == pytest.approx(
        layers * 5120 * (2 * 64 * 128 + 2 * 8 * 128 + 3 * 25_600) + ends
    )
