"""The product inside a gated MLP: kept, or formed again by the activation's backward kernel."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.catalog import model
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate

LLAMA = model("llama-3-8b")
TOKENS = 8192


def answered(name: str = "llama-3-8b", **training: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {
            "sequence_length": TOKENS,
            "global_batch_size": 8,
            "cuda_graphs": True,
            **training,
        },
        "parallel": {"tensor_parallel_size": 8, "sequence_parallel": True, "micro_batch_size": 1},
    }
    return estimate(query=parse_query(query), with_fixes=False)


@pytest.mark.parametrize(("precision", "width"), [("bf16", 2.0), ("fp8", 1.0)])
def test_a_product_formed_again_is_not_kept_and_is_written_once_more(
    precision: str, width: float
) -> None:
    """T f / t elements a layer, as wide as the last matmul's input; 2 bytes of each go to memory in
    the backward pass.
    """
    kept, again = (
        answered(precision=precision, gated_product=each) for each in (None, "recomputed")
    )
    assert kept.memory and again.memory and kept.time and again.time
    elements = TOKENS * LLAMA.ffn_size / 8 * LLAMA.num_hidden_layers
    assert kept.memory.activations_bytes - again.memory.activations_bytes == pytest.approx(
        width * elements
    )
    written_s = (
        8 * 2.0 * elements / 3.35e12
    )  # eight micro-batches at the full rate of an H100's memory
    assert written_s < again.time.step_s - kept.time.step_s < 2.0 * written_s


def test_a_kept_product_is_the_default() -> None:
    assert answered(gated_product="kept").time == answered().time


@pytest.mark.parametrize("name", ["gpt3-6.7b", "qwen3-30b-a3b"])
def test_models_without_gated_dense_layers_are_refused(name: str) -> None:
    with pytest.raises(InputError) as caught:
        answered(name, gated_product="recomputed")
    assert caught.value.field == "training.gated_product"
