"""Seconds of the operations inside a layer, by roofline: matmuls, attention, elementwise
kernels.
"""

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
from hp_tool.domain.frameworks import facts, wrapped
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def peak_flops(gpu: GpuSpec, *, precision: Precision, field: str = "training.precision") -> float:
    """Dense peak of the datasheet. Raises InputError if the hardware has none for this
    precision.
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
    """Seconds of y[m,n] = x[m,k] w[n,k]^T, `batch` times in one call.

    2mnk FLOPs, inputs read once, output written once; `output_bytes` is the cost of writing one
    output element (8 if it is accumulated into an fp32 buffer).
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
    """Return the factor on weight-gradient matmuls whose 16-bit products the framework adds to an
    fp32 buffer.
    """
    slowdown = case.profile.framework.fp32_accumulation.get(case.cluster.gpu.silicon or "", 1.0)
    workload = case.workload
    if (
        slowdown == 1.0
        or ELEMENT_BYTES[precision] != 2.0
        or workload.gradient_precision not in (None, "fp32")
    ):
        return 1.0
    return slowdown if facts(workload.framework).accumulates_in_fp32 else 1.0


def weight_matmuls(
    tokens: Floats,
    matrices: Iterable[tuple[Floats, Floats]],
    *,
    case: TrainingCase,
    precision: Precision,
    batch: Floats = 1.0,
) -> tuple[Floats, Floats]:
    """(forward, weight-gradient) seconds of `tokens` rows through weight matrices of these (output
    n, input k), `batch` of each.

    Input gradients take as long as the forward pass. Weight gradients are added to an fp32 buffer:
    one read and one write of 4 bytes.
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
    """overhead + max(FLOPs / reached peak, bytes / reached bandwidth)."""
    bound = maximum(
        flops / (roof.peak_fraction * peak),
        traffic / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second),
    )
    return roof.overhead_s + bound


def additive_seconds(
    flops: Floats, traffic: Floats, roof: Roofline, *, gpu: GpuSpec, peak: float
) -> Floats:
    """overhead + FLOPs / reached peak + bytes / reached bandwidth: kernels that alternate between
    the two.
    """
    bandwidth = roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second
    return roof.overhead_s + flops / (roof.peak_fraction * peak) + traffic / bandwidth


def elementwise_seconds(traffic: Floats, *, kernels: Floats, machine: Machine) -> Floats:
    """Seconds of memory-bound kernels that together move at least `traffic` bytes, in `kernels`
    launches.
    """
    profile = machine.profile
    moved = traffic * profile.framework.elementwise_traffic_factor
    reached = profile.gpu.memory_fraction * machine.cluster.gpu.memory_bandwidth_bytes_per_second
    return moved / reached + kernels * profile.gpu.kernel_overhead_s


def below_16_bits(framework: FrameworkEfficiency) -> FrameworkEfficiency:
    """The constants where matmuls take less than 16 bits."""
    if framework.narrow_traffic_factor is None:
        return framework
    return replace(framework, elementwise_traffic_factor=framework.narrow_traffic_factor)


def attention_kernel(workload: TrainingWorkload, model: ModelSpec) -> str | None:
    """The kernel for fused attention that runs; None: the framework's own.

    Biases by distance (ALiBi), which models without positions have, are added to the scores: under
    FSDP Triton's alone took them.
    """
    if workload.attention_kernel not in (None, "auto"):
        return workload.attention_kernel
    alibi = model.positions == "none"
    return "triton" if alibi and wrapped(workload.framework) == "torch-fsdp" else None


def with_attention_kernel(
    framework: FrameworkEfficiency, *, name: str, timed: Mapping[str, float]
) -> FrameworkEfficiency:
    """The constants under a named kernel for fused attention: as the framework's runs timed it,
    else by what it takes against the framework's own, published in `timed` (by name, over the one
    timed alone).

    Raises UnsupportedError where nobody published the kernel on this die.
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
            f"no figures of attention kernel {name} on this GPU; known: {names}; leave it out for "
            "the framework's own",
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
    """The constants with matmul peaks at the clocks that a long training sustains on a card: its
    power limit, its FLOP/s.

    Power above the idle grows with the cube of the clock, which voltage follows: a card of the same
    die sustains the FLOP/s of the `reference` card, on which `clocks` holds, times the cube root of
    the ratio of their power limits, and never more than its own boost clocks give. So cut-down
    cards, whose arithmetic needs less than their limit, run at boost. Peaks in 16 bits stand for
    the clocks: a later die's tensor cores may do more of a narrower precision in each (B300's, of
    nvfp4). Without a reference the shares hold as they are.

    A cut-down card also reaches more of its peak. What keeps a kernel below it (loads of tiles,
    waits between them) takes the time that it takes on the whole die, beside arithmetic that takes
    1 / c times as long: f = 1 / (1 + c (1 / f_whole - 1)), with c the card's peak over what its
    power limit would sustain, or over the whole die's if that is more, at most 1 (H20: 0.2).
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
            fraction = _of_cut_peak(fraction, cut)
            if precision == "bf16":
                attention = replace(
                    attention, peak_fraction=_of_cut_peak(attention.peak_fraction, cut)
                )
        matmul[precision] = replace(roof, peak_fraction=share * fraction)
    return replace(kernels, matmul=matmul, attention=attention)


def _of_cut_peak(fraction: float, cut: float) -> float:
    return fraction if cut == 1.0 else 1.0 / (1.0 + cut * (1.0 / fraction - 1.0))


def _matmul_roofline(profile: EfficiencyProfile, precision: Precision) -> Roofline:
    """The measured constants of this precision; for block-scaled fp8 those of plain fp8; otherwise
    those of bf16.
    """
    measured = profile.gpu.matmul
    return (
        measured.get(precision)
        or (measured.get("fp8") if precision == "mxfp8" else None)
        or measured["bf16"]
    )
