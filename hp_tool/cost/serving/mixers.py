"""Kernels of recurrent mixers and of sparse attention while serving, besides the projections around them.

A recurrent layer keeps a state instead of keys and values. While decoding, its time is that of reading and writing the state;
over prompts a scan goes through chunks of tokens, quadratic within a chunk and by the state between chunks. Sparse attention
scores all keys of a context with small heads (the indexer), and attends to the best `index_topk` of them.
"""

from typing import NamedTuple

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray, Ints
from hp_tool.cost.matrices import has_indexer, index_width
from hp_tool.cost.recurrent import convolved_width, key_heads, recurrent_width, state_groups, state_numbers, value_heads
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import OUTPUT_BYTES, STATE_BYTES, visible_keys
from hp_tool.cost.serving.weights import attention_flops
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.domain.model import ModelSpec

DELTA_CHUNK, STATE_CHUNK = 64.0, 128.0
"""Tokens of a chunk: of delta rules' kernels, and of state spaces' (arXiv 2405.21060, section 7)."""
INDEX_BYTES = 1.0 + 4.0 / 128.0
"""Bytes of a number of an indexer's key: 8 bits, and an fp32 scale for 128 of them (DeepSeek-V3.2)."""
SCORE_BYTES = 4.0
"""Bytes of an index score, which the top-k reads."""
TIMED_PLACES = 2048.0
"""`index_topk` of the models whose modules of sparse attention were timed."""
UNTIMED_PEAK = 0.25
"""Share of the arithmetic's peak taken where nobody timed such kernels near a die: between a delta rule's on H100 and B200."""
UNTIMED_LOG_SD = 0.7
"""Of kernels that nobody timed near a die: within a factor of two in two cases of three. Judged."""


class Work(NamedTuple):
    """What one token of one layer takes on one rank."""

    flops: Floats
    traffic: Floats
    """Bytes."""


def mixer_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    prompt_tokens: FloatArray,
    prompts: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Seconds (n,) of one recurrent layer on one of t ranks, without its projections: short convolution, update or scan of the
    state, gated norm.

    `decoding` sequences take one token and `drafted` ones each; `prompts` prompts have `prompt_tokens` tokens in all. Decoding
    reads a sequence's state once and writes it for each of its tokens. `case.model` has layers of one recurrent mixer
    (`is_recurrent`). No engine's slowdown is applied.
    """
    model, gpu = case.model, case.cluster.gpu
    peak, rows = peak_flops(gpu, precision=wide_precision(gpu)), decoding * (1.0 + drafted)
    roof = {name: kernel(case, name) for name in ("convolution", "convolution_update", "scan", "update")}
    window = window_work(model, t, drafted)
    decode = roofline_seconds(
        decoding * window.flops, decoding * window.traffic, roof["convolution_update"], gpu=gpu, peak=peak
    )
    decode = decode + roofline_seconds(0.0, decoding * state_traffic(model, t, drafted), roof["update"], gpu=gpu, peak=peak)
    prefill = sum(
        chunked_seconds(roof[name], work, tokens=prompt_tokens, prompts=prompts, gpu=gpu, peak=peak)
        for name, work in (("convolution", convolution_work(model, t)), ("scan", scan_work(model, t)))
    )
    reached = case.profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second
    # The norm reads the mixer's output and its gate, and writes the output projection's input.
    norm = (rows + prompt_tokens) * (3.0 * OUTPUT_BYTES * recurrent_width(model) / t) / reached
    launches = case.profile.gpu.kernel_overhead_s * ((decoding > 0.0) + 1.0 * (prompt_tokens > 0.0))
    seconds: FloatArray = (decoding > 0.0) * decode + (prompt_tokens > 0.0) * prefill + norm + launches
    return seconds


def chunked_seconds(
    roof: MixerRoofline, work: Work, *, tokens: FloatArray, prompts: FloatArray, gpu: GpuSpec, peak: float
) -> Floats:
    """Seconds (n,) of a kernel over prompts by MixerRoofline's law; its overhead alone for none."""
    a_token = np.maximum(
        work.flops / (roof.peak_fraction * peak),
        work.traffic / (roof.bandwidth_fraction * gpu.memory_bandwidth_bytes_per_second),
    )
    p, longest = roof.sharpness, tokens / np.maximum(prompts, 1.0)
    terms = (tokens * a_token) ** p + (roof.prompt_rows * prompts * a_token) ** p + (roof.step_s * longest) ** p
    seconds: Floats = roof.overhead_s + roof.token_s * tokens + terms ** (1.0 / p)
    return seconds


def scan_work(model: ModelSpec, t: Ints) -> Work:
    """FLOPs and bytes of the chunked scan for one token on one of t ranks.

    Delta rules (arXiv 2412.06464, section 3.3; 2510.26692, section 3.2), a head of keys of width K and values of width V, in
    chunks of C: K K^T, Q K^T and the chunk's new keys 6 C K; new values and their attention 4 C V; state read twice and
    written 6 K V. State spaces (arXiv 2405.21060, section 6): C B^T 2 Q N a group, and a head of width P 2 Q P + 4 N P, chunks
    of Q; the states between chunks are written, passed on and read in fp32. Mamba's selective scan is taken for that of
    Mamba 2 with its small state: it has no tensor-core arithmetic, so this is a lower bound.
    """
    inner, channels = recurrent_width(model) / t, convolved_width(model, t)
    moved = OUTPUT_BYTES * (channels + inner)
    if model.mixer in ("mamba", "mamba2"):
        state, groups = float(model.ssm_state_size or 0), state_groups(model, t)
        flops = 2.0 * STATE_CHUNK * state * groups + inner * (2.0 * STATE_CHUNK + 4.0 * state)
        return Work(flops, moved + 4.0 * STATE_BYTES * state * inner / STATE_CHUNK)
    heads, key, value = value_heads(model) / t, float(model.linear_key_head_dim or 0), inner * t / value_heads(model)
    decays = key_heads(model) * key / t if model.mixer == "kimi_delta" else heads
    flops = heads * (DELTA_CHUNK * (6.0 * key + 4.0 * value) + 6.0 * key * value)
    return Work(flops, moved + STATE_BYTES * decays)


def convolution_work(model: ModelSpec, t: Ints) -> Work:
    """FLOPs and bytes of the short convolution for one token of a prompt on one of t ranks: channels read and written."""
    channels = convolved_width(model, t)
    return Work(2.0 * convolution_kernel(model) * channels, 2.0 * OUTPUT_BYTES * channels)


def window_work(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Work:
    """FLOPs and bytes of one decoding sequence's short convolution on one of t ranks: the numbers of its window and of its
    drafted tokens, each multiplied, read and written.
    """
    numbers = (convolution_kernel(model) + drafted) * convolved_width(model, t)
    return Work(2.0 * numbers, 2.0 * OUTPUT_BYTES * numbers)


def state_traffic(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Floats:
    """Bytes of the recurrent state that one decoding sequence reads once and writes for each of its tokens, one of t ranks."""
    state = state_numbers(model, t) - (convolution_kernel(model) - 1.0) * convolved_width(model, t)
    return STATE_BYTES * state * (2.0 + drafted)


def convolution_kernel(model: ModelSpec) -> int:
    """Tokens that the short convolution of a recurrent mixer sees."""
    return model.mamba_conv_kernel if model.mixer in ("mamba", "mamba2") else model.linear_conv_kernel_dim


def index_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    context: Floats,
    prompt_tokens: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Seconds (n,) of one layer's index scores and top-k; zero where layers have no indexer of their own.

    Every rank has the whole indexer. A score takes 2 heads x width FLOPs, in 8 bits where the GPU has them. Decoding reads the
    keys of `context` tokens once for each sequence; a prompt's tokens score all keys before them, and its scores are written
    and read.
    """
    model, gpu = case.model, case.cluster.gpu
    if not has_indexer(model):
        return 0.0 * (decoding + prompt_tokens) * t
    peak = peak_flops(gpu, precision="fp8" if "fp8" in gpu.peak_flops_per_second else wide_precision(gpu))
    scores, length = index_flops(model), float(case.input_length)
    decode = roofline_seconds(
        decoding * (1.0 + drafted) * context * scores, decoding * context * INDEX_BYTES * index_width(model),
        kernel(case, "index_decode"), gpu=gpu, peak=peak,
    )  # fmt: skip
    pairs = prompt_tokens * visible_keys(length, cached=length - case.computed_length)
    prefill = additive_seconds(pairs * scores, pairs * 2.0 * SCORE_BYTES, kernel(case, "index"), gpu=gpu, peak=peak)
    seconds: FloatArray = (decoding > 0.0) * decode + (prompt_tokens > 0.0) * prefill + 0.0 * t
    return seconds


def chosen_attention_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    context: Floats,
    prompt_tokens: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Seconds (n,) of one layer's attention over the keys that an indexer chose, on one of t ranks; `case.model` has an
    `index_topk`.

    A token multiplies with min(context, index_topk) keys, latent ones in the latent space in prompts too. Gathering them and
    going through the places of all `index_topk` takes the same time on cards of unlike bandwidth: seconds a token (`token_s`),
    by the number of places.
    """
    model, gpu, most = case.model, case.cluster.gpu, float(case.model.index_topk or 0)
    peak, length = peak_flops(gpu, precision=wide_precision(gpu)), float(case.input_length)
    prompt_keys = visible_keys(length, cached=length - case.computed_length, most=most)

    def attention(name: str, tokens: FloatArray, keys: Floats) -> FloatArray:
        roof, flops = kernel(case, name), tokens * keys * attention_flops(model, t, decoding=True)
        seconds: FloatArray = roofline_seconds(flops, 0.0, roof, gpu=gpu, peak=peak) + roof.token_s * tokens * (
            most / TIMED_PLACES
        )
        return (tokens > 0.0) * seconds

    decode = attention("attention_decode", decoding * (1.0 + drafted), np.minimum(context, most))
    return decode + attention("attention", prompt_tokens, prompt_keys)


def index_flops(model: ModelSpec) -> float:
    """FLOPs of one token's score of one key: 2 heads x width."""
    return 2.0 * (model.index_n_heads or 0) * (model.index_head_dim or 0)


def kernel(case: ServingCase, name: str) -> MixerRoofline:
    """Constants of a kernel of the case's mixer on its die; where nobody timed any near it, a usual share of its peak, and the
    bandwidth and launches of elementwise kernels.
    """
    gpu = case.profile.gpu
    if gpu.mixers is not None:
        return gpu.mixers[_family(case.model)][name]
    return MixerRoofline(peak_fraction=UNTIMED_PEAK, bandwidth_fraction=gpu.memory_fraction, overhead_s=gpu.kernel_overhead_s)


def mixer_log_sd(case: ServingCase) -> float:
    """Standard deviation of log(measured / predicted) of the case's recurrent or sparse kernels, of which no served run was
    measured: as on cards left out of their fit; 0 of other attention.
    """
    model, timed = case.model, case.profile.gpu.mixers
    if not model.is_recurrent and model.index_topk is None:
        return 0.0
    if timed is None:
        return UNTIMED_LOG_SD
    return max(roof.log_sd for roof in timed[_family(model)].values())


def _family(model: ModelSpec) -> str:
    """Whose kernels stand for those of the model's layers."""
    return {"attention": "sparse", "mamba": "mamba2"}.get(model.mixer, model.mixer)


def wide_precision(gpu: GpuSpec) -> Precision:
    """Precision of arithmetic that no format of weights narrows."""
    return "fp32" if gpu.kind == "cpu" else "bf16" if "bf16" in gpu.peak_flops_per_second else "fp16"
