"""Copies of tokens against counting them one by one, and what each dispatcher sends where."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.moe import travelling_copies, used_share
from hp_tool.cost.network import neighbours
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.training.problem import usual_dispatcher
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
        hits += sum(any(expert < experts // parts for expert in pick) for pick in picks) / len(picks)
        total += 1.0
    return hits / total


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_shares_by_counting(parts: int, groups: int, kept: int, chosen: int) -> None:
    given = {"experts": 8, "chosen": chosen, "groups": groups, "kept": kept}
    if kept * 8 // groups < chosen:
        pytest.skip("too few experts in these groups")
    assert used_share(parts, **given) == pytest.approx(counted_share(parts, **given))


def test_copies_by_hand() -> None:
    """128 experts over two nodes of 8: a token's 8 experts are in both nodes but once in 320 times."""
    group = neighbours(16, cluster=NODES)
    near, away = travelling_copies(
        case=case_of(model=QWEN, workload=WORKLOAD, cluster=NODES), group=group, dispatcher="alltoall"
    )
    assert (near, away) == (8 * 7 / 16, 8 * 8 / 16)
    near, away = travelling_copies(case=case_of(model=QWEN, workload=WORKLOAD, cluster=NODES), group=group, dispatcher="flex")
    assert away == pytest.approx(1 - 0.0031, abs=1e-4)
    assert near == pytest.approx(2 * 7 * (1 - np.prod([(120 - i) / (128 - i) for i in range(8)])))


@settings(max_examples=100, deadline=None)
@given(
    chosen=st.integers(1, 16),
    size=st.sampled_from((1, 2, 4, 8, 16, 32, 64)),
    groups=st.sampled_from((None, 1, 4, 8)),
    stride=st.sampled_from((1, 2, 8)),
)
def test_flex_never_sends_more_between_nodes(chosen: int, size: int, groups: int | None, stride: int) -> None:
    shape = replace(QWEN, num_experts_per_tok=chosen, n_group=groups, topk_group=groups)
    group = neighbours(size, stride=stride, cluster=NODES)
    plain, flex = (
        travelling_copies(case=case_of(model=shape, workload=WORKLOAD, cluster=NODES), group=group, dispatcher=kind)
        for kind in ("alltoall", "flex")
    )
    assert 0.0 <= flex[1] <= plain[1] * (1 + 1e-12)
    assert flex[1] <= max(size * stride // 8 - 1, 0)
    if groups:
        near_nodes = replace(shape, topk_group=max(-(-chosen * groups // 128), groups // 4))
        limited = travelling_copies(
            case=case_of(model=near_nodes, workload=WORKLOAD, cluster=NODES), group=group, dispatcher="flex"
        )
        assert limited[1] <= flex[1] * (1 + 1e-12)
    together = travelling_copies(
        case=case_of(model=shape, workload=WORKLOAD, cluster=NODES),
        group=neighbours(np.array([size, 8]), stride=np.array([stride, 1]), cluster=NODES),
        dispatcher="flex",
    )
    assert (together[0][0], together[1][0]) == pytest.approx(flex)


def test_experts_across_nodes_cost_less_by_flex() -> None:
    config = ParallelConfig(expert_parallel_size=16, data_parallel_size=64)
    plain, flex = (
        training_costs(
            case=case_of(model=QWEN, workload=WORKLOAD, cluster=NODES, strategy=Strategy(moe_token_dispatcher_type=kind)),
            candidates=Candidates.alone(config),
        )
        for kind in ("alltoall", "flex")
    )  # fmt: skip
    assert flex.parts["expert_parallel"] < 0.5 * plain.parts["expert_parallel"]
    # What hides behind the exchange, or waits for the host meanwhile, may change with it.
    others = flex.parts.keys() - {"expert_parallel", "data_parallel", "overhead"}
    assert {name: flex.parts[name] for name in others} == {name: plain.parts[name] for name in others}
    assert flex.step_s < plain.step_s
    assert flex.memory_total_bytes == plain.memory_total_bytes


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, "alltoall"), ("25.11", "alltoall"), ("26.02", "alltoall"), ("26.02.01", "flex"), ("26.04", "flex"),
        ("0.15.3", "alltoall"), ("core_v0.16.1", "flex"), ("nightly", "alltoall"),
    ],
)  # fmt: skip
def test_the_release_decides_where_nothing_is_said(version: str | None, expected: str) -> None:
    assert usual_dispatcher(version) == expected
