"""Copies of tokens against counting them one by one, and what each dispatcher sends where."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.block import BlockTime, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.moe import expert_hit_probability, expert_kernels, travelling_copies
from hp_tool.cost.network import adjacent_group, group_ring
from hp_tool.cost.roofline import elementwise_seconds
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training.releases import default_dispatcher
from tests.cost.cases import case_of

NODES = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64))
WORKLOAD = TrainingWorkload(sequence_length=4096, global_batch_size=512)
QWEN = model("qwen3-30b-a3b")


def counted_share(parts: int, *, experts: int, chosen: int, groups: int, kept: int) -> float:
    """The same by going through every choice of groups and experts."""
    hits = total = 0.0
    per_group = experts // groups
    for some in itertools.combinations(range(groups), kept):
        eligible = [group * per_group + one for group in some for one in range(per_group)]
        picks = list(itertools.combinations(eligible, chosen))
        hits += sum(any(expert < experts // parts for expert in pick) for pick in picks) / len(
            picks
        )
        total += 1.0
    return hits / total


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("chosen", [1, 3])
def test_shares_by_counting(parts: int, groups: int, kept: int, chosen: int) -> None:
    given = {"experts": 8, "chosen": chosen, "groups": groups, "kept": kept}
    if kept * 8 // groups < chosen:
        pytest.skip("too few experts in these groups")
    assert expert_hit_probability(parts, **given) == pytest.approx(counted_share(parts, **given))


def test_copies_by_hand() -> None:
    """128 experts over two nodes of 8: a token's 8 experts are in both nodes but once in 320
    times.
    """
    group = adjacent_group(16, cluster=NODES)
    near, away = travelling_copies(
        case=case_of(model=QWEN, workload=WORKLOAD, cluster=NODES),
        group=group,
        dispatcher="alltoall",
    )
    assert (near, away) == (8 * 7 / 16, 8 * 8 / 16)
    near, away = travelling_copies(
        case=case_of(model=QWEN, workload=WORKLOAD, cluster=NODES), group=group, dispatcher="flex"
    )
    assert away == pytest.approx(1 - 0.0031, abs=1e-4)
    assert near == pytest.approx(2 * 7 * (1 - np.prod([(120 - i) / (128 - i) for i in range(8)])))


def routed(
    generator: np.random.Generator,
    *,
    tokens: int,
    experts: int,
    chosen: int,
    groups: int,
    kept: int,
) -> Any:
    """The experts of each token as DeepSeek-V3 picks them, the best of the best groups, by even
    scores; (tokens, chosen).
    """
    scores = generator.random((tokens, groups, experts // groups))
    best_groups = np.argsort(generator.random((tokens, groups)), axis=1)[:, :kept]
    allowed = np.zeros((tokens, groups, 1), dtype=bool)
    np.put_along_axis(allowed[:, :, 0], best_groups, values=True, axis=1)
    return np.argsort(-np.where(allowed, scores, -1.0).reshape(tokens, experts), axis=1)[:, :chosen]


@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "kept", "size"),
    [
        (256, 8, 8, 4, 64),
        (256, 8, 8, 4, 16),
        (128, 8, 1, 1, 16),
        (128, 4, 1, 1, 64),
        (512, 10, 1, 1, 32),
        (64, 6, 1, 1, 8),
    ],
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "flex"])
def test_copies_of_simulated_tokens(
    experts: int, chosen: int, groups: int, kept: int, size: int, dispatcher: Any
) -> None:
    """Tokens routed one by one: what leaves the first rank, by link; from a forwarded copy the
    node's other ranks get theirs over NVLink.
    """
    tokens, domain = 4000, 8
    picks = routed(
        np.random.default_rng(7),
        tokens=tokens,
        experts=experts,
        chosen=chosen,
        groups=groups,
        kept=kept,
    )
    ranks = picks // (experts // size)
    near = away = 0
    for one in ranks.tolist():
        if dispatcher == "alltoall":
            near += sum(0 < rank < domain for rank in one)
            away += sum(rank >= domain for rank in one)
            continue
        nodes = {rank // domain for rank in one}
        away += len(nodes - {0})
        # In each node the copy arrives at the rank with the sender's place, the node's first.
        near += sum(rank % domain != 0 for rank in set(one))
    shape = replace(
        QWEN, num_experts=experts, num_experts_per_tok=chosen, n_group=groups, topk_group=kept
    )
    said = travelling_copies(
        case=case_of(model=shape, workload=WORKLOAD, cluster=NODES),
        group=adjacent_group(size, cluster=NODES),
        dispatcher=dispatcher,
    )
    assert (near / tokens, away / tokens) == pytest.approx(said, rel=0.03, abs=0.02)


def test_what_travels_in_8_bits_goes_there_and_not_back() -> None:
    """One of a pass's two exchanges takes 1 + 4/128 bytes an element instead of 2."""
    config = ParallelConfig(expert_parallel_size=64, data_parallel_size=64)
    profile = case_of(model=QWEN, workload=WORKLOAD, cluster=NODES).profile
    quick = replace(profile.framework.network, latency_s=0.0)
    free = replace(
        profile,
        framework=replace(profile.framework, network=quick),
        gpu=replace(profile.gpu, all_to_all=replace(profile.gpu.all_to_all, latency_s=0.0)),
    )
    still = replace(NODES, inter_node_latency_s=0.0)
    wide, narrow = (
        training_costs(
            case=replace(
                case_of(
                    model=QWEN, workload=replace(WORKLOAD, dispatch_precision=kind), cluster=still
                ),
                profile=free,
            ),
            candidates=Candidates.alone(config),
        ).parts["expert_parallel"]
        for kind in ("bf16", "fp8")
    )
    assert narrow / wide == pytest.approx((2.0 + 1.0 + 4.0 / 128.0) / 4.0)


def test_an_all_gather_sends_every_token_to_every_rank() -> None:
    config = ParallelConfig(expert_parallel_size=8, data_parallel_size=64)
    found = {
        kind: training_costs(
            case=case_of(
                model=QWEN,
                workload=WORKLOAD,
                cluster=NODES,
                strategy=Strategy(moe_token_dispatcher_type=kind),
            ),
            candidates=Candidates.alone(config),
        ).parts["expert_parallel"]
        for kind in ("alltoall", "allgather")
    }
    group = adjacent_group(8, cluster=NODES)
    case = case_of(model=QWEN, workload=WORKLOAD, cluster=NODES)
    each = group_ring(machine=case, group=group).seconds(4096 * 2048 * 2.0 * 7)
    assert found["allgather"] == pytest.approx(8 * 48 * 4 * each), (
        "8 micro-batches, 48 layers, two exchanges a pass"
    )
    assert found["allgather"] != found["alltoall"]


@given(
    chosen=st.integers(1, 16),
    size=st.sampled_from((1, 2, 4, 8, 16, 32, 64)),
    groups=st.sampled_from((None, 1, 4, 8)),
    stride=st.sampled_from((1, 2, 8)),
)
def test_flex_never_sends_more_between_nodes(
    chosen: int, size: int, groups: int | None, stride: int
) -> None:
    shape = replace(QWEN, num_experts_per_tok=chosen, n_group=groups, topk_group=groups)
    group = adjacent_group(size, stride=stride, cluster=NODES)
    plain, flex = (
        travelling_copies(
            case=case_of(model=shape, workload=WORKLOAD, cluster=NODES),
            group=group,
            dispatcher=kind,
        )
        for kind in ("alltoall", "flex")
    )
    assert 0.0 <= flex[1] <= plain[1] * (1 + 1e-12)
    assert flex[1] <= max(size * stride // 8 - 1, 0)
    if groups:
        near_nodes = replace(shape, topk_group=max(-(-chosen * groups // 128), groups // 4))
        limited = travelling_copies(
            case=case_of(model=near_nodes, workload=WORKLOAD, cluster=NODES),
            group=group,
            dispatcher="flex",
        )
        assert limited[1] <= flex[1] * (1 + 1e-12)
    together = travelling_copies(
        case=case_of(model=shape, workload=WORKLOAD, cluster=NODES),
        group=adjacent_group(np.array([size, 8]), stride=np.array([stride, 1]), cluster=NODES),
        dispatcher="flex",
    )
    assert (together[0][0], together[1][0]) == pytest.approx(flex)


def test_experts_across_nodes_cost_less_by_flex() -> None:
    config = ParallelConfig(expert_parallel_size=16, data_parallel_size=64)
    plain, flex = (
        training_costs(
            case=case_of(
                model=QWEN,
                workload=WORKLOAD,
                cluster=NODES,
                strategy=Strategy(moe_token_dispatcher_type=kind),
            ),
            candidates=Candidates.alone(config),
        )
        for kind in ("alltoall", "flex")
    )
    assert flex.parts["expert_parallel"] < 0.5 * plain.parts["expert_parallel"]
    # What hides behind the exchange, or waits for the host meanwhile, may change with it.
    others = flex.parts.keys() - {"expert_parallel", "data_parallel", "overhead", "compute"}
    assert flex.parts["compute"] < plain.parts["compute"]  # nothing is sorted again
    assert {name: flex.parts[name] for name in others} == {
        name: plain.parts[name] for name in others
    }
    assert flex.step_s < plain.step_s
    assert flex.memory_total_bytes == plain.memory_total_bytes


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "alltoall"),
        ("25.11", "alltoall"),
        ("26.02", "alltoall"),
        ("26.02.01", "flex"),
        ("26.04", "flex"),
        ("0.15.3", "alltoall"),
        ("core_v0.16.1", "flex"),
        ("nightly", "alltoall"),
    ],
)
def test_the_release_decides_where_nothing_is_said(version: str | None, expected: str) -> None:
    assert default_dispatcher(version) == expected


@pytest.mark.parametrize(("ep", "sorted_again"), [(8, True), (128, False)])
def test_what_arrives_by_ranks_is_sorted_by_experts(ep: int, sorted_again: bool) -> None:
    """Under alltoall two passes over every copy on its way to the experts and two back, read and
    written, in each direction.
    """
    case = case_of(
        model=QWEN,
        workload=WORKLOAD,
        cluster=cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=128)),
    )

    def layer(dispatcher: str) -> BlockTime:
        config = ParallelConfig(
            data_parallel_size=128,
            expert_parallel_size=ep,
            moe_token_dispatcher_type=dispatcher,  # type: ignore[arg-type]
        )
        candidate = Candidates.alone(config)
        return expert_kernels(
            case=case, candidates=candidate, s=shapes(case=case, candidates=candidate)
        )

    by_ranks, by_experts = layer("alltoall"), layer("flex")
    copies = elementwise_seconds(4.0 * 4096 * 8 * QWEN.hidden_size * 2.0, machine=case, kernels=0.0)
    for name in ("elementwise", "elementwise_backward"):
        more = getattr(by_ranks, name) - getattr(by_experts, name)
        assert more == pytest.approx(copies * sorted_again, abs=1e-12)
