"""Table of one configuration's pass times, which the event simulation looks up."""

import math
from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import (
    drafted_tokens,
    drafting_factor,
    first_token_wait_seconds,
    min_launch_seconds,
    prompt_overhead,
    tokens_per_pass,
    with_host,
)
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.memory import serving_bytes
from hp_tool.cost.serving.operations import cached_tokens, read_tokens

_FEW_ROWS = 16
"""Largest count up to which every count has an entry in the table. Larger entries are spaced
geometrically and interpolated linearly.
"""
_PROMPT_TOKENS = 1024.0
"""Length of the prompt with which prefill passes are timed. Attention to its keys is counted
separately.
"""
PROMISED = {"mixed": (0.0, 0.0), "prefill_first": (0.7, 0.098)}
"""Fractions of the future output that vLLM and SGLang reserve, by schedule: (initial, final) value
(SGLang's init_new_token_ratio).
"""
_LONG_CONTEXT = 1e5
"""Cached tokens per sequence at which the slope with respect to cached tokens is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """Seconds of a scheduler's passes on GPU and host, for one configuration.

    seconds = base(decoding sequences, prompt tokens) + cached_token_s x (cached tokens that they
    attend to) + key_s x (keys that the prompt tokens attend to) + prompt_s x (number of prompts
    that end)
    """

    decoding: FloatArray
    """Numbers of decoding sequences with an entry in the table; shape (d,)."""
    prompt: FloatArray
    """Numbers of prompt tokens with an entry in the table; shape (q,)."""
    base: FloatArray
    """Seconds of a pass, by decoding sequences and prompt tokens; shape (d, q)."""
    cached_token_s: float
    key_s: float
    prompt_s: float
    request_s: float
    """Seconds of serial front-end work per request."""
    stream_s: float
    """Seconds of serial front-end work per streamed token."""
    first_token_s: float
    """Seconds before a first token in which neither GPU nor front end works on the request."""
    cache_tokens: float
    """Size of the cache, in tokens of keys and values."""
    state_tokens: int = 0
    """Cache tokens that the recurrent states of a request occupy, regardless of its length."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_first: bool
    promised: tuple[float, float]
    """Fractions of the running requests' future tokens that are kept free when another request is
    admitted. The new request reserves its output in full. The first value applies initially, and
    the second after SETTLED passes without preemption. With (1, 1), there is no preemption. With
    (0, 0), only the prompt needs room.
    """

    def row(self, decoding: int) -> list[float]:
        """Interpolate `base` for this number of decoding sequences; one value for each number in
        `prompt`.
        """
        at = int(np.clip(np.searchsorted(self.decoding, decoding), 1, len(self.decoding) - 1))
        low, high = self.decoding[at - 1], self.decoding[at]
        share = (decoding - low) / (high - low)
        seconds: list[float] = ((1.0 - share) * self.base[at - 1] + share * self.base[at]).tolist()
        return seconds


def pass_table(*, case: ServingCase, candidates: ServingCandidates, row: int = 0) -> PassTable:
    """Return the table of one candidate on one scheduler. For a pipeline, the seconds are those
    that one more pass adds.

    Windowed layers use the mean number of tokens that they attend to at the case's lengths, as in
    `serving_costs`.
    """
    one = candidates.take(slice(row, row + 1))
    engine, stages = case.engine, int(one.pipeline_parallel_size[0])
    decoding, prompt = (
        _table_counts(int(limit[0])) for limit in (one.max_num_seqs, one.max_num_batched_tokens)
    )
    k, factor = (
        drafted_tokens(case.speculative),
        drafting_factor(case.speculative) / tokens_per_pass(case.speculative),
    )

    def seconds(
        sequences: FloatArray,
        tokens: FloatArray,
        *,
        context: float = 0.0,
        length: float = _PROMPT_TOKENS,
    ) -> FloatArray:
        timed = replace(case, input_length=int(length), prefix_cache_hit_rate=0.0)
        batch = Pass(
            tokens=sequences * (1 + k) + tokens,
            decoding=sequences,
            prefill_requests=tokens / length,
            drafted=k,
        )
        pass_s: FloatArray = forward_seconds(
            timed, one.take(np.zeros(len(tokens), dtype=np.intp)), batch, context=context
        )
        return pass_s

    d, q = (axis.ravel() for axis in np.meshgrid(decoding / stages, prompt, indexing="ij"))
    nothing, whole = np.zeros(1), np.array([_PROMPT_TOKENS])
    key_s = (seconds(nothing, whole, length=2 * _PROMPT_TOKENS) - seconds(nothing, whole))[0] / (
        0.5 * _PROMPT_TOKENS**2
    )
    few, many = (
        seconds(nothing + 1.0, nothing, context=context)[0] for context in (0.0, _LONG_CONTEXT)
    )
    device = seconds(d, q)
    device = np.where(q > 0.0, np.maximum(device, min_launch_seconds(case)), device)
    base = with_host(engine, device, d).reshape(len(decoding), len(prompt))
    added = (base[:, 1:] - base[:, :1] - key_s * 0.5 * _PROMPT_TOKENS * prompt[1:]) / stages
    base = np.hstack([base[:, :1] * factor, base[:, :1] * factor + added])
    # A prefill-only pass shares no time with decoding.
    base[0, 1:] += np.where(decoding[0] == 0.0, base[0, 0] * (1.0 / stages - 1.0), 0.0)
    length = float(case.input_length + case.output_length)
    at, far = (
        float(np.ravel(read_tokens(case, one.tensor_parallel_size, tokens))[0])
        for tokens in (length, _LONG_CONTEXT)
    )
    states, whole_length = (
        float(np.ravel(cached_tokens(case, one.tensor_parallel_size, tokens))[0])
        for tokens in (0.0, length)
    )
    # If only recurrent states limit the number of requests in the cache, a request occupies the
    # same room at any length.
    per_token = max(whole_length - states, 1e-3 * whole_length) / length
    seen = at / length / far
    memory = serving_bytes(case, one)
    return PassTable(
        decoding=decoding,
        prompt=prompt,
        base=base,
        cached_token_s=float(many - few) * seen / stages * factor,
        key_s=float(key_s) / stages,
        prompt_s=prompt_overhead(case) / stages,
        request_s=engine.request_overhead_s,
        stream_s=engine.stream_overhead_s,
        first_token_s=first_token_wait_seconds(case),
        cache_tokens=float(max(memory.kv_capacity[0], 0.0) / memory.kv_per_token[0]) / per_token,
        state_tokens=math.ceil(states / per_token),
        max_num_seqs=int(one.max_num_seqs[0]),
        max_num_batched_tokens=int(one.max_num_batched_tokens[0]),
        prefill_first=engine.schedule == "prefill_first",
        promised=(1.0, 1.0)
        if engine.kv_reserved_output_fraction >= 1.0
        else PROMISED[engine.schedule],
    )


def _table_counts(most: int) -> FloatArray:
    """Return 0, all counts up to _FEW_ROWS, and then geometrically spaced counts up to `most`."""
    few = np.arange(0.0, min(_FEW_ROWS, most) + 1.0)
    more = np.geomspace(_FEW_ROWS, most, 48) if most > _FEW_ROWS else np.array([])
    return np.unique(np.concatenate([few, more]))
