"""Pipelines whose ends hold fewer layers: Llama 3.1 405B (126) on 8 stages of 8 chunks, DeepSeek-V3
(61) on 16 stages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.pipeline_stages import complete_pipeline
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.pipeline_layout import (
    chunk_layers,
    layout_text,
    parse_layout,
    splits_unevenly,
    stage_layers,
    v_stage_layers,
)
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions import anatomy
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import config_query, estimate
from hp_tool.questions.training.problem import resolve_training
from hp_tool.space import default_axes
from tests.cost.cases import case_of

WORKLOAD = TrainingWorkload(sequence_length=8192, global_batch_size=512)


def asked(name: str, **parallel: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
        # NVIDIA's recipes set grad_reduce_in_fp32 to False; with fp32 this one would need 75.8 GiB.
        "training": {
            "sequence_length": 8192,
            "global_batch_size": 512,
            "precision": "fp8",
            "gradient_precision": "bf16",
        },
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8, **parallel},
    }
    return estimate(query=parse_query(query))


def test_405b_runs_as_its_makers_ran_it() -> None:
    result = asked("llama-3.1-405b", virtual_pipeline_parallel_size=8, context_parallel_size=2)
    assert result.feasible, result.reasons
    assert result.time is not None and sum(result.time.parts_s.values()) == pytest.approx(
        result.time.step_s
    )


def test_the_layers_of_all_stages_add_up() -> None:
    shape = model("llama-3.1-405b")
    pipeline = complete_pipeline(
        case_of(model=shape, workload=WORKLOAD),
        Candidates.alone(
            ParallelConfig(pipeline_parallel_size=8, virtual_pipeline_parallel_size=8)
        ),
    )
    counts = [stage.layers.count for stage in pipeline.stages]
    assert (
        counts == [15, 15, 16, 16] and pipeline.critical.count == 16
    )  # both ends, the second stage, the last but one
    assert [stage.rank for stage in pipeline.stages] == [0, 7, 1, 6]
    assert counts[0] + 6 * counts[2] + counts[1] == shape.num_hidden_layers
    assert total_parameters(shape) == pytest.approx(405.9e9, rel=1e-3)


def test_deepseek_v3_is_split_as_megatron_bridge_splits_it() -> None:
    """Its layouts of (16, 1), (8, 2) and (4, 4) stages and chunks: 4 layers in each, one in the
    last; of (4, 1): 13 there.
    """
    for stages, chunks in ((16, 1), (8, 2), (4, 4)):
        assert chunk_layers(num_layers=61, stages=stages, chunks=chunks, begins_dense=True) == [
            *[4] * 15,
            1,
        ]
    assert chunk_layers(num_layers=61, stages=4, chunks=1, begins_dense=True) == [16, 16, 16, 13]
    shape = model("deepseek-v3")
    pipeline = complete_pipeline(
        case_of(model=shape, workload=WORKLOAD),
        Candidates.alone(ParallelConfig(pipeline_parallel_size=16)),
    )
    first, last = pipeline.ends
    counts = first.layers.count, pipeline.critical.count, last.layers.count
    assert counts == (4, 4, 1 + 1)  # and one that predicts another token
    assert (first.layers.expert_share, pipeline.critical.expert_share) == (0.25, 1.0)


@given(
    layers=st.integers(1, 200),
    stages=st.integers(1, 64),
    chunks=st.integers(1, 8),
    begins_dense=st.booleans(),
)
def test_what_is_a_pipeline_holds_every_layer_once(
    layers: int, stages: int, chunks: int, begins_dense: bool
) -> None:
    """In chunks that differ by one layer, but for the ends of stages with one chunk; none is empty
    but for the ends'.
    """
    sizes = {"num_layers": layers, "stages": stages, "chunks": chunks, "begins_dense": begins_dense}
    even = layers % (stages * chunks) == 0
    if not even and not splits_unevenly(num_layers=layers, stages=stages, chunks=chunks):
        assert stages == 1 or layers <= stages * chunks  # some stage or chunk would have none
        return
    held = chunk_layers(**sizes)
    by_stage = [sum(held[rank::stages]) for rank in range(stages)]
    assert (
        len(held) == stages * chunks
        and sum(held) == layers
        and min(by_stage) > 0
        and min(held) >= 0
    )
    assert min(held[1:-1], default=1) > 0 and max(held) - min(held[1:-1], default=max(held)) <= 1
    assert (by_stage[0], by_stage[-1], max(by_stage)) == stage_layers(**sizes)
    if len(held) > 1:
        assert [
            chunk.layers for chunk in parse_layout(layout_text(**sizes, mtp_layers=1)).chunks
        ] == held


@pytest.mark.parametrize(
    ("name", "parallel", "layout"),
    [
        ("bloom-176b", {"pipeline_parallel_size": 12}, "Et*5|(t*6|)*10t*5L"),
        ("llama-2-70b", {"pipeline_parallel_size": 12}, "Et*5|(t*7|)*10t*5L"),
        ("gpt-22b", {"pipeline_parallel_size": 7}, "Et*7|(t*7|)*5t*6L"),
        ("llama-2-70b", {"pipeline_parallel_size": 32}, "Ett|(tt|)*7(t*3|)*16(tt|)*7ttL"),
        (
            "deepseek-v3",
            {"pipeline_parallel_size": 4, "virtual_pipeline_parallel_size": 4},
            "Et*4|(t*4|)*14tmL",
        ),
        ("llama-3.1-405b", {"virtual_pipeline_parallel_size": 8}, "Et|(tt|)*62tL"),
    ],
)
def test_an_answer_names_the_layout_and_takes_it_back(
    name: str, parallel: dict[str, Any], layout: str
) -> None:
    answer = asked(name, **parallel)
    assert answer.parallel is not None and answer.parallel.pipeline_layout == layout
    again = asked(name, **parallel, pipeline_layout=layout)
    assert again.parallel == answer.parallel and (again.memory, again.time) == (
        answer.memory,
        answer.time,
    )


def test_even_stages_and_layouts_of_ones_own_are_answered_as_they_are() -> None:
    assert asked("gpt3-175b").parallel.pipeline_layout is None  # type: ignore[union-attr]
    own = "Et*11|(t*12|)*6t*13L"
    assert asked("gpt3-175b", pipeline_layout=own).parallel.pipeline_layout == own  # type: ignore[union-attr]


def test_bloom_runs_as_its_makers_ran_it() -> None:
    """384 A100, TP 4, PP 12, 16-bit gradients, everything recomputed (arXiv 2211.05100 section
    3.5).
    """
    query = {
        "kind": "training",
        "model": "bloom-176b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 384},
        "training": {
            "sequence_length": 2048,
            "global_batch_size": 2048,
            "attention": "unfused",
            "gradient_precision": "bf16",
        },
        "parallel": {
            "tensor_parallel_size": 4,
            "pipeline_parallel_size": 12,
            "micro_batch_size": 2,
            "recompute": "full",
            "sequence_parallel": False,
        },
    }
    result = estimate(query=parse_query(query))
    assert result.feasible, result.reasons


@pytest.mark.parametrize(
    ("name", "num_gpus", "stages"),
    [("deepseek-v3", 2048, 16), ("llama-3.1-405b", 16384, 16), ("llama-3-70b", 64, 8)],
)
def test_they_are_tried_where_a_query_says_nothing(name: str, num_gpus: int, stages: int) -> None:
    query = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus},
        "training": {"sequence_length": 4096, "global_batch_size": 16384},
    }
    problem = resolve_training(parse_query(query))
    axes = default_axes(case=problem, query=problem.parallel)
    assert stages in axes.pipeline_parallel_size


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("gpt-22b", {"pipeline_parallel_size": 64}),
        ("gpt-22b", {"virtual_pipeline_parallel_size": 7}),
        ("gpt-22b", {"pipeline_parallel_size": 10, "pipeline_schedule": "zbv"}),
    ],
)
def test_stages_without_layers_and_folded_schedules_stay_illegal(
    name: str, parallel: dict[str, Any]
) -> None:
    assert "layers_not_divisible" in {reason.code for reason in asked(name, **parallel).reasons}


DEEPSEEK = {
    "kind": "training",
    "model": "deepseek-v3",
    "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 2048},
    "training": {
        "sequence_length": 4096,
        "global_batch_size": 15360,
        "precision": "fp8",
        "optimizer_precision": "bf16",
    },
    "parallel": {
        "pipeline_parallel_size": 16,
        "expert_parallel_size": 64,
        "micro_batch_size": 1,
        "moe_token_dispatcher_type": "flex",
        "recompute": {"granularity": "selective", "modules": ["mla_up_proj", "moe_act"]},
    },
}


def scheduled(
    schedule: str | None,
    *,
    num_hidden_layers: int = 61,
    num_nextn_predict_layers: int = 1,
    **parallel: Any,
) -> Estimate:
    """DeepSeek-V3 with this schedule, and with so many layers."""
    shape = replace(
        model("deepseek-v3"),
        num_hidden_layers=num_hidden_layers,
        num_nextn_predict_layers=num_nextn_predict_layers,
    )
    query = DEEPSEEK | {
        "model": to_dict(shape),
        "parallel": DEEPSEEK["parallel"] | {"pipeline_schedule": schedule} | parallel,  # type: ignore[operator]
    }
    return estimate(query=parse_query(query), with_fixes=False)


@pytest.mark.parametrize(
    ("schedule", "parallel"),
    [
        ("dualpipe", {}),
        ("dualpipe-v", {"pipeline_parallel_size": 8, "virtual_pipeline_parallel_size": 2}),
    ],
)
def test_dualpipe_takes_uneven_stages_and_hides_the_exchange(
    schedule: str, parallel: dict[str, Any]
) -> None:
    plain, dual = (
        scheduled("zb-h1", **parallel | {"virtual_pipeline_parallel_size": 1}),
        scheduled(schedule, **parallel),
    )
    for one in (plain, dual):
        assert one.time is not None and {reason.code for reason in one.reasons} <= {"memory"}
        assert sum(one.time.parts_s.values()) == pytest.approx(one.time.step_s)
    assert dual.time is not None and plain.time is not None and dual.parallel is not None
    # The slowest stage of the plain one is the last, with three layers of experts; of the other a
    # full one, with four.
    assert (
        dual.time.parts_s["expert_parallel"] / 4 < 0.5 * plain.time.parts_s["expert_parallel"] / 3
    )
    again = DEEPSEEK | {"parallel": to_dict(config_query(dual.parallel))}
    assert estimate(query=parse_query(again), with_fixes=False).time == dual.time, (
        "the answer is valid input"
    )


def test_dualpipe_keeps_two_stages_of_each_rank() -> None:
    plain, dual = scheduled("zb-h1"), scheduled("dualpipe")
    assert plain.parallel is not None and dual.memory is not None
    inner = anatomy.stage_anatomies(
        problem=resolve_training(parse_query(DEEPSEEK)), config=plain.parallel
    )[5]
    assert inner.layers == 4 and dual.memory.worst_stage == 1, (
        "four layers each, where no end of the model is"
    )
    assert dual.memory.weights_bytes == pytest.approx(2 * inner.memory_bytes["weights"])


def test_ends_of_a_folded_pipeline_wait_as_far_as_they_lack_layers() -> None:
    """Predicting another token takes no longer on ranks that lack layers, and it does where all
    stages are full.
    """
    for layers, longer in ((61, False), (64, True)):
        seconds = []
        for depths in (0, 1):
            found = scheduled("dualpipe", num_hidden_layers=layers, num_nextn_predict_layers=depths)
            assert found.time is not None
            seconds.append(found.time.parts_s["compute"])
        assert (seconds[1] > 1.05 * seconds[0]) == longer
        assert longer or seconds[1] == pytest.approx(seconds[0])


@given(layers=st.integers(4, 130), p=st.integers(2, 16), begins_dense=st.booleans())
def test_stages_of_a_v_are_its_chunks(layers: int, p: int, begins_dense: bool) -> None:
    if not splits_unevenly(num_layers=layers, stages=p, chunks=2) and layers % (2 * p):
        return
    sizes = chunk_layers(num_layers=layers, stages=p, chunks=2, begins_dense=begins_dense)
    each = [sizes[rank] + sizes[2 * p - 1 - rank] for rank in range(p)]
    found = v_stage_layers(num_layers=layers, stages=p, chunks=2, begins_dense=begins_dense)
    assert found == (each[0], each[-1], max(each))
