"""Number formats of served weights: bytes including scales, and the precision of the matmul."""

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.errors import InputError

ServingPrecision = Precision | Literal["int8", "int4", "mxfp4"]

MXFP4_BYTES = 0.5 + 1.0 / 32  # one scale byte for 32 weights
INT4_BYTES = 0.5 + 2.0 / 128  # one 16-bit scale for a group of 128, as GPTQ and AWQ ship
_FORMATS: dict[str, tuple[float, Precision]] = {
    "fp32": (4.0, "fp32"),
    "bf16": (2.0, "bf16"),
    "fp16": (2.0, "fp16"),
    "fp8": (1.0, "fp8"),
    "mxfp8": (1.0 + 1.0 / 32, "mxfp8"),  # one scale byte for 32 weights
    "nvfp4": (0.5 + 1.0 / 16, "nvfp4"),  # one fp8 scale for 16 weights
    "mxfp4": (
        MXFP4_BYTES,
        "bf16",
    ),  # activations stay in 16 bits on Hopper; engines may run them in 8 bits on Blackwell
    "int8": (1.0, "bf16"),  # only the weights: activations stay in 16 bits
    "int4": (INT4_BYTES, "bf16"),
}
EXPERTS_ALONE = ("nvfp4", "mxfp4")
"""Formats whose MoE checkpoints store attention and dense layers in 16 bits (GPT-OSS; NVIDIA's
DeepSeek-R1-FP4).
"""
_WEIGHT_ONLY = ("fp8", "mxfp8", "nvfp4")
"""Formats that are also served on older hardware: weights stay quantised in memory and are
dequantised before the matmul.
"""


def weight_format(precision: ServingPrecision, *, gpu: GpuSpec) -> tuple[float, Precision]:
    """Return (bytes per weight, precision of the matmul).

    Raises:
        InputError: The hardware does not support such a matmul.
    """
    stored, compute = _FORMATS[precision]
    supported = gpu.peak_flops_per_second
    if compute in supported:
        return stored, compute
    if compute in _WEIGHT_ONLY or compute == "bf16":
        for wide in ("bf16", "fp16", "fp32"):
            if wide in supported and (wide != "fp32" or gpu.kind == "cpu"):
                return (stored if compute in _WEIGHT_ONLY or stored < 2.0 else 2.0), wide
    raise InputError(
        f"{gpu.name} does not support {precision}; it supports {', '.join(sorted(supported))}",
        field="inference.precision",
        code="precision_unsupported",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """`weight_format` of each kind of matrix."""

    mixers: tuple[float, Precision]
    """Attention and other token mixers."""
    mlps: tuple[float, Precision]
    """Dense MLPs."""
    experts: tuple[float, Precision]


def formats(
    precision: ServingPrecision, *, gpu: GpuSpec, experts: bool, wide_attention: bool = False
) -> Formats:
    """Return the formats of a checkpoint with this precision.

    `wide_attention` means that the checkpoint stores attention in 16 bits.
    """
    narrow = weight_format(precision, gpu=gpu)
    wide = weight_format("bf16", gpu=gpu)
    dense = wide if experts and precision in EXPERTS_ALONE else narrow
    return Formats(mixers=wide if wide_attention else dense, mlps=dense, experts=narrow)
