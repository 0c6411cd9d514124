"""Pipeline schedules: the closed forms against the execution of every operation, and our orders
against torch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import violates_schedule
from hp_tool.cost.moe import merged_share
from hp_tool.cost.schedules.bubble import chunks_in_flight, split_bubble_share, waiting_in_flight
from hp_tool.cost.schedules.execution import (
    Operation,
    Order,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    timeline,
    zb_h1,
    zbv,
)
from hp_tool.domain.parallel import ParallelConfig
from tests.conftest import skip_or_fail

ORDERS: dict[str, Callable[..., list[Order]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zbv": zbv,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
seconds = st.floats(0.3, 2.0)


@st.composite
def legal(draw: st.DrawFn, name: str) -> tuple[ParallelConfig, int]:
    """A pipeline on which the schedule runs, and its micro-batches."""
    p = draw(st.sampled_from((2, 4, 6))) if name == "dualpipe" else draw(st.integers(2, 6))
    v = {"zbv": 2, "dualpipe-v": 2, "interleaved": draw(st.integers(2, 4))}.get(name, 1)
    if name == "interleaved":
        m = p * draw(st.integers(1, 4))
    elif name == "dualpipe":
        m = 2 * draw(st.integers(p, 2 * p))
    else:
        m = draw(
            st.integers({"zbv": 2 * p - 1, "zb-h1": p, "dualpipe-v": 2 * p}.get(name, 1), 4 * p)
        )
    schedule: Any = name if name not in ("1f1b", "interleaved") else None
    return ParallelConfig(
        pipeline_parallel_size=p, virtual_pipeline_parallel_size=v, pipeline_schedule=schedule
    ), m


def orders(name: str, config: ParallelConfig, m: int) -> list[Order]:
    chunks = {"v": config.virtual_pipeline_parallel_size} if name == "interleaved" else {}
    return ORDERS[name](p=config.pipeline_parallel_size, m=m, **chunks)


def makespan(ranks: list[Order], *, chunks: int, t_f: float, t_b: float, t_w: float) -> float:
    each = {"F": t_f / chunks, "B": t_b / chunks, "W": t_w / chunks, "BW": (t_b + t_w) / chunks}
    return max(
        spans[-1].end_s
        for spans in timeline(orders=ranks, seconds=lambda operation: each[operation.kind])
    )


def held(order: Order, *, waiting_share: float) -> float:
    """The most activations a rank holds: whole ones from F to B, that share of them from B to W."""
    held, most = 0.0, 0.0
    change = {"F": 1.0, "BW": -1.0, "B": waiting_share - 1.0, "W": -waiting_share}
    for block in order:
        held += sum(change[operation.kind] for operation in block if operation.kind == "F")
        most = max(most, held)
        held += sum(change[operation.kind] for operation in block if operation.kind != "F")
    return most


@pytest.mark.parametrize("name", ORDERS)
@given(st.data())
def test_every_micro_batch_passes_every_stage_once(name: str, data: st.DataObject) -> None:
    config, m = data.draw(legal(name))
    ranks = orders(name, config, m)
    done = sorted(
        (o.kind, o.stage, o.micro_batch) for rank in ranks for block in rank for o in block
    )
    stages = config.pipeline_parallel_size * config.virtual_pipeline_parallel_size
    for kind in ("F", "B", "W"):
        found = sorted((stage, k) for one, stage, k in done if kind in one)
        assert found == [(stage, k) for stage in range(stages) for k in range(m)]
    assert timeline(orders=ranks, seconds=lambda _: 1.0, transfer_s=0.5)  # nobody waits in a circle


@pytest.mark.parametrize("name", ORDERS)
@given(st.data(), seconds, seconds, seconds)
def test_bubble(name: str, data: st.DataObject, t_f: float, t_b: float, t_w: float) -> None:
    if name in (
        "zbv",
        "dualpipe",
        "dualpipe-v",
    ):  # formulas hold in the order that kernels have; elsewhere ZB-V's is a bound
        t_w, t_f, t_b = sorted((t_f, t_b, t_w))
    config, m = data.draw(legal(name))
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    found = makespan(orders(name, config, m), chunks=v, t_f=t_f, t_b=t_b, t_w=t_w) - m * (
        t_f + t_b + t_w
    )
    whole = (p - 1) * (t_f + t_b + t_w)
    expected = whole / v
    if name in ("zb-h1", "zbv", "dualpipe", "dualpipe-v"):
        share = split_bubble_share(
            Candidates.alone(config), forward=t_f, total=t_f + t_b + t_w, weight_gradient=t_w
        )
        expected = whole * share
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.data(), seconds, seconds, seconds)
def test_zbv_is_never_slower_than_said(
    data: st.DataObject, t_f: float, t_b: float, t_w: float
) -> None:
    config, m = data.draw(legal("zbv"))
    found = makespan(orders("zbv", config, m), chunks=2, t_f=t_f, t_b=t_b, t_w=t_w) - m * (
        t_f + t_b + t_w
    )
    whole = (config.pipeline_parallel_size - 1) * (t_f + t_b + t_w)
    share = split_bubble_share(
        Candidates.alone(config), forward=t_f, total=t_f + t_b + t_w, weight_gradient=t_w
    )
    assert found <= whole * share * (1 + 1e-9)


def test_published_bubbles() -> None:
    """arXiv 2401.10241: ZB-H1 a third of 1F1B's where all three take as long; 2412.19437 table 2:
    DualPipe.
    """
    equal = {"forward": 1.0, "total": 3.0, "weight_gradient": 1.0}
    eight = ParallelConfig(pipeline_parallel_size=8, pipeline_schedule="zb-h1")
    assert split_bubble_share(Candidates.alone(eight), **equal) == pytest.approx(1 / 3)
    dual = ParallelConfig(pipeline_parallel_size=8, pipeline_schedule="dualpipe")
    f, b, w = 1.0, 2.0, 1.0  # b: both backward passes
    assert 7 * 3 * split_bubble_share(Candidates.alone(dual), **equal) == pytest.approx(
        (8 / 2 - 1) * ((f + b) + b - 3 * w)
    )


@pytest.mark.parametrize("name", ORDERS)
@given(st.data(), st.floats(0.0, 1.0))
def test_activations_held(name: str, data: st.DataObject, waiting_share: float) -> None:
    config, m = data.draw(legal(name))
    p, c = config.pipeline_parallel_size, Candidates.alone(config)
    for rank, order in enumerate(orders(name, config, m)):
        from_end = p - 1 - rank
        whole = chunks_in_flight(c, from_end=from_end, micro_batches=float(m))  # type: ignore[arg-type]
        expected = whole + waiting_share * waiting_in_flight(c, from_end=from_end)
        assert held(order, waiting_share=waiting_share) == pytest.approx(float(expected))


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
@given(st.data())
def test_passes_that_run_together(name: str, data: st.DataObject) -> None:
    """The fewest forward passes that any rank runs in one block with a backward pass."""
    config, m = data.draw(legal(name))
    together = min(sum(len(block) == 2 for block in order) for order in orders(name, config, m))
    passes = m * config.virtual_pipeline_parallel_size
    share = merged_share(Candidates.alone(config), micro_batches=float(m), merges=False)
    first_in_the_middle = (
        config.pipeline_parallel_size == 2 and name == "dualpipe"
    )  # that rank starts with one pair apart
    assert together == pytest.approx(max(share * passes - first_in_the_middle, 0.0), abs=1e-9)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v"])
def test_legality_is_the_same_for_one_and_for_many(name: Any) -> None:
    configs = [
        ParallelConfig(
            pipeline_parallel_size=p, virtual_pipeline_parallel_size=v, pipeline_schedule=name
        )
        for p in (1, 2, 3, 4)
        for v in (1, 2)
    ]
    many = Candidates.from_configs(configs)
    for m in (1, 3, 7, 8, 16):
        batch = violates_schedule(many, num_layers=24, micro_batches=np.full(len(configs), m))
        alone = [
            violates_schedule(Candidates.alone(config), num_layers=24, micro_batches=m)
            for config in configs
        ]  # type: ignore[arg-type]
        assert list(np.asarray(batch)) == [bool(broken) for broken in alone]
        assert m < 16 or not all(alone)


@pytest.fixture(scope="module")
def torchs() -> Any:
    """torch's schedules, without its processes."""
    if not importlib.util.find_spec("torch"):
        skip_or_fail(component="MEGATRON", reason="torch (the profiler extra) is not installed")
    from torch.distributed.pipelining import schedules

    return schedules


def of_torch(schedules: Any, kind: str, *, p: int, stages: int, m: int) -> list[Order]:
    """The orders of one of torch's schedules, in our words."""
    words = {"F": "F", "B": "BW", "I": "B", "W": "W"}
    bare = SimpleNamespace(
        pp_group_size=p,
        num_stages=stages,
        _num_stages=stages,
        n_local_stages=stages // p,
        _n_microbatches=m,
        microbatches_per_round=p,
        number_of_rounds=m // p,
    )
    found = []
    for rank in range(p):
        actions = getattr(schedules, kind)._calculate_single_rank_operations(bare, rank)
        blocks = [action.sub_actions or (action,) for action in actions if action is not None]
        found.append(
            [
                tuple(
                    Operation(words[a.computation_type.value], a.stage_index, a.microbatch_index)
                    for a in block
                )
                for block in blocks
            ]
        )
    return found


def chunkwise(order: Order) -> list[Operation]:
    return [operation for block in order for operation in block]


@pytest.mark.components
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_orders_are_torchs(torchs: Any, p: int, m: int) -> None:
    assert zbv(p=p, m=m) == of_torch(torchs, "ScheduleZBVZeroBubble", p=p, stages=2 * p, m=m)
    assert dualpipe_v(p=p, m=m) == of_torch(torchs, "ScheduleDualPipeV", p=p, stages=2 * p, m=m)
    ours, theirs = (
        interleaved(p=p, v=2, m=m),
        of_torch(torchs, "ScheduleInterleaved1F1B", p=p, stages=2 * p, m=m),
    )
    assert [chunkwise(order) for order in ours] == [chunkwise(order) for order in theirs]


@pytest.mark.components
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_dualpipe_is_torchs_folded_in_the_middle(torchs: Any, p: int, m: int) -> None:
    """DualPipeV runs on half the ranks what DualPipe's first half runs: its second chunk is the
    mirrored rank's share.
    """
    folded = of_torch(torchs, "ScheduleDualPipeV", p=p // 2, stages=p, m=m // 2)
    for rank, order in enumerate(dualpipe(p=p, m=m)[: p // 2]):
        ours = [
            tuple((o.kind, o.stage, o.micro_batch % (m // 2)) for o in block) for block in order
        ]
        assert ours == [tuple(tuple(o) for o in block) for block in folded[rank]]


@pytest.mark.components
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
@pytest.mark.parametrize("t_w", [0.6, 1.0])
def test_zb_h1_takes_as_long_as_torchs(torchs: Any, p: int, m: int, t_w: float) -> None:
    """torch writes the same schedule for several chunks; with one it lets the same weight gradients
    wait.
    """
    theirs = of_torch(torchs, "ScheduleInterleavedZeroBubble", p=p, stages=p, m=m)
    ours = zb_h1(p=p, m=m)
    times = {"t_f": 1.0, "t_b": 1.2, "t_w": t_w}
    assert makespan(ours, chunks=1, **times) <= makespan(theirs, chunks=1, **times) * (1 + 1e-9)
    assert max(held(order, waiting_share=1.0) for order in ours) <= max(
        held(order, waiting_share=1.0) for order in theirs
    )
