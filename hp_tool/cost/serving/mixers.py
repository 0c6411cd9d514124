"""Kernels of recurrent mixers and of sparse attention while serving, besides the projections around
them.

A recurrent layer keeps a state instead of keys and values. While decoding, its time is that of
reading and writing the state; over prompts a scan goes through chunks of tokens, quadratic within a
chunk and by the state between chunks. Sparse attention scores all keys of a context with small
heads (the indexer), and attends to the best `index_topk` of them.
"""

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray, Ints
from hp_tool.cost.matrices import attention_flops, has_indexer, index_width
from hp_tool.cost.recurrent import convolved_width, recurrent_width, state_numbers
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.scans import (
    STATE_BYTES,
    Work,
    chunked_seconds,
    convolution_kernel,
    convolution_work,
    family,
    index_flops,
    kernel,
    scan_work,
    wide_precision,
)
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import OUTPUT_BYTES, visible_keys
from hp_tool.cost.sparse_attention import SCORE_BYTES, TIMED_PLACES
from hp_tool.domain.model import ModelSpec

INDEX_BYTES = 1.0 + 4.0 / 128.0
"""Bytes of a number of an indexer's key: 8 bits, and an fp32 scale for 128 of them
(DeepSeek-V3.2).
"""
UNTIMED_LOG_SD = 0.7
"""Of kernels that nobody timed near a die: within a factor of two in two cases of three. Judged."""


def mixer_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    prompt_tokens: FloatArray,
    prompts: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Seconds (n,) of one recurrent layer on one of t ranks, without its projections: short
    convolution, update or scan of the state, gated norm.

    `decoding` sequences take one token and `drafted` ones each; `prompts` prompts have
    `prompt_tokens` tokens in all. Decoding reads a sequence's state once and writes it for each of
    its tokens. `case.model` has layers of one recurrent mixer (`is_recurrent`). No engine's
    slowdown is applied.
    """
    model, gpu = case.model, case.cluster.gpu
    peak, rows = peak_flops(gpu, precision=wide_precision(gpu)), decoding * (1.0 + drafted)
    roof = {
        name: kernel(case, model, name)
        for name in ("convolution", "convolution_update", "scan", "update")
    }
    window = window_work(model, t, drafted)
    decode = roofline_seconds(
        decoding * window.flops,
        decoding * window.traffic,
        roof["convolution_update"],
        gpu=gpu,
        peak=peak,
    )
    decode = decode + roofline_seconds(
        0.0, decoding * state_traffic(model, t, drafted), roof["update"], gpu=gpu, peak=peak
    )
    prefill = sum(
        chunked_seconds(roof[name], work, tokens=prompt_tokens, prompts=prompts, gpu=gpu, peak=peak)
        for name, work in (
            ("convolution", convolution_work(model, t)),
            ("scan", scan_work(model, t)),
        )
    )
    reached = case.profile.gpu.memory_fraction * gpu.memory_bandwidth_bytes_per_second
    # The norm reads the mixer's output and its gate, and writes the output projection's input.
    norm = (rows + prompt_tokens) * (3.0 * OUTPUT_BYTES * recurrent_width(model) / t) / reached
    launches = case.profile.gpu.kernel_overhead_s * ((decoding > 0.0) + 1.0 * (prompt_tokens > 0.0))
    seconds: FloatArray = (
        (decoding > 0.0) * decode + (prompt_tokens > 0.0) * prefill + norm + launches
    )
    return seconds


def window_work(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Work:
    """FLOPs and bytes of one decoding sequence's short convolution on one of t ranks: the numbers
    of its window and of its drafted tokens, each multiplied, read and written.
    """
    numbers = (convolution_kernel(model) + drafted) * convolved_width(model, t)
    return Work(2.0 * numbers, 2.0 * OUTPUT_BYTES * numbers)


def state_traffic(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Floats:
    """Bytes of the recurrent state that one decoding sequence reads once and writes for each of its
    tokens, one of t ranks.
    """
    state = state_numbers(model, t) - (convolution_kernel(model) - 1.0) * convolved_width(model, t)
    return STATE_BYTES * state * (2.0 + drafted)


def index_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    context: Floats,
    prompt_tokens: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Seconds (n,) of one layer's index scores and top-k; zero where layers have no indexer of
    their own.

    Every rank has the whole indexer. A score takes 2 heads x width FLOPs, in 8 bits where the GPU
    has them. Decoding reads the keys of `context` tokens once for each sequence; a prompt's tokens
    score all keys before them, and its scores are written and read.
    """
    model, gpu = case.model, case.cluster.gpu
    if not has_indexer(model):
        return 0.0 * (decoding + prompt_tokens) * t
    peak = peak_flops(
        gpu, precision="fp8" if "fp8" in gpu.peak_flops_per_second else wide_precision(gpu)
    )
    scores, length = index_flops(model), float(case.input_length)
    decode = roofline_seconds(
        decoding * (1.0 + drafted) * context * scores,
        decoding * context * INDEX_BYTES * index_width(model),
        kernel(case, model, "index_decode"),
        gpu=gpu,
        peak=peak,
    )
    pairs = prompt_tokens * visible_keys(length, cached=length - case.computed_length)
    prefill = additive_seconds(
        pairs * scores, pairs * 2.0 * SCORE_BYTES, kernel(case, model, "index"), gpu=gpu, peak=peak
    )
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
    """Seconds (n,) of one layer's attention over the keys that an indexer chose, on one of t ranks;
    `case.model` has an `index_topk`.

    A token multiplies with min(context, index_topk) keys, latent ones in the latent space in
    prompts too. Gathering them and going through the places of all `index_topk` takes the same time
    on cards of unlike bandwidth: seconds a token (`token_s`), by the number of places.
    """
    model, gpu, most = case.model, case.cluster.gpu, float(case.model.index_topk or 0)
    peak, length = peak_flops(gpu, precision=wide_precision(gpu)), float(case.input_length)
    prompt_keys = visible_keys(length, cached=length - case.computed_length, most=most)

    def attention(name: str, tokens: FloatArray, keys: Floats) -> FloatArray:
        roof, flops = (
            kernel(case, model, name),
            tokens * keys * attention_flops(model, t, decoding=True),
        )
        seconds: FloatArray = roofline_seconds(
            flops, 0.0, roof, gpu=gpu, peak=peak
        ) + roof.token_s * tokens * (most / TIMED_PLACES)
        return (tokens > 0.0) * seconds

    decode = attention("attention_decode", decoding * (1.0 + drafted), np.minimum(context, most))
    return decode + attention("attention", prompt_tokens, prompt_keys)


def mixer_log_sd(case: ServingCase) -> float:
    """Standard deviation of log(measured / predicted) of the case's recurrent or sparse kernels, of
    which no served run was measured: as on cards left out of their fit; 0 of other attention.
    """
    model, timed = case.model, case.profile.gpu.mixers
    if not model.is_recurrent and model.index_topk is None:
        return 0.0
    if timed is None:
        return UNTIMED_LOG_SD
    return max(roof.log_sd for roof in timed[family(model)].values())
