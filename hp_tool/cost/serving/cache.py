"""Model how engines lay out the caches of layers that need different amounts of memory.

vLLM (`vllm/v1/core/kv_cache_utils.py`, `vllm/v1/kv_cache_interface.py` and
`vllm/model_executor/models/config.py` of 0.19 to 0.27) divides layers into groups of equal size, G
layers each, which share one pool of blocks. A page is a block of one layer:

    page        = the largest of the kinds' pages
    block_k     = 16 tokens x floor(page / bytes of 16 tokens of kind k); 16 if that does not divide
    G           = the fewest layers of a kind; the most, if fewer than 1.5 times as many
    bytes       = G x page x sum over kinds of ceil(layers_k / G) x blocks_k
    blocks_k    = ceil(n / block_k)                        layers with keys of the whole request
                  ceil(min(n, w - 1 + chunk) / block_k) + 1    layers with a window w
                  1 + k                                    recurrent layers, k drafted tokens

The last group of a kind is padded to G layers. A recurrent layer's state is one page: the block of
the attention layers grows to the smallest multiple of 16 tokens that is at least as large as a
state.

SGLang (`sglang/srt/model_executor/model_runner_kv_cache_mixin.py` of 0.5) gives each kind a
separate pool, and a request needs room in all of them. The pool of windowed layers has SWA_SHARE
tokens for each token of the full-attention pool. The pool of recurrent layers has MAMBA_RATIO times
the bytes of the other pools. In it, a request occupies KEPT_STATES states, and one more for each
drafted token.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.arrays import FloatArray, Floats, IntArray
from hp_tool.cost.matrices import cached_width
from hp_tool.cost.recurrent import convolution_numbers, state_numbers
from hp_tool.cost.scans import NUMBER_BYTES, STATE_BYTES
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.domain.model import ModelSpec

BLOCK_TOKENS = 16
"""Tokens per block, and the step by which blocks grow (`CacheConfig.block_size`)."""
MAX_PADDING_RATIO = 1.5
"""Ratio of the largest to the smallest number of layers of a kind, below which vLLM pads the kinds
that have fewer layers.
"""
SWA_SHARE = 0.8
"""Default of SGLang's `--swa-full-tokens-ratio`."""
MAMBA_RATIO = 0.9
"""Default of SGLang's `--mamba-full-memory-ratio`."""
KEPT_STATES = 3.0
"""Number of states per request in SGLang's pool: the request's current state, and those of cached
prefixes (`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers that cache the same bytes per token and have the same window."""

    count: int
    token_bytes: FloatArray
    """Bytes per token, layer and rank; 0 for recurrent layers. Shape (n,)."""
    state_bytes: FloatArray
    """Bytes per state, layer and rank; 0 for attention. Shape (n,)."""
    window: int | None
    """Number of tokens that the layers attend to; None for all tokens."""


def cached_layers(case: ServingCase, t: IntArray) -> tuple[Layers, ...]:
    """Return the layers that have a cache, grouped by what they cache.

    Layers that differ only in other respects, such as their experts, are in the same group. If any
    layer of the model attends to all tokens, so do the layers that draft tokens.
    """
    found: dict[tuple[bytes, bytes, int | None], Layers] = {}
    kinds = (
        case.model.kinds if case.drafter is None else (*case.model.kinds, *case.drafter.model.kinds)
    )
    for count, kind in kinds:
        tokens = np.asarray(cached_width(kind, t) * case.kv_element_bytes + 0.0 * t)
        state = np.asarray(state_bytes(kind, t) + 0.0 * t)
        for layers, window in _split_by_window(count, kind):
            if not layers or not (tokens.any() or state.any()):
                continue
            key = (tokens.tobytes(), state.tobytes(), window)
            alike = found[key].count if key in found else 0
            found[key] = Layers(
                count=alike + layers, token_bytes=tokens, state_bytes=state, window=window
            )
    full = [
        key for key, each in found.items() if each.window is None and not each.state_bytes.any()
    ]
    if full:
        each = found[full[-1]]
        found[full[-1]] = replace(each, count=each.count + drafting_layers(case))
    return tuple(found.values())


def token_numbers(case: ServingCase, t: IntArray, *, stages: IntArray | int = 1) -> Floats:
    """Return the number of cached elements per token on one rank, in all layers of the largest
    pipeline stage, including layers that draft tokens.
    """
    model = case.model
    layers = np.ceil(model.num_hidden_layers / stages) + drafting_layers(case)
    numbers = _cached_numbers(model, t) / model.num_hidden_layers * layers
    return numbers if case.drafter is None else numbers + _cached_numbers(case.drafter.model, t)


def _cached_numbers(model: ModelSpec, t: IntArray) -> Floats:
    """Return the number of cached elements per token on one rank, in all layers of a model."""
    return sum(layers * cached_width(kind, t) for layers, kind in model.kinds)


def drafting_layers(case: ServingCase) -> int:
    """Return the number of multi-token-prediction layers of the model that draft tokens."""
    return case.model.num_nextn_predict_layers if drafts_by_itself(case) else 0


def drafts_by_itself(case: ServingCase) -> bool:
    """Return whether tokens are drafted by the model's own layers, or by an assistant published
    with the model.
    """
    drafts = case.speculative
    return drafts is not None and drafts.draft_model is None and drafts.draft_cost_fraction > 0.0


def _split_by_window(count: int, kind: ModelSpec) -> tuple[tuple[int, int | None], ...]:
    """Split the layers of one kind into those with and without a window; return (number of layers,
    window) for each.
    """
    windowed = windowed_layers(kind)
    return ((count - windowed, None), (windowed, kind.sliding_window))


def windowed_layers(model: ModelSpec) -> int:
    """Return the number of layers with a sliding window."""
    if model.sliding_window is None:
        return 0
    return (
        model.num_hidden_layers
        if model.sliding_window_layers is None
        else model.sliding_window_layers
    )


def state_bytes(model: ModelSpec, t: IntArray | int) -> Floats:
    """Return the bytes of one sequence's state per layer and rank: convolutions in 16 bits, the
    rest in fp32; 0 for attention.
    """
    convolution = convolution_numbers(model, t)
    return STATE_BYTES * (state_numbers(model, t) - convolution) + NUMBER_BYTES * convolution


def shared_page(layers: tuple[Layers, ...]) -> FloatArray:
    """Return the bytes of a vLLM page, which is common to all layers; shape (n,)."""
    state = np.max([each.state_bytes for each in layers], axis=0)
    tokens = np.max([each.token_bytes for each in layers], axis=0)
    block = np.maximum(np.ceil(state / np.maximum(tokens, 1.0) / BLOCK_TOKENS), 1.0)
    page: FloatArray = np.where(tokens > 0.0, block * BLOCK_TOKENS * tokens, state)
    return page


def block_tokens(each: Layers, page: FloatArray) -> FloatArray:
    """Return the number of tokens in a cache block of layers of one kind; shape (n,)."""
    least = BLOCK_TOKENS * each.token_bytes
    whole = np.floor(page / np.maximum(least, 1.0))
    divides = whole * least == page
    tokens: FloatArray = BLOCK_TOKENS * np.where(divides, np.maximum(whole, 1.0), 1.0)
    return tokens


def group_size(counts: list[int]) -> int:
    """Return the number of layers per vLLM group, given the number of layers of each kind."""
    return max(counts) if max(counts) < MAX_PADDING_RATIO * min(counts) else min(counts)


def grouped_bytes(
    layers: tuple[Layers, ...],
    tokens: float,
    *,
    chunk: Floats = 0.0,
    drafted: int = 0,
    shared: bool = False,
) -> FloatArray:
    """Return the bytes of one request's blocks on one rank under vLLM; shape (n,).

    Args:
        layers: Layers of all kinds.
        tokens: Tokens of the request.
        chunk: Prompt tokens that windowed layers cache in addition to their window.
        drafted: Drafted tokens per pass.
        shared: Count only the blocks that another request with the same tokens can reuse: full
            blocks, without states.
    """
    page, size = shared_page(layers), group_size([each.count for each in layers])
    blocks: Floats = 0.0
    for each in layers:
        groups = math.ceil(each.count / size)
        if each.state_bytes.any():
            blocks = blocks + (0.0 if shared else groups * (1.0 + drafted))
            continue
        held = tokens if each.window is None else np.minimum(tokens, each.window - 1.0 + chunk)
        each_block = block_tokens(each, page)
        if shared:
            blocks = blocks + groups * np.floor(held / each_block)
        else:
            blocks = blocks + groups * (np.ceil(held / each_block) + (each.window is not None))
    total: FloatArray = size * page * blocks
    return total


def pooled_bytes(
    layers: tuple[Layers, ...], tokens: float, *, drafted: int = 0, shared: bool = False
) -> FloatArray:
    """Return the cache bytes that a request occupies on one rank under SGLang; shape (n,). These
    are the bytes in the pool that it fills most, plus the corresponding part of the other pools.

    Args:
        layers: Layers of all kinds.
        tokens: Tokens of the request.
        drafted: Drafted tokens per pass.
        shared: Omit states.
    """
    states: FloatArray = np.sum([each.count * each.state_bytes for each in layers], axis=0)
    widths: dict[bool, FloatArray] = {True: 0.0 * states, False: 0.0 * states}
    windows = [each.window for each in layers if each.window is not None]
    for each in layers:
        widths[each.window is not None] = (
            widths[each.window is not None] + each.count * each.token_bytes
        )
    if windows:
        apart = widths[False].any()
        token = widths[False] + (SWA_SHARE if apart else 1.0) * widths[True]
        held = min(tokens, max(windows))
        keys = token * (np.maximum(tokens, held / SWA_SHARE) if apart else held)
    else:
        keys = widths[False] * tokens
    total: FloatArray = keys
    if not states.any():
        return total
    if not total.any():
        return (0.0 if shared else KEPT_STATES + drafted) * states
    total = (1.0 + MAMBA_RATIO) * total
    kept = (1.0 + MAMBA_RATIO) / MAMBA_RATIO * (KEPT_STATES + drafted) * states
    return total if shared else np.maximum(total, kept)


def laid_out_bytes(
    case: ServingCase, t: IntArray, tokens: float, *, chunk: Floats, shared: bool
) -> FloatArray | None:
    """Return the cache bytes that a request occupies on one rank, in all layers; shape (n,).

    Returns None if the layout has no effect because all layers cache every token, or if the
    engine's layout is not modelled.
    """
    layers = cached_layers(case, t)
    alike = all(each.window is None and not each.state_bytes.any() for each in layers)
    if alike or case.engine.cache_layout == "exact":
        return None
    if case.engine.cache_layout == "whole":
        layers = tuple(replace(each, window=None) for each in layers)
    drafted = case.speculative.num_speculative_tokens if case.speculative is not None else 0
    if case.engine.cache_layout == "pools":
        return pooled_bytes(layers, tokens, drafted=drafted, shared=shared)
    return grouped_bytes(layers, tokens, chunk=chunk, drafted=drafted, shared=shared)
