"""Adapters on a quantised base: bytes of each precision, what widening costs, and what the audited
runs keep.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.catalog import model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.matrices import rank_matrices
from hp_tool.cost.matrix import entries
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.training import estimate

BASE = model("llama-2-70b")
MATRICES = (
    float(entries(rank_matrices(BASE, Candidates.alone(ParallelConfig())))) * BASE.num_hidden_layers
)
TOKENS = 4096
LORA = {"rank": 16, "target_modules": ["linear_qkv", "linear_proj"]}


def found(training: dict[str, Any], **parallel: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": BASE.name,
        "cluster": {"gpu": "b200-sxm-180gb", "num_gpus": 8},
        "training": {
            "sequence_length": TOKENS,
            "global_batch_size": 8,
            "task": "lora",
            "lora": LORA,
        }
        | training,
        "parallel": {"micro_batch_size": 1} | parallel,
    }
    return estimate(query=schema.parse_query(query), with_fixes=False)


def memory(training: dict[str, Any], **parallel: Any) -> Any:
    return found(training, **parallel).memory


@pytest.mark.parametrize(
    ("precision", "width"), [("bf16", 2.0), ("fp8", 1.0), ("nf4", 0.5 + 1 / 64 + 4 / 64 / 256)]
)
@pytest.mark.parametrize("zero", [1, 3])
def test_frozen_matrices_take_their_own_width_and_nothing_else_does(
    precision: str, width: float, zero: int
) -> None:
    wide, narrow = (
        memory({}, zero_stage=zero),
        memory({"frozen_precision": precision}, zero_stage=zero),
    )
    shards = 8 if zero == 3 else 1
    assert wide.weights_bytes - narrow.weights_bytes == pytest.approx(
        MATRICES * (2.0 - width) / shards
    )
    assert (narrow.gradients_bytes, narrow.optimizer_bytes) == (
        wide.gradients_bytes,
        wide.optimizer_bytes,
    )


def test_matrices_stored_narrower_than_their_matmuls_are_widened_one_at_a_time() -> None:
    same, widened = (
        found({"precision": "fp8", "frozen_precision": "fp8"}),
        found({"frozen_precision": "fp8"}),
    )
    plain, narrow = found({}), found({"frozen_precision": "nf4"})
    assert found({"precision": "fp8"}).time.step_s == pytest.approx(same.time.step_s)  # type: ignore[union-attr]
    for slower in (widened, narrow):
        assert slower.time.step_s > plain.time.step_s  # type: ignore[union-attr]
    largest = 2.0 * 2 * BASE.ffn_size * BASE.hidden_size
    assert narrow.memory.buffers_bytes - plain.memory.buffers_bytes == pytest.approx(
        largest, rel=0.5
    )  # type: ignore[union-attr]


def test_an_fp8_base_keeps_what_enters_the_activation_function_in_8_bits_unless_told_otherwise() -> (  # noqa: E501
    None
):
    told, left_out = (
        memory({"precision": "fp8", "frozen_precision": "fp8"} | more)
        for more in ({"activation_func_fp8_input_store": False}, {})
    )
    kept = 2 * BASE.ffn_size * TOKENS * BASE.num_hidden_layers
    assert told.activations_bytes - left_out.activations_bytes == pytest.approx(kept)
    full = {"task": "pretrain", "lora": None}
    assert memory(full).activations_bytes - memory(
        full | {"activation_func_fp8_input_store": True}
    ).activations_bytes == (pytest.approx(kept))


def test_dropout_before_adapters_keeps_a_copy_and_a_mask_each() -> None:
    """The copy stands for the norm's output; attention keeps its own output."""
    plain, dropped = memory({}), memory({"lora": LORA | {"dropout": 0.1}})
    added = (1 + 3) * BASE.hidden_size * TOKENS * BASE.num_hidden_layers
    assert dropped.activations_bytes - plain.activations_bytes == pytest.approx(added)


def test_a_graph_of_each_layer_keeps_its_output_and_two_gradients() -> None:
    added = memory({"cuda_graphs": True}).activations_bytes - memory({}).activations_bytes
    assert added == pytest.approx(3 * 2 * BASE.hidden_size * TOKENS * BASE.num_hidden_layers)


def test_without_adapters_nothing_is_frozen() -> None:
    with pytest.raises(InputError) as refused:
        memory({"task": "pretrain", "lora": None, "frozen_precision": "nf4"})
    assert refused.value.field == "training.frozen_precision"
