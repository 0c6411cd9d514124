"""Dynamic against static context parallelism: the right sign, and no gain where there is none to be
had.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.lengths import dynamic
from hp_tool.cost.lengths.dynamic import (
    ContextComparison,
    MicroBatchClock,
    compare_context_parallelism,
)
from hp_tool.cost.lengths.imbalance import PART, with_imbalance
from hp_tool.cost.lengths.sequences import LengthDistribution, packed_rows
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, RecomputeName
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload, VariableLengthWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange.export import export
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.schema import parse_query, query_mapping, to_dict
from hp_tool.questions.training import estimate, recommend
from tests.cost.cases import case_of

ROW = 32_768


def clock(
    *,
    p: int = 1,
    c: int = 4,
    d: int = 2,
    v: int = 1,
    recompute: RecomputeName = "none",
    name: str = "llama-3-8b",
) -> MicroBatchClock:
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=2 * p * c * d))
    return MicroBatchClock(
        case=case_of(
            model=model(name),
            cluster=machine,
            workload=TrainingWorkload(sequence_length=ROW, global_batch_size=8 * d),
        ),
        config=ParallelConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=p,
            virtual_pipeline_parallel_size=v,
            context_parallel_size=c,
            data_parallel_size=d,
            sequence_parallel=True,
            recompute=recompute,
        ),
    )


def lengths(*values: int) -> LengthDistribution:
    return LengthDistribution.from_counts(name="test", lengths=values, counts=[1.0] * len(values))


def compared(*values: int, **config: int) -> ContextComparison:
    return compare_context_parallelism(clock=clock(**config), distribution=lengths(*values))  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 2)])
def test_full_rows_take_what_the_plain_model_says(p: int, v: int, recompute: RecomputeName) -> None:
    """Every micro-batch a row of one sequence on the static group: the training cost model, part by
    part.
    """
    timer = clock(p=p, v=v, recompute=recompute)
    costs = training_costs(case=timer.case, candidates=Candidates.alone(timer.config))
    found = compare_context_parallelism(clock=timer, distribution=lengths(ROW))
    assert found.packed_s == found.balanced_s == found.dynamic_s
    assert found.dynamic_s == pytest.approx(float(costs.step_s), rel=1e-9)


def test_there_is_no_gain_where_every_sequence_needs_the_full_group() -> None:
    found = compared(ROW // 2 + 1, ROW // 4 * 3, ROW)
    assert found.gain == 1.0 and found.token_share == {4: 1.0}
    assert found.gain_over_packing >= 1.0


def test_short_sequences_need_no_ring() -> None:
    found = compared(512, 1024, 2048)
    assert found.gain > 1.0 and found.token_share == pytest.approx({1: 1.0})


@pytest.mark.parametrize(
    ("length", "group"), [(ROW // 4, 1), (ROW // 4 + 1, 2), (ROW // 2, 2), (ROW // 2 + 1, 4)]
)
def test_a_sequence_is_split_over_the_smallest_group_that_holds_it(length: int, group: int) -> None:
    """Four ranks hold a row, so each holds a quarter; groups are of one, two or four."""
    assert compared(length).token_share == {group: 1.0}


def test_the_gain_shrinks_as_sequences_grow() -> None:
    gains = [compared(length).gain for length in (ROW // 16, ROW // 4, ROW // 2, ROW)]
    assert gains == sorted(gains, reverse=True) and gains[-1] == 1.0


@settings(max_examples=15)
@given(
    st.lists(st.integers(256, ROW), min_size=1, max_size=12),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
)
def test_dynamic_is_never_slower_and_does_not_see_the_order(
    values: list[int], c: int, d: int
) -> None:
    found = compared(*values, c=c, d=d)
    assert found.packed_s >= found.balanced_s >= found.dynamic_s > 0
    assert found == compared(*sorted(values, reverse=True), c=c, d=d)
    assert sum(found.token_share.values()) == pytest.approx(1.0)
    if c == 1:
        assert found.gain == 1.0


def test_a_slower_network_raises_the_gain() -> None:
    timer = clock(c=8)  # groups of eight, two apart: over two servers
    slow = replace(
        timer.case.cluster,
        inter_node_bandwidth_bytes_per_second=timer.case.cluster.inter_node_bandwidth_bytes_per_second
        / 4,
    )
    short = lengths(512, 2048, ROW)
    usual = compare_context_parallelism(clock=timer, distribution=short)
    assert (
        compare_context_parallelism(
            clock=replace(timer, case=replace(timer.case, cluster=slow)), distribution=short
        ).gain
        > usual.gain
        > 1.0
    )


def test_seconds_grow_with_tokens_and_with_their_squares() -> None:
    timer = clock()
    sizes = np.full(3, 4)
    tokens = np.array([ROW / 2, ROW, ROW])
    seconds, between = timer.seconds(
        sizes=sizes, tokens=tokens, squares=np.array([1.0, 1.0, ROW]) * ROW
    )
    assert np.all(np.diff(seconds) > 0) and np.all(seconds > between)


def test_what_cannot_be_scheduled_is_refused_by_name() -> None:
    timer = clock()
    with pytest.raises(InputError, match="micro_batch_size"):
        doubled = replace(timer, config=replace(timer.config, micro_batch_size=2))
        compare_context_parallelism(clock=doubled, distribution=lengths(ROW))
    with pytest.raises(InputError, match="at most 262,144"):
        compare_context_parallelism(clock=timer, distribution=lengths(1))
    with pytest.raises(UnsupportedError, match="dense models"):
        clock(name="mixtral-8x7b")


@pytest.mark.parametrize("p", [1, 4])
def test_the_expected_wait_is_what_scheduled_steps_show(
    p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean rows and an expected maximum, against rows packed, timed and dealt out one by one."""
    monkeypatch.setattr(dynamic, "STEPS", 64)  # the mean maximum of eight is off by 1%
    timer = clock(c=1, d=16, p=p)
    mixed = lengths(*[1024] * 60, ROW)  # every third row is one long sequence
    rows = packed_rows(mixed, row_tokens=ROW)
    values = {
        field.name: getattr(timer.case.workload, field.name)
        for field in fields(timer.case.workload)
    }
    packed = VariableLengthWorkload(
        **values | {"packed": True}, row_tokens=rows.mean_tokens, row_squares=rows.mean_squares
    )
    case = replace(timer.case, workload=packed)
    one = Candidates.alone(timer.config)
    costs = with_imbalance(
        training_costs(case=case, candidates=one), rows=rows, case=case, candidates=one
    )
    assert costs.parts[PART] > 0.03 * costs.step_s
    found = compare_context_parallelism(clock=timer, distribution=mixed)
    assert found.packed_s == pytest.approx(costs.step_s, rel=0.02)


# The key of a query.


def asked(*, parallel: dict[str, Any], **training: Any) -> Query:
    sizes = {
        "sequence_length": ROW,
        "global_batch_size": 8,
        "packed": True,
        "sequence_lengths": "synthetic-code",
    }
    return parse_query(
        {
            "kind": "training",
            "model": "llama-3-8b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
            "training": sizes | training,
            "parallel": {"dynamic_context_parallel": True} | parallel,
        }
    )


SPLIT = {"tensor_parallel_size": 2, "context_parallel_size": 8, "recompute": "full"}


def test_an_estimate_is_shortened_by_the_gain_of_its_schedules() -> None:
    shorter, static = (
        estimate(query=asked(parallel=SPLIT | {"dynamic_context_parallel": on}), with_fixes=False)
        for on in (True, False)
    )
    assert shorter.time is not None and static.time is not None and shorter.parallel is not None
    assert (
        shorter.parallel.dynamic_context_parallel and not static.parallel.dynamic_context_parallel
    )  # type: ignore[union-attr]
    assert sum(shorter.time.parts_s.values()) == pytest.approx(shorter.time.step_s)
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=32))
    workload = TrainingWorkload(sequence_length=ROW, global_batch_size=8)
    timer = MicroBatchClock(
        case=case_of(model=model("llama-3-8b"), cluster=machine, workload=workload),
        config=replace(shorter.parallel, dynamic_context_parallel=None),
    )
    gain = compare_context_parallelism(
        clock=timer, distribution=sequence_lengths("synthetic-code")
    ).gain_over_packing
    assert gain > 1.05
    assert static.time.step_s / shorter.time.step_s == pytest.approx(gain)


def test_a_recommendation_ranks_what_it_shows_by_its_schedules_and_asks_for_the_same_again() -> (
    None
):
    query = asked(
        parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "recompute": "full"}
    )
    rows = recommend(query=query, top=3).recommendations
    steps = [row.expected_step_s for row in rows if row.expected_step_s is not None]
    assert len(steps) == 3 and steps == sorted(steps)
    first = rows[0]
    assert first.parallel.dynamic_context_parallel and first.parallel.micro_batch_size == 1
    again = estimate(query=Configuration.from_row(first, query=query).query, with_fixes=False)
    assert again.time == first.estimate.time


@pytest.mark.parametrize("exchange", [None, "p2p"])
def test_a_recommendation_states_its_gain_over_the_best_static_layout(exchange: str | None) -> None:
    parallel = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "recompute": "full",
        "context_parallel_size": 8,
    }
    parallel |= {"context_parallel_communication": exchange}
    grouped = recommend(query=asked(parallel=parallel), top=1).recommendations[0]
    static = recommend(
        query=asked(parallel=parallel | {"dynamic_context_parallel": None}), top=1
    ).recommendations[0]
    used = static.parallel.context_parallel_communication or "p2p"
    assert exchange in (None, used)
    assert static.expected_token_s is not None and grouped.expected_token_s is not None
    gain = static.expected_token_s / grouped.expected_token_s
    said = str(grouped.estimate.provenance["dynamic_context_parallel"])
    how = f"{gain:.2f}x faster" if gain >= 1.0 else f"{1.0 / gain:.2f}x slower"
    assert how in said and f"which exchanges by {used}" in said and "p2p only" in said


@pytest.mark.parametrize(
    ("parallel", "training", "field"),
    [
        (SPLIT, {"packed": False}, "parallel.dynamic_context_parallel"),
        (
            SPLIT | {"context_parallel_communication": "a2a"},
            {},
            "parallel.dynamic_context_parallel",
        ),
        (SPLIT | {"micro_batch_size": 2}, {}, "parallel.micro_batch_size"),
    ],
)
def test_what_schedules_do_not_cover_is_refused(
    parallel: dict[str, Any], training: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as caught:
        estimate(query=asked(parallel=parallel, **training))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("tool", "option"),
    [
        ("megatron-lm", "--max-seqlen-per-dp-cp-rank 4096"),
        ("nemo", "model.dynamic_context_parallel=true"),
    ],
)
def test_exports_ask_for_the_scheduler(tool: str, option: str) -> None:
    query = asked(parallel=SPLIT)
    answer = {"query": query_mapping(query), "estimate": to_dict(estimate(query=query))}
    assert option in export(result=answer, format=tool)
