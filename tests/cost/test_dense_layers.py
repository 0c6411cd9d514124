"""Models with dense layers before those with experts: what a swap of layers does to the step, and
where its stages lie.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import models
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.stage_contents import pipeline_contents
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate

STAGE_PARTS = (
    "compute",
    "attention",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "overhead",
)
GLM = {
    "name": "glm-4.5",
    "architecture": "decoder",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "vocab_size": 151552,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}


def shape(name: str, **fields: Any) -> dict[str, Any]:
    """A model's fields, some replaced."""
    if name == "glm-4.5":
        return GLM | fields
    return {
        key: value
        for key, value in dataclasses.asdict(models.model(name)).items()
        if value is not None
    } | fields


def answer(
    model: dict[str, Any],
    *,
    stages: int,
    layout: str | None = None,
    training: Any = None,
    **parallel: Any,
) -> Any:
    """The estimate on 64 devices a stage; memory aside."""
    axes = {"pipeline_parallel_size": stages, "expert_parallel_size": 32} | parallel
    query = {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 64 * stages},
        "training": {"sequence_length": 4096, "global_batch_size": 64 * 128, "precision": "bf16"}
        | (training or {}),
        "parallel": axes | ({"pipeline_layout": layout} if layout else {}),
    }
    return estimate(query=parse_query(query), with_fixes=False)


def layer_seconds(model: dict[str, Any], *, layers_on_stage: int, **question: Any) -> float:
    """The longest a layer takes over all micro-batches, with its exchange and the reduction of its
    gradients.
    """
    longest = 0.0
    for dense in (0, model["num_hidden_layers"]):
        parts = answer(model | {"first_k_dense_replace": dense}, **question).time.parts_s
        repeated = sum(parts[name] for name in STAGE_PARTS) / layers_on_stage
        longest = max(longest, repeated + parts["data_parallel"] + parts["optimizer"])
    return longest


SWAPS = [
    *(("deepseek-v3", {"stages": stages}) for stages in (1, 2, 16, 61)),
    *(
        ("deepseek-v3", {"stages": stages, "pipeline_schedule": "dualpipe"})
        for stages in (2, 30, 60)
    ),
    *(("deepseek-v3", {"stages": stages, "pipeline_schedule": "dualpipe-v"}) for stages in (2, 30)),
    *(("glm-4.5", {"stages": stages, "pipeline_schedule": "zbv"}) for stages in (2, 46)),
    *((name, {"stages": 9}) for name in ("kimi-k2", "glm-4.5")),
    ("deepseek-v3", {"stages": 8, "virtual_pipeline_parallel_size": 3}),
    ("glm-4.5", {"stages": 4, "virtual_pipeline_parallel_size": 23}),
    ("glm-4.5", {"stages": 8, "virtual_pipeline_parallel_size": 2, "recompute": "full"}),
    ("deepseek-v3", {"stages": 16, "tensor_parallel_size": 8, "training": {"optimizer": "muon"}}),
]
"""For each schedule: few stages, many, and one layer per stage or chunk; each model once."""


@pytest.mark.parametrize(("name", "question"), SWAPS, ids=str)
@pytest.mark.parametrize("depths", [0, 1])
def test_a_swapped_layer_moves_the_step_by_no_more_than_its_own_time(
    name: str, question: dict[str, Any], depths: int
) -> None:
    model = shape(name, num_nextn_predict_layers=depths)
    layers = model["num_hidden_layers"]
    limit = layer_seconds(model, layers_on_stage=-(-layers // question["stages"]), **question)
    counts = sorted(
        {
            0,
            1,
            2,
            3,
            4,
            5,
            layers // 3,
            layers // 2,
            layers // 2 + 1,
            layers - 3,
            layers - 2,
            layers - 1,
            layers,
        }
    )
    if layers % (question["stages"] * question.get("virtual_pipeline_parallel_size", 1)):
        counts = counts[1:-1]  # layers of one kind are split otherwise
    steps = [
        answer(model | {"first_k_dense_replace": dense}, **question).time.step_s for dense in counts
    ]
    for (one, one_s), (other, other_s) in itertools.pairwise(zip(counts, steps, strict=True)):
        assert abs(other_s - one_s) <= (other - one) * limit, (one, other)


EQUAL = [
    *(("deepseek-v3", 64, stages) for stages in (8, 64)),
    ("kimi-k2", 60, 30),
    ("glm-4.5", 96, 24),
]
"""(model, layers, stages): equally many layers on each stage."""


@pytest.mark.parametrize("schedule", [None, "dualpipe", "dualpipe-v", "zbv"])
@pytest.mark.parametrize(("name", "layers", "stages"), EQUAL, ids=str)
def test_a_few_dense_layers_save_their_turn_alone_while_other_stages_have_experts(
    name: str, layers: int, stages: int, schedule: str | None
) -> None:
    """Stages without dense layers go on setting the pace: what is saved is in the bubble, once for
    all micro-batches.
    """
    if schedule in ("zbv", "dualpipe-v") and layers % (2 * stages):
        pytest.skip("a V has two chunks a stage")
    model = shape(
        name, num_hidden_layers=layers, num_nextn_predict_layers=0, vocab_size=1024
    )  # ends that set no pace
    question = {"stages": stages, "pipeline_schedule": schedule}
    without, usual = (
        answer(model | {"first_k_dense_replace": dense}, **question).time for dense in (0, 3)
    )
    for part in ("compute", "expert_parallel", "attention"):
        assert usual.parts_s[part] == pytest.approx(without.parts_s[part], rel=0.03)
    assert (
        0.0
        <= without.step_s - usual.step_s
        <= without.parts_s["pipeline_bubble"] + 0.03 * without.step_s
    )


LAID_OUT = [
    (2, 1, 64),
    (5, 1, 60),
    (64, 1, 64),
    (8, 2, 64),
    (8, 8, 64),
    (2, 8, 64),
]
"""(stages, chunks, layers)."""


@pytest.mark.parametrize(("stages", "chunks", "layers"), LAID_OUT, ids=str)
@pytest.mark.parametrize("dense", [1, 5, 17, 59])
@pytest.mark.parametrize(
    "wide", [18432, 200_000], ids=["experts are slower", "dense layers are slower"]
)
def test_stages_cost_what_the_same_stages_cost_written_out(
    stages: int, chunks: int, layers: int, dense: int, wide: int
) -> None:
    """A layout is costed stage by stage, so it says which stage is the slowest, which the fullest,
    and what all others add.
    """
    model = shape(
        "deepseek-v3", num_hidden_layers=layers, first_k_dense_replace=dense, intermediate_size=wide
    )
    marks = ["t" * (layers // stages // chunks)] * (stages * chunks)
    layout = "|".join(["E" + marks[0], *marks[1:-1], marks[-1] + "mL"])
    plain = answer(model, stages=stages, virtual_pipeline_parallel_size=chunks)
    laid_out = answer(model, stages=stages, virtual_pipeline_parallel_size=chunks, layout=layout)
    names = (*STAGE_PARTS, "pipeline_bubble")
    assert sum(plain.time.parts_s[name] for name in names) == pytest.approx(
        sum(laid_out.time.parts_s[name] for name in names), rel=2e-3
    )
    assert plain.time.step_s == pytest.approx(laid_out.time.step_s, rel=5e-3)
    if chunks == 1:
        assert plain.memory.worst_stage == laid_out.memory.worst_stage
        assert plain.memory.total_bytes == pytest.approx(laid_out.memory.total_bytes, rel=1e-9)


def test_no_candidates_have_no_dense_layers() -> None:
    """As where a ranking has no legal configuration."""
    none = Candidates.from_configs(
        [ParallelConfig(), ParallelConfig(pipeline_parallel_size=4)]
    ).take(np.array([], dtype=np.intp))
    contents = pipeline_contents(models.model("deepseek-v3"), none, late=False)
    assert contents.between == ()
    assert {np.shape(kind) for kind in (*contents.first, *contents.last)} == {(0,)}
