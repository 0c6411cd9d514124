"""Seconds of the operations inside a layer, by roofline: matmuls, attention, elementwise kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hp_tool.cost.elementwise import Column, FloatArray, maximum
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
    roof = _matmul_roofline(profile, precision)
    element = ELEMENT_BYTES[precision]
    flops = 2.0 * batch * m * n * k
    traffic = batch * (element * (m * k + n * k) + output_bytes * m * n)
    seconds = roofline_seconds(flops, traffic, roof, gpu=gpu, peak=peak_flops(gpu, precision=precision))
    framework = profile.framework
    return seconds * (framework.matmul_slowdown if element >= 2.0 else framework.narrow_matmul_slowdown)


def weight_matmuls(
    tokens: Column,
    matrices: Iterable[tuple[Column, Column]],
    *,
    gpu: GpuSpec,
    profile: EfficiencyProfile,
    precision: Precision,
    batch: Column = 1.0,
) -> tuple[Column, Column]:
    """(forward, weight-gradient) seconds of `tokens` rows through weight matrices of these (output n, input k), `batch` of
    each. Input gradients take as long as the forward pass. Weight gradients are added to an fp32 buffer: one read and one
    write of 4 bytes.
    """
    machine: dict[str, Any] = {"gpu": gpu, "profile": profile, "precision": precision, "batch": batch}
    forward: Column = 0.0
    gradient: Column = 0.0
    for n, k in matrices:
        forward = forward + matmul_seconds(tokens, n, k, **machine)
        gradient = gradient + matmul_seconds(n, k, tokens, output_bytes=8.0, **machine)
    return forward, gradient


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


def _matmul_roofline(profile: EfficiencyProfile, precision: Precision) -> Roofline:
    """The measured constants of this precision; of plain fp8 for block-scaled fp8; else those of bf16."""
    measured = profile.gpu.matmul
    return measured.get(precision) or (measured.get("fp8") if precision == "mxfp8" else None) or measured["bf16"]
