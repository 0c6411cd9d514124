"""Seconds of the operations inside a layer, by roofline: matmuls, attention, elementwise kernels."""

from __future__ import annotations

from hp_tool.cost.candidates import FloatArray
from hp_tool.cost.elementwise import maximum
from hp_tool.domain.efficiency import EfficiencyProfile, Roofline
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.errors import InputError

ELEMENT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Bytes of one matmul input."""


def peak_flops(gpu: GpuSpec, *, precision: Precision) -> float:
    """Dense peak of the datasheet. Raises InputError where the hardware has none for this precision."""
    peak = gpu.peak_flops_per_second.get(precision)
    if peak is None:
        known = ", ".join(sorted(gpu.peak_flops_per_second))
        raise InputError(
            f"{gpu.name} does not support {precision}; it supports {known}",
            field="training.precision",
            code="precision_unsupported",
        )
    return peak


def matmul_seconds(
    m: FloatArray | float,
    n: FloatArray | float,
    k: FloatArray | float,
    *,
    gpu: GpuSpec,
    profile: EfficiencyProfile,
    precision: Precision,
    output_bytes: float = 2.0,
    batch: FloatArray | float = 1.0,
) -> FloatArray:
    """y[m,n] = x[m,k] w[n,k]^T, `batch` times in one call: 2mnk FLOPs, inputs read once, output written once.

    `output_bytes` is what one output element costs to write (8 where it is accumulated into an fp32 buffer).
    """
    roof = profile.gpu.matmul.get(precision, profile.gpu.matmul["bf16"])
    element = ELEMENT_BYTES[precision]
    flops = 2.0 * batch * m * n * k
    traffic = batch * (element * (m * k + n * k) + output_bytes * m * n)
    seconds = roofline_seconds(flops, traffic, roof, gpu=gpu, peak=peak_flops(gpu, precision=precision))
    return seconds * profile.framework.matmul_slowdown


def roofline_seconds(
    flops: FloatArray | float, traffic: FloatArray | float, roof: Roofline, *, gpu: GpuSpec, peak: float
) -> FloatArray:
    """overhead + max(FLOPs / reached peak, bytes / reached bandwidth)."""
    bound = maximum(
        flops / (roof.peak_fraction * peak), traffic / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second)
    )
    return roof.overhead_s + bound


def additive_seconds(flops: FloatArray, traffic: FloatArray, roof: Roofline, *, gpu: GpuSpec, peak: float) -> FloatArray:
    """overhead + FLOPs / reached peak + bytes / reached bandwidth: kernels that alternate between the two."""
    bandwidth = roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second
    return roof.overhead_s + flops / (roof.peak_fraction * peak) + traffic / bandwidth


def elementwise_seconds(traffic: FloatArray, *, kernels: float, gpu: GpuSpec, profile: EfficiencyProfile) -> FloatArray:
    """Memory-bound kernels that together must move `traffic` bytes, in `kernels` launches."""
    moved = traffic * profile.framework.elementwise_traffic_factor
    reached = profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second
    return moved / reached + kernels * profile.gpu.kernel_overhead_s
