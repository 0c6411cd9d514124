"""Experts while serving: slots and second copies, the busiest rank, hit experts and travelling
tokens against simulations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import engine_efficiency
from hp_tool.cost.matrices import attention_matrices, expert_matrices
from hp_tool.cost.matrix import entries
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.experts import busiest_share, hit_slots, imbalance, travelling_copies
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.legality import legality, rejection_counts
from hp_tool.cost.serving.memory import weight_bytes
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.serving.problem import serving_case

BALANCED = {"popularity_variance": 0.0, "load_variance": 0.0}


def case_of(
    name: str = "deepseek-v3", *, num_gpus: int = 128, gpu: str = "h800-sxm-80gb", **workload: Any
) -> ServingCase:
    """A mixture in fp8 under SGLang."""
    load = replace(
        InferenceWorkload(input_length=4096, output_length=1024, precision="fp8", engine="sglang"),
        **workload,
    )
    machine = cluster(ClusterQuery(gpu=gpu, num_gpus=num_gpus))
    return serving_case(
        model=model(name),
        cluster=machine,
        workload=load,
        engine=engine_efficiency(engine="sglang", version=None),
    )


def wide(e: int, *, redundant: int = 0, t: int = 1) -> ServingCandidates:
    """One replica whose ranks all hold different experts."""
    config = ServingConfig(
        tensor_parallel_size=t,
        attention_data_parallel_size=e // t,
        expert_parallel_size=e,
        redundant_experts=redundant,
        data_parallel_size=e // t,
    )
    return ServingCandidates.from_configs([config], concurrency=[1])


def of(*, decoding: float = 0.0, prompts: float = 0.0, length: float = 4096.0) -> Pass:
    one = np.ones(1)
    return Pass(
        tokens=(decoding + prompts * length) * one,
        decoding=decoding * one,
        prefill_requests=prompts * one,
    )


def routed(case: ServingCase, *, tokens: int, seed: int = 0) -> np.ndarray:
    """(tokens, k): experts that a uniform router with the model's limit on groups chooses."""
    shape, generator = case.model, np.random.default_rng(seed)
    experts, chosen = shape.num_experts or 1, shape.num_experts_per_tok or 1
    groups, kept = shape.n_group or 1, shape.topk_group or shape.n_group or 1
    scores = generator.random((tokens, groups, experts // groups))
    limited = generator.random((tokens, groups)).argsort(axis=1) < kept
    ranked = np.where(limited[:, :, None], scores, -1.0).reshape(tokens, experts)
    order: np.ndarray = ranked.argsort(axis=1)[:, -chosen:]
    return order


@given(
    st.sampled_from((8, 60, 64, 128, 256)),
    st.integers(1, 320),
    st.integers(0, 4),
    st.sampled_from((0.1, 0.5, 2.0)),
)
def test_more_second_copies_never_worsen_the_balance(
    experts: int, ranks: int, rounds: int, variance: float
) -> None:
    fewest = -experts % ranks
    one, more = (
        busiest_share(experts, fewest + k * ranks, ranks, variance) for k in (rounds, rounds + 1)
    )
    assert 1.0 - 1e-9 <= more <= one <= ranks


def test_a_copy_of_the_most_popular_expert_helps() -> None:
    plain, copied = busiest_share(256, 0, 128, 0.2), busiest_share(256, 128, 128, 0.2)
    assert copied < 1.0 + 0.7 * (plain - 1.0)


@given(
    st.sampled_from(("deepseek-v3", "qwen3-235b-a22b", "mixtral-8x7b")),
    st.integers(1, 200),
    st.integers(0, 4),
)
def test_second_copies_never_take_less_memory(name: str, e: int, rounds: int) -> None:
    case = case_of(name)
    fewest = -(case.model.num_experts or 1) % e
    rows = [wide(e, redundant=fewest + k * e) for k in (rounds, rounds + 1)]
    few_bytes, more_bytes = (float(weight_bytes(case, row)[0]) for row in rows)
    expert = entries(expert_matrices(case.model)) / (case.model.num_experts or 1)
    assert more_bytes - few_bytes == pytest.approx(
        case.model.moe_layers * expert * case.expert_bytes, rel=1e-6
    )


def test_256_experts_on_144_ranks_need_32_second_copies() -> None:
    case = case_of(num_gpus=144)
    found = {
        r: int(
            legality(
                model=case.model, num_gpus=144, candidates=wide(144, redundant=r), longest_request=1
            )[0]
        )
        for r in (0, 31, 32, 176)
    }
    assert found[32] == found[176] == 0 and found[0] and found[31]
    assert not legality(
        model=case.model, num_gpus=320, candidates=wide(320, redundant=64), longest_request=1
    )[0]


@pytest.mark.parametrize(("leading", "legal"), [(0, True), (1, False)])
def test_a_width_that_no_layer_has_need_not_divide(leading: int, legal: bool) -> None:
    """A dense MLP of odd width, which only leading dense layers have, on two tensor-parallel
    ranks.
    """
    odd = replace(
        model("mixtral-8x7b"),
        intermediate_size=14337,
        moe_intermediate_size=14336,
        first_k_dense_replace=leading,
    )
    candidates = ServingCandidates.from_configs(
        [ServingConfig(tensor_parallel_size=2)], concurrency=[1]
    )
    code = legality(model=odd, num_gpus=2, candidates=candidates, longest_request=1)
    assert rejection_counts(code) == ({} if legal else {"hidden_not_divisible": 1})


@pytest.mark.parametrize(
    ("name", "e"),
    [("deepseek-v3", 8), ("deepseek-v3", 16), ("deepseek-v3", 64), ("qwen3-235b-a22b", 32)],
)
def test_travelling_copies_are_those_of_routed_tokens(name: str, e: int) -> None:
    case = case_of(name, num_gpus=e)
    experts = case.model.num_experts or 1
    low, normal = travelling_copies(case, wide(e))
    each, near, far = (float(np.sum(value)) for value in (low, *normal))
    ranks = routed(case, tokens=4000) // (experts // e)  # of tokens that start on any rank alike
    own = np.random.default_rng(1).integers(e, size=4000)
    quick = np.mean((ranks != own[:, None]).sum(axis=1))
    domain = case.cluster.nvlink_domain_size
    nodes = [set((row // domain).tolist()) for row in ranks]
    through = np.mean(
        [len(found - {start // domain}) for found, start in zip(nodes, own.tolist(), strict=True)]
    )
    # Over NVLink: from the rank where it starts, or arrives, in each domain: one of the same place.
    inside = np.mean(
        [
            len({rank for rank in set(row.tolist()) if rank % domain != start % domain})
            for row, start in zip(ranks, own.tolist(), strict=True)
        ]
    )
    assert each == pytest.approx(quick, rel=0.02)
    assert (float(low[1][0]) == 0.0) == (
        e <= domain
    )  # several domains: each copy goes through the network
    assert far == pytest.approx(through, rel=0.03, abs=1e-9)
    assert near == pytest.approx(inside, rel=0.03)


def test_ranks_that_share_experts_get_a_token_once() -> None:
    case = case_of(num_gpus=16)
    config = ServingConfig(
        tensor_parallel_size=8, attention_data_parallel_size=2, data_parallel_size=2
    )
    low, normal = travelling_copies(case, ServingCandidates.from_configs([config], concurrency=[1]))
    assert (
        [float(value[0]) for value in low] == [float(value[0]) for value in normal] == [14.0, 1.0]
    )


@pytest.mark.parametrize("tokens", [1, 4, 32, 256])
def test_hit_experts_and_the_busiest_rank_are_those_of_a_balanced_router(tokens: int) -> None:
    case = case_of("qwen3-235b-a22b", num_gpus=8)
    even = replace(case, experts=replace(case.experts, **BALANCED))
    # Tensor parallelism beside it: one scheduler's tokens for all eight ranks.
    row = ServingCandidates.from_configs(
        [ServingConfig(tensor_parallel_size=8, expert_parallel_size=8)], concurrency=[1]
    )
    draws = [routed(even, tokens=tokens, seed=seed) for seed in range(200)]
    hit = np.mean([len(np.unique(draw)) for draw in draws]) / 8
    found = hit_slots(even, row, np.array([float(tokens)]), np.ones(1))
    assert found[0] == pytest.approx(hit, rel=0.05)
    busiest = (
        np.mean([np.bincount((draw // 16).ravel(), minlength=8).max() for draw in draws]) / tokens
    )
    assert imbalance(even, row, np.array([float(tokens)]))[0] == pytest.approx(busiest, rel=0.35)


@given(
    st.sampled_from((8, 32, 128)),
    st.sampled_from((1.0, 16.0, 128.0)),
    st.sampled_from((None, True, False)),
)
def test_a_step_takes_at_least_its_bytes(e: int, batch: float, overlap: bool | None) -> None:
    """Weights of attention and of hit experts are read from memory once, whatever hides behind
    them.
    """
    case = case_of(num_gpus=e, two_batch_overlap=overlap)
    row, one = wide(e), np.array([batch])
    factor = imbalance(case, row, one)
    read = entries(attention_matrices(case.model)) * case.weight_bytes
    expert = entries(expert_matrices(case.model)) / 256 * case.expert_bytes
    layers = case.model.moe_layers * (read + hit_slots(case, row, 0.5 * one, factor) * expert)
    least = layers / case.cluster.gpu.memory_bandwidth_bytes_per_second
    assert forward_seconds(case, row, of(decoding=batch), context=4096.0)[0] >= least[0]


def test_two_batches_hide_what_travels_and_are_taken_where_they_are_faster() -> None:
    decode, prefill = of(decoding=128.0), of(prompts=4.0)
    for batch, e in ((decode, 128), (prefill, 32)):
        plain, both, free = (
            float(
                forward_seconds(
                    case_of(num_gpus=e, two_batch_overlap=overlap), wide(e), batch, context=4096.0
                )[0]
            )
            for overlap in (False, True, None)
        )
        assert both < 0.87 * plain and free == pytest.approx(both)
    small = of(decoding=1.0)
    plain, both, free = (
        float(
            forward_seconds(
                case_of(num_gpus=128, two_batch_overlap=overlap), wide(128), small, context=4096.0
            )[0]
        )
        for overlap in (False, True, None)
    )
    assert free == pytest.approx(min(plain, both))


def test_a_fixed_imbalance_stands_for_both_popularity_and_chance() -> None:
    case, one = case_of(expert_imbalance=1.0), np.array([64.0])
    assert imbalance(case, wide(128), one)[0] == 1.0
    twice = replace(case, expert_imbalance=2.0)
    even, uneven = (
        forward_seconds(each, wide(128), of(decoding=128.0), context=4096.0)[0]
        for each in (case, twice)
    )
    assert uneven > even


def test_four_bit_experts_leave_attention_in_16_bits_and_widen_where_no_arithmetic_is() -> None:
    hopper = case_of("gpt-oss-120b", num_gpus=1, gpu="h200-sxm-141gb", precision="mxfp4")
    one = ServingCandidates.from_configs([ServingConfig()], concurrency=[1])
    assert (hopper.weight_bytes, hopper.expert_bytes) == (2.0, 0.5 + 1.0 / 32)
    assert hopper.expert_precision == hopper.compute_precision == "bf16"
    # 65.2e9 bytes are published, and the experts' hidden size is padded from 2,880 to 3,072.
    assert weight_bytes(hopper, one)[0] == pytest.approx(64.4 * 2**30, rel=0.01)
    blackwell = case_of("gpt-oss-120b", num_gpus=1, gpu="b200-sxm-180gb", precision="nvfp4")
    assert blackwell.expert_precision == "nvfp4" and blackwell.compute_precision == "bf16"
