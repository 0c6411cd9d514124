"""Disaggregated serving: one pool of replicas prefills, another one decodes, and the network moves
keys and values between them.

Symbols: n replicas per pool; C requests in flight; s seconds of a prefill replica's time per
prompt; x seconds to transfer the prompt's keys and values; D(b) seconds of a decoding step of b
sequences; O output tokens; l requests per second. A replica of an MoE model prefills as many
prompts at once as fit in the batches of its attention groups. Each of these prompts takes the
complete pass.

A decoding replica runs b requests, so l = n_d b / ((O - 1) D(b)). Prefill completes at most n_p / s
requests per second. Requests in flight that are neither transferred nor decoded wait for prefill.
The load settles at the largest b with

    l(b) < n_p / s,   n_d b + l(b) (s + x + h + q(l) + w) <= C,
    b <= what the cache and max_num_seqs allow

(rate matching: with too few prefill replicas, b stays small and decoding replicas are underused;
with too many, prefill replicas are idle). h is the time that a request spends between the pools,
excluding the transfer. q = r s / (2 (1 - r)) is its wait for a replica that is busy for a fraction
r = l s / n_p of the time (M/D/1 queue). w = W C s / (2 n_p) is the wait of the first requests, a
fraction W of all, which arrive at once. By Little's law, the time to first token is C / l - (O - 1)
D(b). It includes all of these waits, and the wait for a decoding slot.

The fraction (1 - r) exp(r t / s) of individual requests waits at most t <= s (exact for M/D/1).
Beyond s, the fraction that waits longer falls as exp(-e t / s) with r (exp(e) - 1) = e, to third
order e = 3 (sqrt(1/4 + 2/3 (1 - r)/r) - 1/2). The waits of a closed load's first requests are
uniformly distributed over their wave. If requests arrive at a rate, b fluctuates as derived in
`load`, and D(b) fluctuates with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.matrices import cached_width
from hp_tool.cost.recurrent import state_numbers
from hp_tool.cost.scans import STATE_BYTES
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import (
    drafted_tokens,
    drafting_factor,
    first_token_wait_seconds,
    has_room,
    min_launch_seconds,
    prompt_overhead,
    tokens_per_pass,
    with_host,
)
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.load import (
    LEAST_ELASTICITY,
    STEP,
    Quantiles,
    load_deviations,
    ttft_quantile,
)
from hp_tool.cost.serving.memory import serving_bytes
from hp_tool.cost.serving.operations import requests_in_cache, seen_tokens
from hp_tool.domain.model import ModelSpec

_TABLE_SIZE = 96
"""Number of batch sizes at which the step time is computed. Values between them are
interpolated linearly.
"""
_NUM_BISECTIONS = 40
"""Number of bisection steps for b, after which the error is far below one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCosts:
    """Costs of n pairs of pools under one load; shape (n,)."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    request_latency_s: FloatArray
    transfer_s: FloatArray
    request_rate_per_second: FloatArray
    output_tokens_per_second_per_gpu: FloatArray
    prefill_tokens_per_second_per_gpu: FloatArray
    decode_tokens_per_second_per_gpu: FloatArray
    prefill_busy: FloatArray
    """Fraction of the time in which a prefill replica is busy. If it is near 1, prefill limits the
    rate.
    """
    prompt_s: FloatArray
    """Seconds of a prefill replica's time per prompt in a long series of prompts (s)."""
    wave_s: FloatArray
    """Mean seconds that requests which arrive at once wait for each other (w); 0 if requests arrive
    at a rate.
    """
    decode_batch: FloatArray
    """Number of requests that a decoding replica runs concurrently (b)."""
    max_decode_batch: FloatArray
    fits: BoolArray
    """Whether the weights and one complete request fit on a replica of each pool."""
    sustained: BoolArray
    """Whether the request rate is reached. True for a closed load, which has no rate."""


def pool_costs(
    *,
    prefill: ServingCase,
    decode: ServingCase,
    prefillers: ServingCandidates,
    decoders: ServingCandidates,
    requests_per_second: float | FloatArray | None = None,
    handover_s: float = 0.0,
) -> PoolCosts:
    """Return the costs of pairs of pools: row i pairs the replicas of prefillers[i] with those of
    decoders[i].

    The load is the candidates' concurrency, or `requests_per_second`. In the latter case, requests
    do not arrive at once, and `sustained` is True if both pools reach the rate. The pools may have
    GPUs of different types. data_parallel_size is the number of attention groups of a pool: one per
    replica of a dense model.

    The costs include the wait for prefill, prefill, the transfer through the network ports of the
    ranks on both sides, decoding, the engine's overheads on both sides, and `handover_s`, the time
    that a request spends between the pools in addition to the transfer. Splitting a prompt into
    chunks costs nothing, because prefill replicas do not decode.
    """
    load, output = decoders.concurrency.astype(np.float64), float(decode.output_length)
    n_p, n_d = prefillers.replicas, decoders.replicas
    prompt_latency_s, prompt_s = prompt_seconds(prefill, prefillers)
    transfer_s = transfer_seconds(prefill, decode, prefillers, decoders)
    unqueued_s = prompt_latency_s + transfer_s + handover_s
    wave_s = 0.5 * prefill.wave_share * load * prompt_s / n_p
    memory = serving_bytes(decode, decoders)
    cache_tokens = np.maximum(memory.kv_capacity, 0.0) / memory.kv_per_token
    length = float(decode.input_length)
    t = decoders.tensor_parallel_size
    request_tokens = length + decode.engine.kv_reserved_output_fraction * output
    requests_in_room = requests_in_cache(decode, t, cache_tokens, request_tokens)
    group_limit: FloatArray = np.minimum(np.maximum(requests_in_room, 1.0), decoders.max_num_seqs)
    batch_limit: FloatArray = group_limit * decoders.attention_data_parallel_size
    prefill_memory = serving_bytes(prefill, prefillers)
    fits = has_room(decode, decoders, memory, length + output) & has_room(
        prefill, prefillers, prefill_memory, length
    )

    fast_token_seconds = (
        None if decode.model.num_experts is None else _interpolated_token_seconds(decode, decoders)
    )

    def rate(batch: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return (requests per second, seconds per token) if each decoding replica runs `batch`
        requests.
        """
        token_s = token_seconds(decode, decoders, batch)
        return n_d * batch / np.maximum((output - 1.0) * token_s, 1e-12), token_s

    def requests_completed_per_second(batch: FloatArray) -> FloatArray:
        if fast_token_seconds is None:
            return rate(batch)[0]
        return n_d * batch / np.maximum((output - 1.0) * fast_token_seconds(batch), 1e-12)

    low, high = np.zeros_like(load), np.minimum(batch_limit, load / n_d)
    if requests_per_second is not None:
        high = batch_limit.copy()
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        completed = requests_completed_per_second(np.maximum(middle, 1e-9))
        if requests_per_second is None:
            before_decoding_s = (
                unqueued_s + wave_s + _prompt_queue(completed * prompt_s / n_p, prompt_s)
            )
            enough = (completed < n_p / prompt_s) & (
                n_d * middle + completed * before_decoding_s <= load
            )
        else:
            enough = completed <= requests_per_second
        low, high = np.where(enough, middle, low), np.where(enough, high, middle)
    # With fewer than one request, a replica is sometimes idle and otherwise runs at the speed of
    # one request.
    batch = np.maximum(low, 1e-9)
    completed, token_s = rate(batch)
    if output == 1.0:  # one output token: nothing to decode
        completed, token_s = np.minimum(n_p / prompt_s, load / unqueued_s), np.zeros_like(load)
    decoding = (output - 1.0) * token_s
    if requests_per_second is None:
        latency, sustained = load / completed, np.ones(len(load), dtype=bool)
    else:
        busy = requests_per_second * prompt_s / n_p
        sustained = (busy < 1.0) & ((rate(batch_limit)[0] >= requests_per_second) | (output == 1.0))
        completed = np.where(sustained, requests_per_second, np.minimum(n_p / prompt_s, completed))
        latency = np.where(sustained, _prompt_queue(busy, prompt_s), 0.0) + unqueued_s + decoding
    prefill_gpus, decode_gpus = n_p * _ranks(prefillers), n_d * _ranks(decoders)
    return PoolCosts(
        ttft_s=latency - decoding,
        tpot_s=token_s,
        request_latency_s=latency,
        transfer_s=transfer_s,
        request_rate_per_second=completed,
        output_tokens_per_second_per_gpu=completed * output / (prefill_gpus + decode_gpus),
        prefill_tokens_per_second_per_gpu=completed * length / prefill_gpus,
        decode_tokens_per_second_per_gpu=completed * output / decode_gpus,
        prefill_busy=completed * prompt_s / n_p,
        prompt_s=prompt_s,
        wave_s=wave_s if requests_per_second is None else np.zeros_like(load),
        decode_batch=batch,
        max_decode_batch=batch_limit,
        fits=fits,
        sustained=sustained,
    )


def _prompt_queue(busy: FloatArray, service: FloatArray) -> FloatArray:
    """Return the mean seconds that prompts wait for a replica that is busy for a fraction `busy` of
    the time. Prompts arrive at random times.
    """
    seconds: FloatArray = busy / (2.0 * np.maximum(1.0 - busy, 1e-9)) * service
    return seconds


def _wait_quantile(busy: FloatArray, service: FloatArray, share: float) -> FloatArray:
    """Return the quantile `share` of the seconds that prompts wait for a replica. Prompts arrive at
    random times.
    """
    r = np.clip(busy, 1e-9, 1.0 - LEAST_ELASTICITY)
    within = (1.0 - r) * np.exp(r)
    falls = 3.0 * (np.sqrt(0.25 + 2.0 / 3.0 * (1.0 - r) / r) - 0.5)
    beyond = 1.0 + np.log((1.0 - within) / (1.0 - share)) / falls
    seconds: FloatArray = service * np.where(
        share <= within, np.maximum(np.log(share / (1.0 - r)) / r, 0.0), beyond
    )
    return seconds


def pool_quantiles(
    *,
    prefill: ServingCase,
    decode: ServingCase,
    decoders: ServingCandidates,
    costs: PoolCosts,
    share: float,
    independent: bool,
) -> Quantiles:
    """Return the quantile `share` of the latencies; shape (n,).

    `independent` means that requests arrive at a rate. The quantile of a request's latency is the
    sum of the quantiles of both pools, which is an upper bound.
    """
    waiting = _wait_quantile(costs.prefill_busy, costs.prompt_s, share) - _prompt_queue(
        costs.prefill_busy, costs.prompt_s
    )
    ttft = waiting + ttft_quantile(
        ttft_s=costs.ttft_s, wave_s=costs.wave_s, share=share, wave_share=prefill.wave_share
    )
    tpot = costs.tpot_s
    if independent and decode.output_length > 1:
        slower = token_seconds(decode, decoders, (1.0 - STEP) * costs.decode_batch)
        elasticity = np.clip(
            (1.0 - (1.0 - STEP) * costs.tpot_s / slower) / STEP, LEAST_ELASTICITY, 1.0
        )
        stay = load_deviations(costs.decode_batch, elasticity=elasticity)[1]
        batch = np.clip(
            costs.decode_batch + NormalDist().inv_cdf(share) * stay, 1e-9, costs.max_decode_batch
        )
        tpot = token_seconds(decode, decoders, batch)
    return Quantiles(
        ttft_s=ttft, tpot_s=tpot, request_latency_s=ttft + (decode.output_length - 1.0) * tpot
    )


def prompt_seconds(
    case: ServingCase, candidates: ServingCandidates
) -> tuple[FloatArray, FloatArray]:
    """Return (latency of a single prompt on its attention group, seconds of the replica's time per
    prompt in a long series of prompts).

    Both include the engine's overhead. Attention groups share experts, so they prefill at the same
    time. With experts, a pass contains as many complete prompts as its token limit allows.
    """
    engine, ones = case.engine, np.ones(len(candidates))
    groups, stages = candidates.attention_data_parallel_size, candidates.pipeline_parallel_size
    together = ones
    if case.model.num_experts is not None:
        together = np.maximum(candidates.max_num_batched_tokens // case.computed_length, 1.0)

    def seconds(prompts: FloatArray) -> FloatArray:
        batch = Pass(
            tokens=prompts * case.computed_length, decoding=0.0 * ones, prefill_requests=prompts
        )
        # Pipeline stages process different prompts: the replica completes a pass every p-th part of
        # its latency.
        device = np.maximum(
            forward_seconds(case, candidates, batch, context=float(case.input_length)),
            min_launch_seconds(case),
        )
        host = with_host(engine, device, 0.0 * ones)
        return (host + prompts * prompt_overhead(case)) / stages

    alone = np.maximum(seconds(ones), engine.request_overhead_s)
    if case.model.num_experts is None:
        return alone, alone
    many = np.maximum(seconds(together) / together, engine.request_overhead_s) / groups
    return alone + first_token_wait_seconds(case), many


def token_seconds(
    case: ServingCase, candidates: ServingCandidates, batch: FloatArray
) -> FloatArray:
    """Return the seconds between two tokens of a sequence on a replica that decodes `batch`
    sequences and does not prefill.
    """
    engine, stages = case.engine, candidates.pipeline_parallel_size
    k = drafted_tokens(case.speculative)
    each = np.maximum(batch / candidates.attention_data_parallel_size, 1.0)
    share = each / stages
    step = Pass(
        tokens=share * (1 + k), decoding=share, prefill_requests=np.zeros_like(share), drafted=k
    )
    context = case.input_length + 0.5 * case.output_length
    seconds = with_host(engine, forward_seconds(case, candidates, step, context=context), share)
    device = seconds * drafting_factor(case.speculative) / tokens_per_pass(case.speculative)
    # The front end of an attention group streams one token of each of its sequences, one after
    # another.
    return np.hypot(device, each * engine.stream_overhead_s)


def _interpolated_token_seconds(
    case: ServingCase, candidates: ServingCandidates
) -> Callable[[FloatArray], FloatArray]:
    """Return a function that interpolates `token_seconds` between _TABLE_SIZE batch sizes.

    Candidates that differ only in the number of replicas share a table, because predicting layers
    with experts takes several times as long as predicting other layers.
    """
    groups = candidates.attention_data_parallel_size
    columns = [
        getattr(candidates, f.name)
        for f in fields(candidates)
        if f.name not in ("data_parallel_size", "concurrency")
    ]
    _, first, which = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    layouts = candidates.take(np.repeat(first, _TABLE_SIZE))
    most = np.maximum(candidates.max_num_seqs, 2).astype(np.float64)
    steps = np.arange(_TABLE_SIZE) / (_TABLE_SIZE - 1.0)
    places = most[first][:, None] ** steps
    timed = token_seconds(
        case, layouts, places.ravel() * layouts.attention_data_parallel_size
    ).reshape(places.shape)
    row = which.ravel()

    def seconds(batch: FloatArray) -> FloatArray:
        each = np.clip(batch / groups, 1.0, most)
        at = np.clip(
            (np.log(each) / np.log(most) * (_TABLE_SIZE - 1.0)).astype(np.int64), 0, _TABLE_SIZE - 2
        )
        low, high = places[row, at], places[row, at + 1]
        share = (each - low) / (high - low)
        interpolated: FloatArray = (1.0 - share) * timed[row, at] + share * timed[row, at + 1]
        return interpolated

    return seconds


def transfer_seconds(
    prefill: ServingCase,
    decode: ServingCase,
    prefillers: ServingCandidates,
    decoders: ServingCandidates,
) -> FloatArray:
    """Return the seconds to transfer a prompt's keys and values between replicas through the
    network port of each rank.

    The time is latency + bytes / (ports x bandwidth), for the slower side. The ranks of one
    attention group store a prompt's keys and values. Faster links between pools on the same node
    are ignored.
    """
    moved, *others = (
        _prompt_bytes(
            kind,
            prefillers.tensor_parallel_size,
            float(prefill.input_length),
            decode.kv_element_bytes,
        )
        for _, kind in prefill.model.kinds
    )
    for each in others:
        moved = moved + each
    sides = []
    for case, candidates in ((prefill, prefillers), (decode, decoders)):
        network = case.profile.framework.network
        port = network.bandwidth_fraction * case.cluster.inter_node_bandwidth_bytes_per_second
        sides.append(_ranks(candidates) // candidates.attention_data_parallel_size * port)
    latency = prefill.profile.framework.network.latency_s + prefill.cluster.inter_node_latency_s
    seconds: FloatArray = latency + moved / np.minimum(*sides)
    return seconds


def _prompt_bytes(model: ModelSpec, t: IntArray, tokens: float, element_bytes: float) -> FloatArray:
    """Return the bytes of one prompt's keys and values in all layers of one kind, summed over the
    replica's ranks that send them.
    """
    if model.is_recurrent:
        states = model.num_hidden_layers * state_numbers(model, t) * t * STATE_BYTES
        return np.asarray(states, dtype=np.float64)
    width = cached_width(model, t) * t
    if model.kv_lora_rank is not None:  # every rank has the same latent vectors: one copy is sent
        width = width / t
    return np.asarray(
        seen_tokens(model, tokens) * model.num_hidden_layers * width * element_bytes,
        dtype=np.float64,
    )


def _ranks(candidates: ServingCandidates) -> IntArray:
    stage = candidates.tensor_parallel_size * candidates.attention_data_parallel_size
    ranks: IntArray = stage * candidates.pipeline_parallel_size
    return ranks
