"""Stages of unlike layers that take equally long: against every split, and against whole
pipelines.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import model
from hp_tool.cost.balanced_stages import balanced_chunks, layer_seconds, pipeline_seconds
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import training_costs
from hp_tool.domain.blocks import Block
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.parts import PER_MICRO_BATCH
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions import training
from tests.cost.cases import case_of

WORKLOAD = TrainingWorkload(sequence_length=4096, global_batch_size=64)
CLUSTER = ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)
WIDE_LAST = replace(
    model("llama-3-8b"),
    blocks=(Block(count=24, intermediate_size=4096), Block(count=8, intermediate_size=28672)),
)
"""A quarter of its layers, behind the others, takes nearly half of the time."""


def sums(seconds: np.ndarray[Any, Any], sizes: tuple[int, ...]) -> list[float]:
    ends = list(itertools.accumulate(sizes))
    return [float(seconds[end - size : end].sum()) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("ends_alone", [False, True])
def test_no_split_has_a_faster_slowest_part(ends_alone: bool) -> None:
    rng = np.random.default_rng(0)
    for parts in (2, 3, 4):
        seconds = rng.uniform(0.1, 3.0, size=11)
        every = [cut for cut in itertools.product(range(1, 11), repeat=parts) if sum(cut) == 11]
        every = [cut for cut in every if not ends_alone or len(set(cut[1:-1])) < 2]
        best = min(
            (max(each), sum(s * s for s in each)) for each in (sums(seconds, cut) for cut in every)
        )
        sizes = balanced_chunks(seconds, stages=parts, chunks=1, ends_alone=ends_alone)
        assert sizes is not None
        chosen = sums(seconds, tuple(sizes))
        assert (max(chosen), sum(s * s for s in chosen)) == pytest.approx(best)


def test_more_chunks_than_layers_have_no_split() -> None:
    assert balanced_chunks(np.ones(7), stages=4, chunks=2, ends_alone=False) is None
    assert balanced_chunks(np.ones(8), stages=2, chunks=2, ends_alone=True) is None


@pytest.mark.parametrize(
    "spec", [WIDE_LAST, replace(model("nemotron-3-nano-30b-a3b"), num_nextn_predict_layers=1)]
)
def test_layers_take_together_what_a_pipeline_of_one_stage_does(spec: ModelSpec) -> None:
    case = case_of(
        model=spec, workload=WORKLOAD, cluster=training.problem.catalogue_cluster(CLUSTER)
    )
    rows = Candidates.from_configs([ParallelConfig(data_parallel_size=8)])
    whole = training_costs(case=case, candidates=rows)
    expected = sum(float(whole.parts[name][0]) for name in PER_MICRO_BATCH) / (
        WORKLOAD.global_batch_size / 8
    )
    assert layer_seconds(case, rows)[0].sum() == pytest.approx(expected, rel=1e-9)


def test_a_pipeline_is_its_slowest_stage_and_one_pass_of_the_others() -> None:
    """Two stages of two chunks: 3 + 2 and 1 + 2 seconds; 4 micro-batches."""
    seconds = np.array([3.0, 1.0, 2.0, 1.0, 1.0])
    assert pipeline_seconds(seconds, [1, 1, 1, 2], stages=2, micro_batches=4.0) == pytest.approx(
        4 * 5.0 + 3.0 / 2
    )


def test_a_ranking_splits_unlike_layers_where_equal_stages_are_slower() -> None:
    """What it answers is what the query with its layout says, and faster than equal stages in the
    same configuration.
    """
    parallel = ParallelQuery(
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        virtual_pipeline_parallel_size=1,
        micro_batch_size=1,
        recompute="none",
        zero_stage=1,
        context_parallel_size=1,
    )
    query = Query(
        kind="training", model=WIDE_LAST, cluster=CLUSTER, training=WORKLOAD, parallel=parallel
    )
    best = training.recommend(query=query, top=1).recommendations[0]
    assert best.parallel.pipeline_layout is not None
    own = {
        name: getattr(best.parallel, name)
        for name in ("sequence_parallel", "pipeline_layout", "data_parallel_shard_size")
    }
    knobs: dict[str, Any] = {
        path.removeprefix("training."): value for path, value in best.set.items()
    }
    again = replace(query, parallel=replace(parallel, **own), training=replace(WORKLOAD, **knobs))
    equal = replace(again, parallel=replace(again.parallel, pipeline_layout=None))
    laid_out, even = (training.estimate(query=each, with_fixes=False) for each in (again, equal))
    assert laid_out.time is not None and even.time is not None and best.estimate.time is not None
    assert laid_out.time.step_s == best.estimate.time.step_s
    assert laid_out.time.step_s < 0.85 * even.time.step_s
    assert laid_out.provenance["blocks_by_stage"] != even.provenance["blocks_by_stage"]
