"""How published runs are asked plainly: what is left open, and whose recipe is named. No measured
file is needed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.accuracy.plain_recipe import named_cases, plain_cases, todays_cases
from benchmarks.accuracy.prepared import Prepared
from evidence.cases import Case
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.answers import answer_estimate

CASE = Case(
    name="llama-3-70b",
    what="a run",
    source="DGX Cloud benchmarks",
    step_s=10.0,
    query=Query(
        kind="training",
        model="llama-3-70b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64),
        training=TrainingWorkload(
            sequence_length=8192,
            global_batch_size=128,
            precision="fp8",
            gradient_precision="bf16",
            cross_entropy="fused",
            framework_version="24.11",
        ),
        parallel=ParallelQuery(
            tensor_parallel_size=4, pipeline_parallel_size=8, virtual_pipeline_parallel_size=5
        ),
    ),
)


def test_a_plain_question_leaves_knobs_open_and_says_the_layout() -> None:
    (plain,) = plain_cases([CASE])
    training, parallel = plain.query.training, plain.query.parallel
    assert training is not None and (training.precision, training.global_batch_size) == ("fp8", 128)
    assert (
        training.gradient_precision,
        training.cross_entropy,
        training.framework_version,
        training.recipe,
    ) == (None,) * 4
    assert parallel == replace(CASE.query.parallel, zero_stage=1, recompute="none")
    assert (plain.step_s, plain.what) == (CASE.step_s, CASE.what)


@pytest.mark.parametrize(
    ("source", "release", "recipe", "version"),
    [
        ("Megatron Bridge and NeMo", "26.04.01", "megatron-bridge-26.04", None),
        ("Megatron Bridge and NeMo", "25.10", "megatron-bridge-25.09", "25.10"),
        ("DGX Cloud benchmarks", "24.11", "megatron-bridge-25.09", "24.11"),
        ("MLPerf Training", "24.06", "mlperf-training-5.0", "24.06"),
    ],
)
def test_a_run_is_of_its_release_s_recipe_or_names_its_release(
    source: str, release: str, recipe: str, version: str | None
) -> None:
    assert CASE.query.training is not None
    query = replace(CASE.query, training=replace(CASE.query.training, framework_version=release))
    (named,) = named_cases([replace(CASE, source=source, query=query)])
    assert named.query.training is not None
    assert (named.query.training.recipe, named.query.training.framework_version) == (
        recipe,
        version,
    )


def test_today_s_recipe_predicts_what_the_answer_states_beside() -> None:
    (plain,), (todays,) = plain_cases([CASE]), todays_cases([CASE])
    answer = answer_estimate(plain.query).estimate
    assert isinstance(answer, Estimate) and answer.with_recipe is not None
    assert Prepared.from_case(todays).shipped().predicted == pytest.approx(
        answer.with_recipe.step_s, rel=1e-12
    )


def test_fits_see_the_layout_that_a_recipe_sets() -> None:
    """The recipe of 25.09 runs 8B on H100 in fp8 under ZeRO 3."""
    training = TrainingWorkload(
        sequence_length=8192, global_batch_size=128, precision="fp8", recipe="megatron-bridge-25.09"
    )
    cluster = ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)
    query = Query(
        kind="training",
        model="llama-3-8b",
        cluster=cluster,
        training=training,
        parallel=ParallelQuery(),
    )
    assert (
        Prepared.from_case(replace(CASE, name="llama-3-8b", query=query)).candidate.zero_stage == 3
    )
