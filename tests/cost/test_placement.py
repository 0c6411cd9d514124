"""Groups of ranks against Megatron Core's own, and what topology does to them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.network import (
    Axis,
    Group,
    axis_members_in_block,
    checked_order,
    dense_group,
    expert_group,
    members_in_block,
)
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.errors import InputError
from tests.conftest import skip_or_fail

SIZES = st.sampled_from((1, 2, 3, 4))
ORDERS = st.sampled_from(
    ["-".join(names) for names in itertools.permutations(("tp", "cp", "ep", "dp", "pp"))]
)


@functools.cache
def rank_generator() -> Any:
    """Megatron Core's, which needs no process group."""
    try:
        from megatron.core.parallel_state import RankGenerator
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")
    return RankGenerator


def ordered(order: str) -> ClusterSpec:
    return replace(cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)), rank_order=order)


def members(group: Group) -> list[int]:
    """The group that rank 0 is in."""
    offsets = [[index * axis.stride for index in range(axis.size)] for axis in group.axes]
    return sorted(sum(parts) for parts in itertools.product(*offsets))


@pytest.mark.components
@given(SIZES, SIZES, SIZES, SIZES, ORDERS)
def test_groups_are_megatrons(t: int, c: int, d: int, p: int, order: str) -> None:
    config = ParallelConfig(
        tensor_parallel_size=t,
        context_parallel_size=c,
        data_parallel_size=d,
        pipeline_parallel_size=p,
        expert_parallel_size=c * d,
        expert_tensor_parallel_size=t,
    )
    candidate = Candidates.alone(config)
    dense = rank_generator()(tp=t, ep=1, dp=d, pp=p, cp=c, order=order)
    for names in (
        ("tp",),
        ("cp",),
        ("dp",),
        ("pp",),
        ("dp", "cp"),
        ("tp", "pp"),
        ("tp", "cp", "dp"),
    ):
        found = dense_group(candidate, *names, cluster=ordered(order))
        assert members(found) == sorted(dense.get_ranks("-".join(names))[0]), names
    experts = rank_generator()(tp=t, ep=c * d, dp=1, pp=p, cp=1, order=order)
    for names in (("tp",), ("ep",), ("dp",), ("pp",), ("tp", "ep")):
        found = expert_group(candidate, *names, cluster=ordered(order))
        assert members(found) == sorted(experts.get_ranks("-".join(names))[0]), names


@pytest.mark.components
@given(SIZES, SIZES, SIZES, ORDERS, st.sampled_from((4, 6, 8, 12)))
def test_the_short_side_of_a_block_is_counted(
    t: int, d: int, p: int, order: str, block: int
) -> None:
    """No group has fewer members in a block that it touches than `sharing` says."""
    config = ParallelConfig(tensor_parallel_size=t, data_parallel_size=d, pipeline_parallel_size=p)
    generator = rank_generator()(tp=t, ep=1, dp=d, pp=p, cp=1, order=order)
    for name in ("tp", "dp", "pp"):
        group = dense_group(Candidates.alone(config), name, cluster=ordered(order))
        counted = members_in_block(group, block=block)
        pieces = [
            sum(rank // block == home for rank in ranks)
            for ranks in generator.get_ranks(name)
            for home in {rank // block for rank in ranks}
        ]
        assert counted <= min(pieces)
        if (t * d * p) % block == 0 and block % (group.size * group.axes[0].stride) == 0:
            assert counted == group.size == min(pieces)


@pytest.mark.parametrize(
    ("size", "stride", "block", "expected"),
    [
        (8, 1, 8, 8),
        (16, 4, 8, 2),
        (8, 8, 8, 1),
        (64, 1, 72, 8),  # groups of 64 in a rack of 72: some have 8 members on one side
        (72, 1, 72, 72),
        (36, 2, 72, 36),
        (6, 1, 8, 2),  # ranks 6 to 11 have two in the first node
    ],
)
def test_sharing_by_hand(size: int, stride: int, block: int, expected: int) -> None:
    assert axis_members_in_block(Axis(size, stride), block) == expected


def test_left_out_dimensions_follow_tensor_parallelism() -> None:
    assert checked_order("tp-pp-dp") == "tp-cp-ep-pp-dp"
    assert checked_order("pp-tp-cp-ep-dp") == "pp-tp-cp-ep-dp"


@pytest.mark.parametrize("order", ["tp-dp", "tp-tp-dp-pp", "tp-dp-pp-xp", "", "dp-pp-tp-"])
def test_an_order_that_is_none_is_refused(order: str) -> None:
    with pytest.raises(InputError) as caught:
        checked_order(order)
    assert caught.value.field == "parallel.rank_order"


def test_replicas_beside_stages_lie_further_apart() -> None:
    """dp and cp on both sides of pp make two axes, together as many ranks as before."""
    config = ParallelConfig(
        tensor_parallel_size=2,
        context_parallel_size=2,
        data_parallel_size=4,
        pipeline_parallel_size=4,
    )
    candidate = Candidates.alone(config)
    apart = dense_group(candidate, "cp", "dp", cluster=ordered("tp-cp-ep-pp-dp"))
    together = dense_group(candidate, "cp", "dp", cluster=ordered("tp-cp-ep-dp-pp"))
    assert [(axis.size, axis.stride) for axis in apart.axes] == [(2, 2), (4, 16)]
    assert [(axis.size, axis.stride) for axis in together.axes] == [(8, 2)]
    assert apart.size == together.size
    assert (members_in_block(apart, block=8), members_in_block(together, block=8)) == (2, 4)
