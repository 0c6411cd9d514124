"""Table of the seconds of one configuration's passes by their contents, for fast event
simulation.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import (
    drafted_tokens,
    drafting_factor,
    first_token_alone,
    launching,
    prompt_overhead,
    tokens_per_pass,
    with_host,
)
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.memory import serving_bytes
from hp_tool.cost.serving.operations import cached_tokens, read_tokens

_FEW_ROWS = 16
"""Counts up to this one all have an entry in the table; beyond, entries are spaced geometrically
and interpolated linearly.
"""
_PROMPT = 1024.0
"""Tokens of the prompt with which prefill passes are timed; the keys that it attends to are counted
separately.
"""
PROMISED = {"mixed": (0.0, 0.0), "prefill_first": (0.7, 0.098)}
"""Fractions that vLLM and SGLang reserve, by schedule (SGLang's init_new_token_ratio and its final
value).
"""
_LONG = 1e5
"""Cached tokens of a sequence at which the slope over cached tokens is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """Seconds of a scheduler's passes on GPU and host, for one configuration.

    seconds = base(decoding sequences, prompt tokens) + cached_token_s (cached tokens they attend
    to) + key_s (keys that the prompt tokens attend to) + prompt_s (prompts that end)
    """

    decoding: FloatArray
    """Numbers of decoding sequences; shape (d,)."""
    prompt: FloatArray
    """Numbers of prompt tokens; shape (q,)."""
    base: FloatArray
    """Seconds of a pass by decoding sequences and prompt tokens; shape (d, q)."""
    cached_token_s: float
    key_s: float
    prompt_s: float
    request_s: float
    """Seconds of the front end's serial work per request."""
    stream_s: float
    """Seconds of the front end's serial work per streamed token."""
    first_token_s: float
    """Seconds before a first token in which GPU and front end are idle."""
    cache_tokens: float
    """Room for keys, values and states, in tokens of keys and values."""
    state_tokens: int = 0
    """Tokens of the cache that the recurrent states of one request occupy, whatever its length."""
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_first: bool
    promised: tuple[float, float]
    """Fractions of the running requests' future tokens kept free when another request is admitted,
    which in turn reserves its output in full.

    The initial value, and the value after SETTLED passes without preemption. (1, 1): no preemption;
    (0, 0): only the prompt needs room.
    """

    def row(self, decoding: int) -> list[float]:
        """Return `base` for this number of decoding sequences, by `prompt`."""
        at = int(np.clip(np.searchsorted(self.decoding, decoding), 1, len(self.decoding) - 1))
        low, high = self.decoding[at - 1], self.decoding[at]
        share = (decoding - low) / (high - low)
        seconds: list[float] = ((1.0 - share) * self.base[at - 1] + share * self.base[at]).tolist()
        return seconds


def pass_table(*, case: ServingCase, candidates: ServingCandidates, row: int = 0) -> PassTable:
    """Return the table of one candidate on one scheduler; for a pipeline, the time that one more
    pass adds.

    Layers with a window count as in the closed form: by the mean number of tokens they attend to at
    the case's lengths.
    """
    one = candidates.take(slice(row, row + 1))
    engine, stages = case.engine, int(one.pipeline_parallel_size[0])
    decoding, prompt = (
        _places(int(limit[0])) for limit in (one.max_num_seqs, one.max_num_batched_tokens)
    )
    k, factor = (
        drafted_tokens(case.speculative),
        drafting_factor(case.speculative) / tokens_per_pass(case.speculative),
    )

    def seconds(
        sequences: FloatArray, tokens: FloatArray, *, context: float = 0.0, length: float = _PROMPT
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
    nothing, whole = np.zeros(1), np.array([_PROMPT])
    key_s = (seconds(nothing, whole, length=2 * _PROMPT) - seconds(nothing, whole))[0] / (
        0.5 * _PROMPT**2
    )
    few, many = (seconds(nothing + 1.0, nothing, context=context)[0] for context in (0.0, _LONG))
    device = seconds(d, q)
    device = np.where(q > 0.0, np.maximum(device, launching(case)), device)
    base = with_host(engine, device, d).reshape(len(decoding), len(prompt))
    added = (base[:, 1:] - base[:, :1] - key_s * 0.5 * _PROMPT * prompt[1:]) / stages
    base = np.hstack([base[:, :1] * factor, base[:, :1] * factor + added])
    # A pass that only prefills shares no time with decoding.
    base[0, 1:] += np.where(decoding[0] == 0.0, base[0, 0] * (1.0 / stages - 1.0), 0.0)
    length = float(case.input_length + case.output_length)
    at, far = (
        float(np.ravel(read_tokens(case, one.tensor_parallel_size, tokens))[0])
        for tokens in (length, _LONG)
    )
    states, whole_length = (
        float(np.ravel(cached_tokens(case, one.tensor_parallel_size, tokens))[0])
        for tokens in (0.0, length)
    )
    # If only their states limit the number of requests in the cache, requests occupy the same room
    # at any length.
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
        first_token_s=first_token_alone(case),
        cache_tokens=float(max(memory.kv_capacity[0], 0.0) / memory.kv_per_token[0]) / per_token,
        state_tokens=math.ceil(states / per_token),
        max_num_seqs=int(one.max_num_seqs[0]),
        max_num_batched_tokens=int(one.max_num_batched_tokens[0]),
        prefill_first=engine.schedule == "prefill_first",
        promised=(1.0, 1.0)
        if engine.kv_reserved_output_fraction >= 1.0
        else PROMISED[engine.schedule],
    )


def _places(most: int) -> FloatArray:
    """Return 0, the first counts one by one, and then geometrically spaced counts up to `most`."""
    few = np.arange(0.0, min(_FEW_ROWS, most) + 1.0)
    more = np.geomspace(_FEW_ROWS, most, 48) if most > _FEW_ROWS else np.array([])
    return np.unique(np.concatenate([few, more]))
