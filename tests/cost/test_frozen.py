"""Parts frozen by name: what they no longer keep, compute and send, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.catalog import model
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions import schema
from hp_tool.questions.training import estimate

MODEL = "llama-3-8b"
SHAPE = model(MODEL)
MATRIX = SHAPE.vocab_size * SHAPE.hidden_size


def found(
    frozen: list[str], *, name: str = MODEL, training: dict[str, Any] | None = None, **parallel: Any
) -> Estimate:
    query: dict[str, Any] = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "training": {
            "sequence_length": 4096,
            "global_batch_size": 32,
            "task": "sft",
            "frozen": frozen,
        }
        | (training or {}),
        "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1, "zero_stage": 0} | parallel,
    }
    return estimate(query=schema.parse_query(query), with_fixes=False)


@pytest.mark.parametrize(
    ("frozen", "matrices"),
    [(["embedding"], 1), (["output_layer"], 1), (["embedding", "output_layer"], 2)],
)
def test_frozen_matrices_keep_weights_and_nothing_else(frozen: list[str], matrices: int) -> None:
    all_, some = found([]).memory, found(frozen).memory
    assert all_ is not None and some is not None
    here = matrices * MATRIX / 2  # TP 2
    assert some.weights_bytes == all_.weights_bytes
    assert all_.gradients_bytes - some.gradients_bytes == pytest.approx(4.0 * here)
    assert all_.optimizer_bytes - some.optimizer_bytes == pytest.approx(12.0 * here)


def test_a_frozen_output_layer_has_no_weight_gradient_and_its_input_is_not_kept() -> None:
    all_, some = found([]), found(["output_layer"])
    assert all_.model_tflops_per_gpu is not None and some.model_tflops_per_gpu is not None
    assert (
        all_.time is not None
        and some.time is not None
        and all_.memory is not None
        and some.memory is not None
    )
    flops = [e.model_tflops_per_gpu * e.time.step_s * 8 * 1e12 for e in (all_, some)]  # type: ignore[operator, union-attr]
    assert flops[0] - flops[1] == pytest.approx(2.0 * MATRIX * 32 * 4096)
    assert some.time.parts_s["compute"] < all_.time.parts_s["compute"]
    assert all_.memory.activations_bytes - some.memory.activations_bytes == pytest.approx(
        2.0 * 4096 * SHAPE.hidden_size / 2
    )


@pytest.mark.parametrize(
    "parallel", [{}, {"pipeline_parallel_size": 2}, {"zero_stage": 1}, {"zero_stage": 2}]
)
def test_freezing_never_costs(parallel: dict[str, Any]) -> None:
    times, sizes = [], []
    for frozen in ([], ["embedding"], ["embedding", "output_layer"]):
        one = found(frozen, **parallel)
        assert one.time is not None and one.memory is not None
        times.append(one.time.step_s)
        sizes.append(one.memory.total_bytes)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert sizes == sorted(sizes, reverse=True)


def test_stages_between_the_ends_lose_nothing_that_they_never_held() -> None:
    """27 layers over 8 stages: the ends hold fewer layers than the stages between them, and rank 1
    is the fullest.
    """
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 8}
    trained, frozen = (
        found(parts, name="deepseek-v2-lite", **parallel).memory
        for parts in ([], ["embedding", "output_layer"])
    )
    assert trained is not None and frozen is not None
    assert trained.worst_stage == frozen.worst_stage == 1
    assert frozen.gradients_bytes == trained.gradients_bytes > 0.0
    assert frozen.optimizer_bytes == trained.optimizer_bytes


def test_answers_say_that_it_was_never_measured() -> None:
    assert "training.frozen" in found(["embedding"]).familiarity.unmeasured


def test_tied_parts_freeze_together() -> None:
    with pytest.raises(InputError, match="freeze both"):
        found(["embedding"], name="gpt-22b")
    assert found(["embedding", "output_layer"], name="gpt-22b").memory is not None


@pytest.mark.parametrize(
    ("training", "parallel"),
    [
        ({"task": "lora", "lora": {"rank": 8}}, {}),
        ({"framework": "torch-fsdp"}, {"zero_stage": 3}),
        ({}, {"pipeline_schedule": "zb-h1", "pipeline_parallel_size": 2}),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(
    training: dict[str, Any], parallel: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        found(["embedding"], training=training, **parallel)
    assert caught.value.field == "training.frozen"
