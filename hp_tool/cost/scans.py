"""Chunked kernels of recurrent mixers over complete sequences: compute, memory traffic, and
measured seconds.
"""

from typing import NamedTuple

from hp_tool.cost.arrays import Floats, Ints, maximum
from hp_tool.cost.case import Machine
from hp_tool.cost.recurrent import (
    convolved_width,
    key_heads,
    recurrent_width,
    state_groups,
    value_heads,
)
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec

DELTA_CHUNK, STATE_CHUNK = 64.0, 128.0
"""Tokens per chunk in kernels of delta rules and of state spaces (arXiv 2405.21060, section 7)."""
NUMBER_BYTES, STATE_BYTES = 2.0, 4.0
"""Bytes per element of activations, and of recurrent states, which kernels and engines store in
fp32.
"""
UNTIMED_PEAK = 0.25
"""Assumed fraction of the peak on dies without kernel timings. It is between the fractions that a
delta rule reaches on H100 and on B200.
"""


class Work(NamedTuple):
    """FLOPs and memory traffic per token of one layer on one rank."""

    flops: Floats
    traffic: Floats
    """Bytes moved."""


def chunked_seconds(
    roof: MixerRoofline, work: Work, *, tokens: Floats, prompts: Floats, gpu: GpuSpec, peak: float
) -> Floats:
    """Return the time in seconds of a kernel for prompts, from MixerRoofline's formula. Without
    prompts, only its fixed time counts.
    """
    a_token = maximum(
        work.flops / (roof.peak_fraction * peak),
        work.traffic / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second),
    )
    p, longest = roof.sharpness, tokens / maximum(prompts, 1.0)
    terms = (
        (tokens * a_token) ** p
        + (roof.prompt_rows * prompts * a_token) ** p
        + (roof.step_s * longest) ** p
    )
    seconds: Floats = roof.overhead_s + roof.token_s * tokens + terms ** (1.0 / p)
    return seconds


def scan_work(model: ModelSpec, t: Ints) -> Work:
    """Return the FLOPs and bytes per token of the chunked scan on one of t ranks.

    Delta rules (arXiv 2412.06464, section 3.3; 2510.26692, section 3.2), for a head with keys of
    width K and values of width V, in chunks of C tokens: 6 C K for K K^T, Q K^T and the chunk's new
    keys; 4 C V for the new values and their attention; 6 K V to read the state twice and write it.
    State spaces (arXiv 2405.21060, section 6), in chunks of Q tokens: 2 Q N for C B^T per group,
    and 2 Q P + 4 N P for a head of width P. The states between chunks are written, passed on and
    read in fp32. Mamba's selective scan is treated like Mamba 2's with a small state. It does not
    use tensor cores, so its predicted time is a lower bound.
    """
    inner, channels = recurrent_width(model) / t, convolved_width(model, t)
    moved = NUMBER_BYTES * (channels + inner)
    if model.mixer in ("mamba", "mamba2"):
        state, groups = float(model.ssm_state_size or 0), state_groups(model, t)
        flops = 2.0 * STATE_CHUNK * state * groups + inner * (2.0 * STATE_CHUNK + 4.0 * state)
        return Work(flops, moved + 4.0 * STATE_BYTES * state * inner / STATE_CHUNK)
    heads, key, value = (
        value_heads(model) / t,
        float(model.linear_key_head_dim or 0),
        inner * t / value_heads(model),
    )
    decays = key_heads(model) * key / t if model.mixer == "kimi_delta" else heads
    flops = heads * (DELTA_CHUNK * (6.0 * key + 4.0 * value) + 6.0 * key * value)
    return Work(flops, moved + STATE_BYTES * decays)


def convolution_work(model: ModelSpec, t: Ints) -> Work:
    """Return the FLOPs and bytes per prompt token of the short convolution on one of t ranks.

    Each channel is read and written once.
    """
    channels = convolved_width(model, t)
    return Work(2.0 * convolution_kernel(model) * channels, 2.0 * NUMBER_BYTES * channels)


def convolution_kernel(model: ModelSpec) -> int:
    """Return the kernel size, in tokens, of a recurrent mixer's short convolution."""
    return (
        model.mamba_conv_kernel
        if model.mixer in ("mamba", "mamba2")
        else model.linear_conv_kernel_dim
    )


def index_flops(model: ModelSpec) -> float:
    """Return 2 heads x width, the FLOPs to score one key for one token."""
    return 2.0 * (model.index_n_heads or 0) * (model.index_head_dim or 0)


def mixer_kernel(machine: Machine, model: ModelSpec, name: str) -> MixerRoofline:
    """Return the constants of a kernel of the model's mixer on a die.

    Without timings on a similar die, the kernel is assumed to reach a typical fraction of the peak,
    and the bandwidth and launch time of elementwise kernels.
    """
    gpu = machine.profile.gpu
    if gpu.mixers is not None:
        return gpu.mixers[kernel_family(model)][name]
    return MixerRoofline(
        peak_fraction=UNTIMED_PEAK,
        bandwidth_fraction=gpu.memory_fraction,
        overhead_s=gpu.kernel_overhead_s,
    )


def kernel_family(model: ModelSpec) -> str:
    """Return the kernel family used for the model's layers."""
    return {"attention": "sparse", "mamba": "mamba2"}.get(model.mixer, model.mixer)


def wide_precision(gpu: GpuSpec) -> Precision:
    """Return the precision of arithmetic that is unaffected by quantised weight formats."""
    return (
        "fp32" if gpu.kind == "cpu" else "bf16" if "bf16" in gpu.peak_flops_per_second else "fp16"
    )
