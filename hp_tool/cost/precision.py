"""Bytes of number formats: matmul inputs, stored weights, and (below 16 bits) scales and casts.

Recipes are those of Transformer Engine under Megatron Core. Every linear layer of a transformer
layer quantises its input, weight and output gradient. The attention core, norms, router and
adapters stay in 16 bits. The output layer stays in 16 bits too, but its time is computed at the
rate of `precision`, because the constants were fitted in this way.
"""

from collections.abc import Iterable

from hp_tool.cost.arrays import Floats
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.workload import FrozenPrecision, TrainingWorkload

ELEMENT_BYTES: dict[Precision, float] = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    "fp8": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
"""Bytes per element of a matmul input."""
QUANTIZED_BYTES: dict[Precision, float] = {
    "fp8": 1.0,
    "mxfp8": 1.0 + 1.0 / 32.0,
    "nvfp4": 0.5 + 1.0 / 16.0,
}
"""Bytes per element including scales. There is one scale per tensor, one byte per 32 elements, or
one byte per 16 elements.
"""
FROZEN_BYTES: dict[FrozenPrecision, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "nf4": 0.5 + (1.0 + 4.0 / 256.0) / 64.0,
    "int4": 0.5 + (2.0 + 0.5) / 128.0,
}
"""Bytes per element of frozen weights.

nf4: an 8-bit scale per 64 weights, and an fp32 scale per 256 of those scales (arXiv 2305.14314
section 3). int4: a 16-bit scale and a 4-bit zero point per 128 weights (GPTQ, AWQ).
"""
FP8_BLOCK_SCALE_BYTES = 4.0 / 128.0
"""Bytes of scales per element with fp8_recipe blockwise: one fp32 scale per 128 elements."""


def quantized_bytes(workload: TrainingWorkload) -> float:
    """Return the bytes per quantised element, including scales; only for precisions below 16
    bits.
    """
    blocks = (
        FP8_BLOCK_SCALE_BYTES
        if workload.precision == "fp8" and workload.fp8_recipe == "blockwise"
        else 0.0
    )
    return QUANTIZED_BYTES[workload.precision] + blocks


def weight_copies(workload: TrainingWorkload, *, gpu: GpuSpec) -> float:
    """Return the number of quantised copies of a weight stored in 8 bits. Block scales need a
    row-wise and a column-wise copy.

    With one scale per tensor, one copy suffices if tensor cores accept 8-bit operands in both
    layouts. They do on Blackwell, which introduced mxfp8 (Transformer Engine,
    is_non_tn_fp8_gemm_supported).
    """
    per_tensor_scales = workload.precision == "fp8" and workload.fp8_recipe != "blockwise"
    return 1.0 if per_tensor_scales and "mxfp8" in gpu.peak_flops_per_second else 2.0


def frozen_bytes(workload: TrainingWorkload) -> float:
    """Return the bytes per element of a frozen weight matrix.

    In 8 bits with one scale per tensor, the column-wise copy is computed on demand.
    """
    assert workload.frozen_precision is not None
    if (
        workload.frozen_precision == "fp8"
        and is_narrow(workload)
        and quantized_bytes(workload) > 1.0
    ):
        return 2.0 * quantized_bytes(workload)
    return FROZEN_BYTES[workload.frozen_precision]


def is_narrow(workload: TrainingWorkload) -> bool:
    """Return whether matmul inputs have fewer than 16 bits."""
    return workload.precision in QUANTIZED_BYTES


def wide_precision(workload: TrainingWorkload) -> Precision:
    """Return the precision of matmuls that are not quantised."""
    return "bf16" if is_narrow(workload) else workload.precision


def cast_traffic(
    workload: TrainingWorkload, matrices: Iterable[tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Return the (forward, backward) bytes per token moved to quantise the inputs of matmuls with
    these (output, input) widths.

    Each input is read in 16 bits and written row-wise quantised and, for the weight gradient, also
    column-wise quantised. The backward pass does the same for each output gradient. Frozen weights
    (LoRA) need no column-wise copy. With fp8_recipe tensorwise and for nvfp4's second-level scale,
    the tensor is read once more to find its largest magnitude. Delayed scales come from earlier
    steps, and block scales from the block being cast. nvfp4's Hadamard transforms and stochastic
    rounding need no additional traffic. The result is 0 for 16 bits and above.
    """
    if not is_narrow(workload):
        return 0.0, 0.0
    measured_first = workload.precision == "nvfp4" or workload.fp8_recipe == "tensorwise"
    copies = 1.0 if workload.lora is not None else 2.0
    moved = (4.0 if measured_first else 2.0) + copies * quantized_bytes(workload)
    outputs: Floats = 0.0
    inputs: Floats = 0.0
    for n, k in matrices:
        outputs, inputs = outputs + n, inputs + k
    return moved * inputs, moved * outputs
