"""Kernels of recurrent layers and of sparse attention in serving, without their projections.

A recurrent layer stores a state instead of keys and values. Decoding takes the time to read and
write the state. For prompts, a scan processes chunks of tokens. Its work is quadratic in the tokens
of a chunk, and the state carries over from one chunk to the next. Sparse attention first scores all
keys of a context with small heads (the indexer), and then attends to the best `index_topk` keys.
"""

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray, Ints
from hp_tool.cost.matrices import attention_flops, has_indexer, index_width
from hp_tool.cost.recurrent import (
    convolution_numbers,
    convolved_width,
    recurrent_width,
    state_numbers,
)
from hp_tool.cost.roofline import additive_seconds, peak_flops, roofline_seconds
from hp_tool.cost.scans import (
    STATE_BYTES,
    Work,
    chunked_seconds,
    convolution_kernel,
    convolution_work,
    index_flops,
    kernel_family,
    mixer_kernel,
    scan_work,
    wide_precision,
)
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import OUTPUT_BYTES, visible_keys
from hp_tool.cost.sparse_attention import SCORE_BYTES, TIMED_PLACES
from hp_tool.domain.model import ModelSpec

INDEX_BYTES = 1.0 + 4.0 / 128.0
"""Bytes per element of an indexer's key: 8 bits, and an fp32 scale per 128 elements
(DeepSeek-V3.2).
"""
UNTIMED_LOG_SD = 0.7
"""Assumed standard deviation of log(measured / predicted) for kernels without timings on similar
GPUs. In two of three cases, predictions are within a factor of two.
"""


def mixer_seconds(
    case: ServingCase,
    t: IntArray,
    *,
    decoding: FloatArray,
    prompt_tokens: FloatArray,
    prompts: FloatArray,
    drafted: int = 0,
) -> FloatArray:
    """Return the time in seconds of one recurrent layer on one of t ranks, without projections;
    shape (n,).

    Includes the short convolution, the update or scan of the state, and the gated norm. Excludes
    the engine's slowdown. Each of the `decoding` sequences processes one token and `drafted`
    drafted tokens. The `prompts` prompts have `prompt_tokens` tokens in total. Decoding reads a
    sequence's state once and writes it for each of its tokens. All layers of `case.model` have the
    same recurrent mixer.
    """
    model, gpu = case.model, case.cluster.gpu
    peak, rows = peak_flops(gpu, precision=wide_precision(gpu)), decoding * (1.0 + drafted)
    roof = {
        name: mixer_kernel(case, model, name)
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
    # The norm reads the mixer's output and its gate, and writes the input of the output projection.
    norm = (rows + prompt_tokens) * (3.0 * OUTPUT_BYTES * recurrent_width(model) / t) / reached
    launches = case.profile.gpu.kernel_overhead_s * ((decoding > 0.0) + 1.0 * (prompt_tokens > 0.0))
    seconds: FloatArray = (
        (decoding > 0.0) * decode + (prompt_tokens > 0.0) * prefill + norm + launches
    )
    return seconds


def window_work(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Work:
    """Return the FLOPs and bytes of the short convolution for one decoding sequence on one of t
    ranks.

    Each element of the window and of the drafted tokens is read, multiplied and written once.
    """
    numbers = (convolution_kernel(model) + drafted) * convolved_width(model, t)
    return Work(2.0 * numbers, 2.0 * OUTPUT_BYTES * numbers)


def state_traffic(model: ModelSpec, t: Ints, drafted: Ints = 0) -> Floats:
    """Return the bytes of recurrent state that one decoding sequence moves on one of t ranks.

    The state is read once, and written for each of the sequence's tokens.
    """
    state = state_numbers(model, t) - convolution_numbers(model, t)
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
    """Return the time in seconds of one layer's index scores and top-k, shape (n,); zero for layers
    without an indexer.

    Each rank has the complete indexer. A score takes 2 heads x width FLOPs, in 8 bits if the GPU
    supports them. Decoding reads the keys of `context` tokens once per sequence. Each token of a
    prompt is scored with all previous keys, and the scores are written and read.
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
        mixer_kernel(case, model, "index_decode"),
        gpu=gpu,
        peak=peak,
    )
    pairs = prompt_tokens * visible_keys(length, cached=length - case.computed_length)
    prefill = additive_seconds(
        pairs * scores,
        pairs * 2.0 * SCORE_BYTES,
        mixer_kernel(case, model, "index"),
        gpu=gpu,
        peak=peak,
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
    """Return the time in seconds of one layer's attention over the selected keys, on one of t
    ranks; shape (n,).

    `case.model` must have an `index_topk`. A token uses min(context, index_topk) keys, which are
    latent vectors, even in prompts. Gathering `index_topk` positions takes the same time on GPUs of
    different bandwidth. Each token therefore adds a time (`token_s`) that depends on the number of
    positions.
    """
    model, gpu, most = case.model, case.cluster.gpu, float(case.model.index_topk or 0)
    peak, length = peak_flops(gpu, precision=wide_precision(gpu)), float(case.input_length)
    prompt_keys = visible_keys(length, cached=length - case.computed_length, most=most)

    def attention(name: str, tokens: FloatArray, keys: Floats) -> FloatArray:
        roof, flops = (
            mixer_kernel(case, model, name),
            tokens * keys * attention_flops(model, t, decoding=True),
        )
        seconds: FloatArray = roofline_seconds(
            flops, 0.0, roof, gpu=gpu, peak=peak
        ) + roof.token_s * tokens * (most / TIMED_PLACES)
        return (tokens > 0.0) * seconds

    decode = attention("attention_decode", decoding * (1.0 + drafted), np.minimum(context, most))
    return decode + attention("attention", prompt_tokens, prompt_keys)


def mixer_log_sd(case: ServingCase) -> float:
    """Return the standard deviation of log(measured / predicted) of the case's recurrent or
    sparse-attention kernels; 0 for other attention.

    No serving run with such kernels was measured. The value is therefore the deviation on GPU types
    that were held out of the fit.
    """
    model, timed = case.model, case.profile.gpu.mixers
    if not model.is_recurrent and model.index_topk is None:
        return 0.0
    if timed is None:
        return UNTIMED_LOG_SD
    return max(roof.log_sd for roof in timed[kernel_family(model)].values())
