"""Quantised matmuls: scaling factors, passes over memory, and what is kept in which width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, model
from hp_tool.cost.block import Shapes, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.layer import layer_time
from hp_tool.cost.matrices import layer_matrices
from hp_tool.cost.matrix import entries
from hp_tool.cost.optimizer import bytes_per_parameter, stage_bytes
from hp_tool.cost.precision import cast_traffic, quantized_bytes
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import LoraSpec, TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.cost.cases import Problem, case_of, problems

FP8 = TrainingWorkload(sequence_length=4096, global_batch_size=8, precision="fp8")
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 8},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
    "parallel": {},
}


def asked(*, gpu: str | None = None, **training: Any) -> Estimate:
    query = QUERY | {"training": QUERY["training"] | training}
    if gpu is not None:
        query |= {"cluster": QUERY["cluster"] | {"gpu": gpu}}
    return estimate(query=parse_query(query), with_fixes=False)


@pytest.mark.parametrize(
    ("options", "element"),
    [
        ({}, 1.0),  # one scale for a tensor
        (
            {"fp8_recipe": "blockwise"},
            1 + 4 / 128,
        ),  # arXiv 2412.19437 section 3.3.2: fp32 for each 128
        ({"precision": "mxfp8"}, 33 / 32),  # OCP microscaling: E8M0 for each 32
        (
            {"precision": "nvfp4"},
            (8 + 1) / 16,
        ),  # arXiv 2509.25149: E4M3 for each 16 elements of 4 bits
    ],
)
def test_scaling_factors_take_their_share(options: dict[str, Any], element: float) -> None:
    assert quantized_bytes(replace(FP8, **options)) == element


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 2 + 2 * 1.0),
        ({"fp8_recipe": "tensorwise"}, 4 + 2 * 1.0),
        ({"precision": "mxfp8"}, 2 + 2 * 33 / 32),
        ({"precision": "nvfp4"}, 4 + 2 * 9 / 16),
        ({"task": "lora", "lora": LoraSpec(rank=8)}, 2 + 1.0),  # no weight gradient: rows alone
        ({"precision": "bf16"}, 0),
    ],
)
def test_casts_read_and_write_each_element_as_often_as_their_recipe(
    options: dict[str, Any], each: float
) -> None:
    forward, backward = cast_traffic(replace(FP8, **options), [(30.0, 10.0), (5.0, 15.0)])
    assert (forward, backward) == (each * 25, each * 35)


def test_narrower_inputs_are_saved_for_the_backward_pass() -> None:
    wide, eight, four = (asked(precision=name).memory for name in ("bf16", "mxfp8", "nvfp4"))
    assert wide and eight and four
    assert (
        four.layer_activations_bytes < eight.layer_activations_bytes < wide.layer_activations_bytes
    )


def test_current_scaling_takes_longer_than_delayed() -> None:
    delayed, tensorwise, none = (
        asked(precision="fp8", fp8_recipe=name).time for name in ("delayed", "tensorwise", None)
    )
    assert delayed and tensorwise and none
    assert delayed == none and tensorwise.step_s > delayed.step_s


@given(problems(gpu="h100-sxm-80gb"), st.sampled_from((0, 1, 3)))
def test_weights_kept_in_eight_bits_are_as_many_bytes_and_half_the_traffic(
    case: tuple[Problem, ParallelConfig], zero: int
) -> None:
    """Rows and columns of 8 bits are 16 bits; one of them is gathered."""
    problem, config = case
    config = replace(config, zero_stage=zero)
    stored = replace(problem.workload, precision="fp8", parameter_precision="fp8")
    before, after = (
        replace(problem, workload=one).costs([config])
        for one in (replace(stored, parameter_precision=None), stored)
    )
    assert after.memory_parts["weights"][0] == pytest.approx(
        before.memory_parts["weights"][0], rel=1e-12
    )
    assert after.memory_parts["optimizer"][0] == before.memory_parts["optimizer"][0]
    assert after.parts["data_parallel"][0] <= before.parts["data_parallel"][0]


@pytest.mark.parametrize(
    ("gpu", "precision", "recipe", "width"),
    [
        ("h100-sxm-80gb", "fp8", None, 2.0),
        ("h100-sxm-80gb", "fp8", "tensorwise", 2.0),
        ("b200-sxm-180gb", "fp8", None, 1.0),
        ("gb200-nvl72", "fp8", "tensorwise", 1.0),
        ("b200-sxm-180gb", "fp8", "blockwise", 2 * (1 + 1 / 32)),
        ("b200-sxm-180gb", "mxfp8", None, 2 * 33 / 32),
    ],
)
def test_blackwell_needs_one_copy_of_weights_with_one_scale(
    gpu: str, precision: str, recipe: str | None, width: float
) -> None:
    shape = model("llama-3-8b")
    matrices = shape.num_hidden_layers * float(entries(layer_matrices(shape)))
    weights = [
        asked(
            gpu=gpu, precision=precision, fp8_recipe=recipe, parameter_precision=stored
        ).memory.weights_bytes  # type: ignore[union-attr]
        for stored in ("bf16", "fp8")
    ]
    assert weights[0] - weights[1] == pytest.approx(matrices * (2.0 - width), abs=1.0)


def test_only_matrices_are_kept_in_eight_bits() -> None:
    size = bytes_per_parameter(replace(FP8, precision="mxfp8", parameter_precision="fp8"))
    shape = model("llama-3-8b")
    matrices = float(entries(layer_matrices(shape)))
    kept = stage_bytes(matrices + 1000.0, matrices=matrices, size=size)
    assert kept.weights == pytest.approx(matrices * 2 * 33 / 32 + 2000)
    assert kept.communicated_weights == pytest.approx(matrices * 33 / 32 + 2000)
    assert kept.optimizer == 12 * (matrices + 1000)


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"precision": "mxfp8", "fp8_recipe": "delayed"}, "training.fp8_recipe"),
        ({"fp8_recipe": "tensorwise"}, "training.fp8_recipe"),
        ({"parameter_precision": "fp8"}, "training.parameter_precision"),
        ({"precision": "nvfp4", "parameter_precision": "fp8"}, "training.parameter_precision"),
    ],
)
def test_recipes_that_do_not_go_together_are_refused(training: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        asked(**training)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("lora", "wide"),
    [
        (None, 0),
        (LoraSpec(rank=8, target_modules=("linear_qkv", "linear_fc2")), 1),
        (LoraSpec(rank=8), 2),
    ],
)
def test_inputs_are_quantised_before_they_are_gathered_but_for_those_that_adapters_read(
    lora: LoraSpec | None, wide: int
) -> None:
    """In each of two column-row pairs an all-gather of 1 byte, or 2, and a reduce-scatter of 2."""

    def forward(precision: Precision) -> tuple[float, Shapes]:
        workload = replace(FP8, precision=precision, lora=lora, task="lora" if lora else "pretrain")
        case = case_of(
            model=model("llama-3-8b"),
            workload=workload,
            cluster=cluster(ClusterQuery(gpu="h100", num_gpus=8)),
        )
        framework = replace(case.profile.framework, tensor_parallel_forward_overlap=0.0)
        candidates = Candidates.alone(
            ParallelConfig(tensor_parallel_size=8, sequence_parallel=True)
        )
        one = replace(case, profile=replace(case.profile, framework=framework))
        return float(layer_time(case=one, candidates=candidates).tensor), shapes(
            case=one, candidates=candidates
        )

    (narrow_s, sizes), (wide_s, same) = forward("fp8"), forward("bf16")
    assert sizes.gather_s == same.gather_s == same.input_gather_s > sizes.input_gather_s
    assert wide_s - narrow_s == pytest.approx(
        (2 - wide) * float(sizes.gather_s - sizes.input_gather_s)
    )
