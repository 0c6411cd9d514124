"""Served mixtures end to end: wide expert parallelism, second copies of experts, two batches, and
pools of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.domain.query import Query
from hp_tool.errors import InputError
from hp_tool.questions import answers, schema, serving


def query(*, inference: dict[str, Any] | None = None, **changes: Any) -> Query:
    """DeepSeek-V3 on 144 H800; `inference` adds to its own section."""
    load = {
        "input_length": 4096,
        "output_length": 512,
        "concurrency": 4096,
        "precision": "fp8",
        "engine": "sglang",
    }
    base: dict[str, Any] = {
        "kind": "inference",
        "model": "deepseek-v3",
        "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 144},
        "inference": load | (inference or {}),
        "parallel": {
            "tensor_parallel_size": 1,
            "expert_parallel_size": 144,
            "attention_data_parallel_size": 144,
        },
    }
    return schema.parse_query(base | changes)


def test_left_out_second_copies_are_the_fewest_and_an_answer_asks_for_itself_again() -> None:
    found = serving.estimate(query=query())
    assert found.feasible and found.parallel is not None and found.parallel.redundant_experts == 32
    again = query(parallel=schema.to_dict(found.parallel))
    assert serving.estimate(query=again) == found
    more = serving.estimate(
        query=query(parallel=schema.to_dict(replace(found.parallel, redundant_experts=176)))
    )
    assert more.memory is not None and found.memory is not None
    assert more.memory.weights_bytes > found.memory.weights_bytes
    assert more.expert_imbalance is not None and found.expert_imbalance is not None
    assert 1.0 <= more.expert_imbalance <= found.expert_imbalance


@pytest.mark.parametrize("redundant", [0, 31, 33])
def test_slots_that_are_not_equal_are_refused_with_what_would_do(redundant: int) -> None:
    sizes = {
        "tensor_parallel_size": 1,
        "expert_parallel_size": 144,
        "attention_data_parallel_size": 144,
    }
    found = serving.estimate(
        query=query(parallel=sizes | {"redundant_experts": redundant}), with_fixes=False
    )
    (reason,) = found.reasons
    assert reason.code == "experts_not_divisible" and "remove redundant_experts" in reason.message


def test_a_dense_model_has_neither_experts_nor_what_belongs_to_them() -> None:
    dense = {"model": "llama-3.1-8b", "parallel": {"tensor_parallel_size": 8}}
    for name, value in (("expert_imbalance", 1.5), ("two_batch_overlap", True)):
        with pytest.raises(InputError) as caught:
            serving.estimate(query=query(inference={name: value}, **dense))
        assert caught.value.field == f"inference.{name}"
    found = serving.estimate(
        query=query(
            model="llama-3.1-8b", parallel={"tensor_parallel_size": 8, "redundant_experts": 8}
        )
    )
    assert found.reasons[0].code == "experts_not_divisible" and found.expert_imbalance is None


def test_a_recommendation_spans_nodes_and_says_its_second_copies() -> None:
    rows = serving.recommend(
        query=query(parallel={"expert_parallel_size": [16, 18, 144]})
    ).recommendations
    assert rows and all(row.parallel.expert_parallel_size > 8 for row in rows)
    assert all(
        (256 + row.parallel.redundant_experts) % row.parallel.expert_parallel_size == 0
        for row in rows
    )
    few = serving.recommend(query=query(parallel={"redundant_experts": [0, 32]})).recommendations
    assert {row.parallel.redundant_experts for row in few} <= {0, 32}


def test_vllm_is_recommended_experts_on_all_ranks_or_undivided() -> None:
    rows = serving.recommend(
        query=query(inference={"engine": "vllm"}, parallel={}), top=50
    ).recommendations
    ranks = [
        row.parallel.tensor_parallel_size * row.parallel.attention_data_parallel_size
        for row in rows
    ]
    assert all(
        row.parallel.expert_parallel_size in (1, n) for row, n in zip(rows, ranks, strict=True)
    )


def test_pools_of_experts_have_the_sizes_asked_for_and_share_the_devices() -> None:
    sizes = {
        "prefill_expert_parallel_size": 32,
        "prefill_attention_data_parallel_size": 32,
        "prefill_tensor_parallel_size": 1,
        "decode_expert_parallel_size": [72, 64],
        "decode_attention_data_parallel_size": [72, 64],
        "decode_tensor_parallel_size": 1,
    }
    found = serving.rank_pools(query=query(inference={"disaggregated": sizes}, parallel={}))
    assert found
    for row in found:
        assert (row.prefill.expert_parallel_size, row.prefill.attention_data_parallel_size) == (
            32,
            32,
        )
        e = row.decode.expert_parallel_size
        assert e in (64, 72) and row.decode.redundant_experts == -256 % e
        used = [
            pool.replicas * pool.tensor_parallel_size * pool.attention_data_parallel_size
            for pool in (row.prefill, row.decode)
        ]
        assert sum(used) == row.estimate.num_gpus <= 144
        answered = row.estimate.request_rate_per_second
        assert row.estimate.prefill_tokens_per_second_per_gpu * used[0] == pytest.approx(
            answered * 4096
        )
        assert row.estimate.decode_tokens_per_second_per_gpu * used[1] == pytest.approx(
            answered * 512
        )


def test_left_free_pools_of_experts_spread_them_over_attention_groups() -> None:
    answer = answers.answer_recommend(query(inference={"disaggregated": {}}, parallel={}), top=3)
    assert answer.disaggregated
    assert all(row.decode.expert_parallel_size > 1 for row in answer.disaggregated)


def test_pools_settle_where_their_rates_meet_and_every_request_is_in_flight() -> None:
    """Bisection reads a table for experts; what it settles on is held to exact passes."""
    sizes = {
        "decode_expert_parallel_size": 32,
        "decode_attention_data_parallel_size": 32,
        "decode_tensor_parallel_size": 1,
    }
    for load in (64, 1000, 20_000):
        asked = query(inference={"disaggregated": sizes, "concurrency": load}, parallel={})
        for row in serving.rank_pools(query=asked):
            found = row.estimate
            assert found.request_rate_per_second * found.request_latency_s == pytest.approx(load)
            assert (
                found.prefill_busy <= 1.0 + 1e-2
                and found.decode_batch <= found.max_decode_batch * (1.0 + 1e-9)
            )
            decoding = row.decode.replicas * found.decode_batch
            assert decoding / (511 * found.tpot_s) == pytest.approx(
                found.request_rate_per_second, rel=1e-9
            )
            assert found.ttft_s > found.transfer_s > 0.0
