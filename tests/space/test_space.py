"""The enumerated space: every legal configuration once, and every other one counted."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hp_tool.catalog import cluster, model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.space import Axes, Space, default_axes, legal_chunks
from tests.cost.cases import Problem, case_of, problems, rows


def whole_space(*, axes: Axes, case: Problem) -> Space:
    chunks = list(legal_chunks(axes=axes, case=case))
    counts = sum((chunk.rejections for chunk in chunks), Counter())
    return Space(
        candidates=Candidates.concatenate([chunk.candidates for chunk in chunks]), rejections=counts
    )


def spaces(problem: Problem, query: ParallelQuery) -> tuple[Axes, Space]:
    axes = default_axes(query=query, case=problem)
    return axes, whole_space(axes=axes, case=problem)


@given(problems())
def test_no_duplicates_all_legal_and_no_knob_without_effect(
    case: tuple[Problem, ParallelConfig],
) -> None:
    problem, _ = case
    _, space = spaces(problem, ParallelQuery(sequence_parallel=(False, True)))
    candidates = space.candidates
    assert len(set(rows(candidates))) == len(candidates) > 0
    assert not legality(case=problem, candidates=candidates).any()
    assert not candidates.sequence_parallel[candidates.tensor_parallel_size == 1].any()
    alone = candidates.data_parallel_size * candidates.context_parallel_size == 1
    assert len(np.unique(candidates.zero_stage[alone])) <= 1


@given(problems())
def test_a_legal_configuration_is_in_the_space(case: tuple[Problem, ParallelConfig]) -> None:
    problem, config = case
    if config.data_parallel_size == 1:
        config = ParallelConfig(
            **{f: getattr(config, f) for f in config.__slots__} | {"zero_stage": 1}
        )
    query = ParallelQuery(
        sequence_parallel=(False, True), recompute=("none", "selective", "full", config.recompute)
    )  # type: ignore[arg-type]
    _, space = spaces(problem, query)
    found = [space.candidates.config(index) for index in range(len(space.candidates))]
    assert found.count(config) == 1


def test_it_is_the_product_of_the_axes_filtered_by_the_rules() -> None:
    """Against a plain loop over every combination."""
    shape, machine = model("gpt-22b"), cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=16))
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=48)
    case = case_of(model=shape, cluster=machine, workload=workload)
    query = ParallelQuery(
        tensor_parallel_size=(1, 2, 3, 4),
        pipeline_parallel_size=(1, 2, 4),
        micro_batch_size=(1, 2, 3, 5),
        context_parallel_size=1,
    )
    axes = default_axes(case=case, query=query)
    space = whole_space(case=case, axes=axes)
    expected = set()
    for t, p, v, b, z in itertools.product(
        (1, 2, 3, 4), (1, 2, 4), axes.virtual_pipeline_parallel_size, (1, 2, 3, 5), (0, 1)
    ):
        d = 16 // (t * p)
        legal = t * p * d == 16 and 64 % t == 0 and 48 % (p * v) == 0 and 48 % (d * b) == 0
        legal = legal and (v == 1 or (p > 1 and 48 // (d * b) % p == 0))
        if legal and not (d == 1 and z == 0):
            expected |= {(t, p, v, d, b, int(t > 1), recompute, z) for recompute in range(3)}
    c = space.candidates
    found = zip(
        c.tensor_parallel_size,
        c.pipeline_parallel_size,
        c.virtual_pipeline_parallel_size,
        c.data_parallel_size,
        c.micro_batch_size,
        c.sequence_parallel,
        c.recompute_method,
        c.zero_stage,
        strict=True,
    )
    assert {tuple(map(int, row)) for row in found} == expected
    assert len(c) == len(expected)


def test_every_combination_turned_away_is_counted() -> None:
    """With one value per free axis each combination breaks one rule or is legal."""
    shape, machine = model("gpt-22b"), cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=16))
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=48)
    case = case_of(model=shape, cluster=machine, workload=workload)
    query = ParallelQuery(
        tensor_parallel_size=(1, 2, 3),
        pipeline_parallel_size=1,
        virtual_pipeline_parallel_size=1,
        micro_batch_size=(1, 2, 3),
        context_parallel_size=1,
        recompute="none",
        zero_stage=1,
    )
    axes = default_axes(case=case, query=query)
    space = whole_space(case=case, axes=axes)
    # t=3 does not divide 16 devices: one group. t=1: d=16, 16 b divides 48 for b = 1, 3. t=2: d=8,
    # b = 1, 2, 3 all divide.
    assert space.rejections == {"world_size_mismatch": 1, "batch_not_divisible": 1}
    assert len(space.candidates) == 5


def test_an_empty_space_is_empty_and_says_why() -> None:
    shape, machine = model("gpt-22b"), cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=16))
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=48)
    case = case_of(model=shape, cluster=machine, workload=workload)
    axes = default_axes(case=case, query=ParallelQuery(tensor_parallel_size=3))
    space = whole_space(case=case, axes=axes)
    assert len(space.candidates) == 0 and set(space.rejections) == {"world_size_mismatch"}


def test_a_space_that_cannot_be_held_is_refused_before_it_is_built() -> None:
    shape, machine = model("gpt-22b"), cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=64))
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=64)
    case = case_of(model=shape, cluster=machine, workload=workload)
    query = ParallelQuery(
        micro_batch_size=tuple(range(1, 20_000)),
        virtual_pipeline_parallel_size=tuple(range(1, 20_000)),
    )
    axes = default_axes(case=case, query=query)
    with pytest.raises(InputError) as caught:
        whole_space(case=case, axes=axes)
    assert caught.value.code == "space_too_large"


@given(problems())
def test_legality_does_not_depend_on_recomputation_and_zero_stage(
    case: tuple[Problem, ParallelConfig],
) -> None:
    """What lets them be combined after the filter."""
    problem, config = case
    others = [
        replace(config, recompute=recompute, zero_stage=stage)
        for recompute in ("none", "selective", "full")
        for stage in range(4)
    ]
    codes = legality(case=problem, candidates=Candidates.from_configs([config, *others]))
    assert len(np.unique(codes)) == 1


@pytest.mark.parametrize("size", [1, 7, 500, 100_000])
def test_chunks_of_any_size_make_up_the_same_space(size: int) -> None:
    shape, machine = model("mixtral-8x7b"), cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=16))
    workload = TrainingWorkload(sequence_length=16384, global_batch_size=24)
    query = ParallelQuery(
        zero_stage=(0, 1, 3), sequence_parallel=(False, True), micro_batch_size=(1, 5)
    )
    case = case_of(model=shape, cluster=machine, workload=workload)
    axes = default_axes(query=query, case=case)
    whole = whole_space(axes=axes, case=case)
    chunks = list(legal_chunks(axes=axes, case=case, size=size))
    assert max(len(chunk.candidates) for chunk in chunks) <= max(size, len(axes.recompute) * 4)
    # The order differs: configurations without replicas have grids of their own.
    assert sorted(rows(whole.candidates)) == sorted(
        row for chunk in chunks for row in rows(chunk.candidates.take(slice(None)))
    )
    assert sum((chunk.rejections for chunk in chunks), Counter()) == whole.rejections
