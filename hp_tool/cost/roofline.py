"""Roofline seconds of the operations inside a layer: matmuls, attention, elementwise kernels."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hp_tool.cost.arrays import Floats, maximum
from hp_tool.cost.case import Machine, TrainingCase
from hp_tool.cost.precision import ELEMENT_BYTES
from hp_tool.domain.efficiency import (
    Clocks,
    EfficiencyProfile,
    FrameworkEfficiency,
    GpuEfficiency,
    Roofline,
)
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def peak_flops(gpu: GpuSpec, *, precision: Precision, field: str = "training.precision") -> float:
    """Return the datasheet's dense peak, in FLOP/s.

    Raises:
        InputError: The hardware does not support the precision.
    """
    peak = gpu.peak_flops_per_second.get(precision)
    if peak is None:
        supported = ", ".join(sorted(gpu.peak_flops_per_second))
        raise InputError(
            f"{gpu.name} does not support {precision}; it supports {supported}",
            field=field,
            code="precision_unsupported",
        )
    return peak


def matmul_seconds(
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    machine: Machine,
    precision: Precision,
    output_bytes: float = 2.0,
    batch: Floats = 1.0,
) -> Floats:
    """Return the time in seconds of y[m,n] = x[m,k] w[n,k]^T, `batch` times in one call.

    A matmul has 2mnk FLOPs, reads its inputs once and writes its output once. `output_bytes` is the
    traffic per output element (8 if it is accumulated into an fp32 buffer).
    """
    gpu, profile = machine.cluster.gpu, machine.profile
    roof = _matmul_roofline(profile, precision)
    element = ELEMENT_BYTES[precision]
    flops = 2.0 * batch * m * n * k
    traffic = batch * (element * (m * k + n * k) + output_bytes * m * n)
    seconds = roofline_seconds(
        flops, traffic, roof, gpu=gpu, peak=peak_flops(gpu, precision=precision)
    )
    return profile.framework.matmul_slowdown * seconds


def accumulation_slowdown(case: TrainingCase, precision: Precision) -> float:
    """Return the slowdown of weight-gradient matmuls whose 16-bit products are added to an fp32
    buffer.
    """
    slowdown = case.profile.framework.fp32_accumulation.get(case.cluster.gpu.silicon or "", 1.0)
    workload = case.workload
    if (
        slowdown == 1.0
        or ELEMENT_BYTES[precision] != 2.0
        or workload.gradient_precision not in (None, "fp32")
    ):
        return 1.0
    return slowdown if framework_facts(workload.framework).accumulates_in_fp32 else 1.0


def weight_matmuls(
    tokens: Floats,
    matrices: Iterable[tuple[Floats, Floats]],
    *,
    case: TrainingCase,
    precision: Precision,
    batch: Floats = 1.0,
) -> tuple[Floats, Floats]:
    """Return the (forward, weight-gradient) seconds of multiplying `tokens` rows by weight
    matrices, `batch` of each.

    Shapes are (outputs n, inputs k). Input gradients take as long as the forward pass. Weight
    gradients are added to an fp32 buffer: one read and one write of 4 bytes.
    """
    forward: Floats = 0.0
    gradient: Floats = 0.0
    for n, k in matrices:
        forward = forward + matmul_seconds(
            tokens, n, k, machine=case, precision=precision, batch=batch
        )
        gradient = gradient + matmul_seconds(
            n, k, tokens, machine=case, precision=precision, batch=batch, output_bytes=8.0
        )
    return forward, accumulation_slowdown(case, precision) * gradient


def roofline_seconds(
    flops: Floats, traffic: Floats, roof: Roofline, *, gpu: GpuSpec, peak: float
) -> Floats:
    """Return overhead + max(FLOPs / achievable peak, bytes / achievable bandwidth), in seconds."""
    bound = maximum(
        flops / (roof.peak_fraction * peak),
        traffic / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second),
    )
    return roof.overhead_s + bound


def additive_seconds(
    flops: Floats, traffic: Floats, roof: Roofline, *, gpu: GpuSpec, peak: float
) -> Floats:
    """Return overhead + FLOPs / achievable peak + bytes / achievable bandwidth, in seconds.

    For kernels that alternate between arithmetic and memory access.
    """
    bandwidth = roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second
    return roof.overhead_s + flops / (roof.peak_fraction * peak) + traffic / bandwidth


def elementwise_seconds(traffic: Floats, *, kernels: Floats, machine: Machine) -> Floats:
    """Return the time in seconds of memory-bound kernels that move at least `traffic` bytes in
    `kernels` launches.
    """
    profile = machine.profile
    moved = traffic * profile.framework.elementwise_traffic_factor
    reached = profile.gpu.memory_fraction * machine.cluster.gpu.memory_bandwidth_bytes_per_second
    return moved / reached + kernels * profile.gpu.kernel_overhead_s


def below_16_bits(framework: FrameworkEfficiency) -> FrameworkEfficiency:
    """Return the constants that apply to matmuls below 16 bits."""
    if framework.narrow_traffic_factor is None:
        return framework
    return replace(framework, elementwise_traffic_factor=framework.narrow_traffic_factor)


def attention_kernel(workload: TrainingWorkload, model: ModelSpec) -> str | None:
    """Return the name of the fused attention kernel; None for the framework's default.

    Models without position embeddings add distance biases (ALiBi) to the attention scores. Under
    FSDP, only Triton supported these biases.
    """
    if workload.attention_kernel not in (None, "auto"):
        return workload.attention_kernel
    alibi = model.positions == "none"
    return "triton" if alibi and training_engine(workload.framework) == "torch-fsdp" else None


def with_attention_kernel(
    framework: FrameworkEfficiency, *, name: str, timed: Mapping[str, float]
) -> FrameworkEfficiency:
    """Return the constants for a named fused attention kernel.

    If the framework's runs used this kernel, the constants are unchanged. Otherwise, they are
    scaled by the ratio of the kernel's published time to that of the framework's default kernel.
    `timed` has these times by kernel name, relative to the kernel timed in isolation.

    Raises:
        UnsupportedError: There are no published times of the kernel on this die.
    """
    if name in framework.attention_kernels:
        slowdown = framework.attention_kernels[name]
    elif name == framework.attention_kernel:
        slowdown = framework.attention_slowdown
    elif name in timed:
        slowdown = (
            framework.attention_slowdown
            * timed[name]
            / timed.get(framework.attention_kernel or "", 1.0)
        )
    else:
        names = ", ".join(dict.fromkeys((*timed, *framework.attention_kernels))) or "none"
        raise UnsupportedError(
            f"attention kernel {name} was not measured on this GPU (measured: {names}); remove "
            "attention_kernel to use the framework's default",
            field="training.attention_kernel",
        )
    return replace(framework, attention_kernel=name, attention_slowdown=slowdown)


def at_sustained_clocks(
    kernels: GpuEfficiency,
    *,
    clocks: Clocks,
    power_w: float,
    peaks: Mapping[Precision, float],
    reference: GpuSpec | None,
) -> GpuEfficiency:
    """Return the constants with matmul peaks at the clocks that a card sustains in a long training
    run.

    Power above idle grows with the cube of the clock, because voltage follows it. A card of the
    same die sustains the FLOP/s of the `reference` card, to which `clocks` applies, times the cube
    root of the ratio of their power limits, and at most those of its own boost clocks. Cards with
    reduced compute throughput stay below their power limit and therefore run at boost clocks.
    16-bit peaks represent the clocks, because the tensor cores of a later die may have a higher
    throughput per clock in a narrower precision (nvfp4 on B300). Without a reference, the fractions
    are unchanged.

    A card with reduced compute throughput also reaches a higher fraction of its peak. Other parts
    of a kernel (tile loads and the waits between them) take the same time as on the full die, while
    arithmetic takes 1 / c times as long: f = 1 / (1 + c (1 / f_whole - 1)). c is the card's peak
    divided by the peak that its power limit would sustain, or by the full die's peak if that is
    higher; at most 1 (H20: 0.2).
    """
    matmul = {}
    attention = kernels.attention
    for precision, roof in kernels.matmul.items():
        narrow = clocks.share.get("fp8") if ELEMENT_BYTES[precision] < 2.0 else None
        share = clocks.share.get(precision) or narrow or clocks.share["bf16"]
        fraction = roof.peak_fraction
        if reference is not None and precision in peaks:
            power = (power_w / reference.power_w) ** (1.0 / 3.0)
            peak = peaks["bf16"] / reference.peak_flops_per_second["bf16"]
            sustained = share * power / peak
            share = min(sustained, 1.0)
            cut = min(max(share / sustained, peak), 1.0)
            fraction = _peak_at_power(fraction, cut)
            if precision == "bf16":
                attention = replace(
                    attention, peak_fraction=_peak_at_power(attention.peak_fraction, cut)
                )
        matmul[precision] = replace(roof, peak_fraction=share * fraction)
    return replace(kernels, matmul=matmul, attention=attention)


def _peak_at_power(fraction: float, cut: float) -> float:
    return fraction if cut == 1.0 else 1.0 / (1.0 + cut * (1.0 / fraction - 1.0))


def _matmul_roofline(profile: EfficiencyProfile, precision: Precision) -> Roofline:
    """Return the measured matmul constants for this precision.

    Block-scaled fp8 uses those of plain fp8; unmeasured precisions use those of bf16.
    """
    measured = profile.gpu.matmul
    return (
        measured.get(precision)
        or (measured.get("fp8") if precision == "mxfp8" else None)
        or measured["bf16"]
    )
