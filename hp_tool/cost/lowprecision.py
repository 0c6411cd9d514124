"""Matmuls with inputs below 16 bits: what their recipes store, cast and leave in 16 bits.

Recipes as Transformer Engine runs them under Megatron Core: every linear layer of a transformer layer quantises its input,
weight and output gradient; attention's core, norms, router and adapters stay in 16 bits. So does the output layer, whose
time is counted at the rate of `precision` all the same, as the fitted constants were.
"""

from __future__ import annotations

from collections.abc import Iterable

from hp_tool.cost.elementwise import Column
from hp_tool.domain.hardware import Precision
from hp_tool.domain.workload import TrainingWorkload

QUANTIZED_BYTES: dict[Precision, float] = {"fp8": 1.0, "mxfp8": 1.0 + 1.0 / 32.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""One element with its share of the scaling factors: one for a tensor, a byte for each 32, a byte for each 16."""
FP8_BLOCK_SCALE_BYTES = 4.0 / 128.0
"""fp8_recipe blockwise: an fp32 scale for each 128 elements."""


def quantized_bytes(workload: TrainingWorkload) -> float:
    """Bytes of one quantised element, scaling factors included. Only for precisions below 16 bits."""
    blocks = FP8_BLOCK_SCALE_BYTES if workload.precision == "fp8" and workload.fp8_recipe == "blockwise" else 0.0
    return QUANTIZED_BYTES[workload.precision] + blocks


def is_narrow(workload: TrainingWorkload) -> bool:
    """Whether matmul inputs are below 16 bits."""
    return workload.precision in QUANTIZED_BYTES


def wide_precision(workload: TrainingWorkload) -> Precision:
    """Of the matmuls that are not quantised."""
    return "bf16" if is_narrow(workload) else workload.precision


def cast_traffic(workload: TrainingWorkload, matrices: Iterable[tuple[Column, Column]]) -> tuple[Column, Column]:
    """Bytes a token that quantising moves (forward, backward) around matmuls of these (output, input) widths.

    Each input is read in 16 bits and written quantised as rows and, for the weight gradient, as columns; backward the same
    for each output's gradient; frozen weights (LoRA) need no columns. A scale that is taken from the tensor itself, of fp8
    with fp8_recipe tensorwise and of nvfp4's second level, reads it once more for the largest magnitude; delayed scales
    come from earlier steps, block scales from what is being cast. nvfp4's Hadamard transforms and random rounding are done
    on the way. Nothing in 16 bits and above.
    """
    if not is_narrow(workload):
        return 0.0, 0.0
    measured_first = workload.precision == "nvfp4" or workload.fp8_recipe == "tensorwise"
    copies = 1.0 if workload.lora is not None else 2.0
    moved = (4.0 if measured_first else 2.0) + copies * quantized_bytes(workload)
    outputs: Column = 0.0
    inputs: Column = 0.0
    for n, k in matrices:
        outputs, inputs = outputs + n, inputs + k
    return moved * inputs, moved * outputs
