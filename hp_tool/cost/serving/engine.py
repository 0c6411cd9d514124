"""Latencies, throughput and cache limit of an engine with continuous batching and speculative
decoding, under a closed load.

Of k drafted tokens, a verification pass accepts those before the first rejection and generates one
more. If each token is accepted with the probability a, independently of its position, a pass yields
(1 - a^(k+1)) / (1 - a) tokens on average (arXiv 2211.17192, equation 1). It takes 1 + k c times as
long, where c is the time to draft one token divided by the time of a pass.
"""

import math
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray
from hp_tool.cost.serving.candidates import Pass, ServingCandidates, ServingCase
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.memory import ServingBytes, serving_bytes
from hp_tool.cost.serving.operations import cached_tokens, requests_in_cache
from hp_tool.domain.engines import EngineEfficiency
from hp_tool.domain.inference import SpeculativeSpec


def drafted_tokens(speculative: SpeculativeSpec | None) -> int:
    """Return k, the number of drafted tokens per pass; 0 without speculative decoding."""
    return 0 if speculative is None else speculative.num_speculative_tokens


def tokens_per_pass(speculative: SpeculativeSpec | None) -> float:
    """Return the mean number of tokens per sequence that a verification pass generates; 1 without
    speculative decoding.
    """
    if speculative is None:
        return 1.0
    a, k = speculative.acceptance_rate, speculative.num_speculative_tokens
    return sum(a**i for i in range(k + 1))


def drafting_factor(speculative: SpeculativeSpec | None) -> float:
    """Return (time of drafting and verification) / (time of verification) = 1 + k c."""
    return (
        1.0
        if speculative is None
        else 1.0 + speculative.num_speculative_tokens * speculative.draft_cost_fraction
    )


# Symbols, per scheduler: C requests in flight, of which B run; I prompt and O output tokens; D
# seconds of a pass that only decodes; M seconds of a pass that prefills g prompts, with X =
# min(g J, budget) prompt tokens; J prompt tokens outside the prefix cache; p pipeline stages; L
# layers; o the engine's overhead per prompt and layer; u and v the front end's serial work per
# request and per streamed token; n passes before a request's first token.
#
# A finished request is replaced at once by another of equal length. In the time S of one request
# all B running requests are therefore prefilled once:
#
#     S = sqrt(((O - 1) D + R)^2 + H^2)
#     R = n D + B ((J / X) (M - D) + L o) / p
#     H = B (u + v O)
#
# If prefill stops decoding or takes longer, M - D is replaced by the M of a prefill-only pass. GPU
# and front end are two stations of a closed loop. The busier one limits the rate. If both are about
# equally busy, each waits for the other, which the root of squares approximates. If requests arrive
# at random times (`independent`), S is the larger of the two, and a first token waits u + B v for
# the front end.
#
# The part of R for the prefill of a request's own prompt and of earlier prompts precedes its first
# token; the rest delays its later tokens. The fraction (u + v) / (u + v O) of the front end's time
# precedes the first token. So does the fraction b (H / S)^2 of the rest: the closer the front end
# is to its limit, the more tokens queue before the first one. Requests without a slot wait
# S (C - B) / B longer (Little's law).
#
# If an engine waits w passes for more prompts, and a prompts arrive per pass, prompts wait
# w (1 + a w / 2) / (1 + a w) passes on average: the first prompt starts the wait, and the others
# arrive during it. With speculative decoding, D is the time of drafting and verifying, divided by
# the tokens that a pass yields.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCosts:
    """Costs of n candidates; shape (n,). Latencies are means over requests."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    request_latency_s: FloatArray
    parts: dict[str, FloatArray]
    """Seconds of queue, front_end, prefill, prefill_interference and decode, which sum to
    request_latency_s.
    """
    output_tokens_per_second_per_gpu: FloatArray
    running: FloatArray
    """Number of requests that one scheduler runs concurrently (B)."""
    max_running: FloatArray
    """Upper limit of `running`, set by the KV cache or max_num_seqs."""
    prompt_s: FloatArray
    """Seconds by which the prefill of one prompt delays the other requests."""
    wave_s: FloatArray
    """Part of ttft_s during which requests that start together wait for each other, averaged over
    all requests.
    """
    kv_limited: BoolArray
    """Whether the KV cache limits `running`, rather than the load or max_num_seqs."""
    fits: BoolArray
    """Whether the weights and one complete request fit."""
    sustained: BoolArray
    """Whether the request rate is reached. True for a closed load, which has no rate."""
    bytes: ServingBytes


def serving_costs(*, case: ServingCase, candidates: ServingCandidates) -> ServingCosts:
    """Return the latencies, throughput and memory of legal candidates under a closed load. Arrays
    have the candidates' shape.
    """
    c, engine = candidates, case.engine
    length, output = float(case.input_length), float(case.output_length)
    memory = serving_bytes(case, c)

    in_flight = np.maximum(c.concurrency / c.schedulers, 1.0)
    most, by_cache, fits = _slots(case, c, memory)
    running = np.minimum(in_flight, most)

    stages = c.pipeline_parallel_size
    stage_sequences = running / stages  # sequences of one pipeline micro-batch
    context = length + 0.5 * output
    # If the queue is never empty, each pass contains as many prompts as requests end in it.
    endless = case.prefill_group == math.inf
    group = (
        np.maximum(stage_sequences / output, 1.0)
        if endless
        else np.minimum(case.prefill_group, running)
    )
    computed = case.computed_length
    zeros = np.zeros(len(c))
    k, tokens_each_pass = drafted_tokens(case.speculative), tokens_per_pass(case.speculative)
    rows = stage_sequences * (1 + k)
    decoding_rows = rows if engine.schedule == "mixed" else 1.0
    chunk = np.minimum(
        np.maximum(group, 1.0) * computed, np.maximum(c.max_num_batched_tokens - decoding_rows, 1.0)
    )
    prompts = chunk / computed
    batch_wait, arrivals = engine.batch_wait_iterations, running * tokens_each_pass / output
    # Speculation reduces the number of passes per request. A higher acceptance rate must not make
    # prompts cheaper, so arrivals are counted per token, not per pass.
    groups_fraction = _groups_with_prompts(c, stage_sequences / output * (1.0 + batch_wait), group)
    verify = _pass_seconds(
        case,
        c,
        Pass(tokens=rows, decoding=stage_sequences, prefill_requests=zeros, drafted=k),
        context,
    )
    # CUDA graphs cover only decoding: a pass with prompts takes at least the time to launch its
    # kernels one by one.
    launches = min_launch_seconds(case)
    step = verify * drafting_factor(case.speculative)
    decode = step / tokens_each_pass  # seconds per token
    # If a request has fewer iterations than there are chunks, the remaining chunks are not batched
    # with decoding.
    mixed_fraction = (
        np.minimum(
            ((output - 1.0) / tokens_each_pass + 1.0) * prompts * groups_fraction / running, 1.0
        )
        if engine.schedule == "mixed"
        else zeros
    )
    prefill_s = zeros
    if np.any(mixed_fraction < 1.0):
        prefill_s = _pass_seconds(
            case,
            c,
            Pass(
                tokens=chunk,
                decoding=zeros,
                prefill_requests=prompts,
                routed=groups_fraction * chunk,
            ),
            context,
            launches,
        )
    if engine.schedule == "mixed":
        routed = rows + groups_fraction * chunk
        mixed_pass = Pass(
            tokens=rows + chunk,
            decoding=stage_sequences,
            prefill_requests=prompts,
            routed=routed,
            drafted=k,
        )
        prefill_s = (
            mixed_fraction * (_pass_seconds(case, c, mixed_pass, context, launches) - verify)
            + (1.0 - mixed_fraction) * prefill_s
        )
    overhead_s = prompt_overhead(case)
    # seconds of one prompt for the attention group that processes it
    group_prompt_s = (prefill_s / prompts + overhead_s) / stages
    # seconds of one prompt in each group, for all groups, because they run in lockstep
    prompt = group_prompt_s / groups_fraction
    if output == 1.0:
        group_prompt_s = prompt  # one output token: the whole request counts as time to first token
    # seconds that the other pipeline stages add to the latency of a chunk
    stage_delay_s = prefill_s * (1.0 - 1.0 / stages)

    prompts_before = (
        np.minimum(group + 0.5 * case.wave_share * running, running) if output > 1.0 else running
    )
    # Chunks batched with decoding also take the time of a decoding iteration.
    passes = (
        np.maximum(prompts_before / prompts, 1.0)
        if engine.schedule == "mixed" and output > 1.0
        else 1.0
    )
    passes = passes + batch_wait * (1.0 + 0.5 * batch_wait * arrivals) / (
        1.0 + batch_wait * arrivals
    )
    first = passes * step + prompts_before * group_prompt_s + stage_delay_s
    interference = running * prompt - prompts_before * group_prompt_s
    busy = first + interference + (output - 1.0) * decode
    front_end = running * (engine.request_overhead_s + engine.stream_overhead_s * output)
    served = np.maximum(busy, front_end) if case.independent else np.hypot(busy, front_end)
    waiting = served - busy
    share_before_first = _share_before_first_token(engine, output)
    early_wait_s = waiting * (
        share_before_first
        + engine.backlog_share * (front_end / served) ** 2 * (1.0 - share_before_first)
    )
    outside_s = first_token_wait_seconds(case) + case.independent * (
        engine.request_overhead_s + running * engine.stream_overhead_s
    )
    # Requests outside GPU and front end occupy no slot, so others wait less for one.
    queue = np.maximum(served * (in_flight - running) / running - outside_s, 0.0)
    early_wait_s, served, waiting = (
        early_wait_s + outside_s,
        served + outside_s,
        waiting + outside_s,
    )
    latency = queue + served
    return ServingCosts(
        ttft_s=queue + early_wait_s + first,
        tpot_s=decode + (interference + waiting - early_wait_s) / (output - 1.0)
        if output > 1.0
        else np.zeros(len(c)),
        request_latency_s=latency,
        parts={
            "queue": queue,
            "front_end": waiting,
            "prefill": first,
            "prefill_interference": interference,
            "decode": (output - 1.0) * decode,
        },
        output_tokens_per_second_per_gpu=np.minimum(c.concurrency, in_flight * c.schedulers)
        * output
        / latency
        / (c.data_parallel_size * c.tensor_parallel_size * stages),
        running=running,
        max_running=most,
        prompt_s=prompt,
        wave_s=(prompts_before - group) * group_prompt_s,
        kv_limited=(by_cache < in_flight) & (by_cache < c.max_num_seqs),
        fits=fits,
        sustained=np.ones(len(c), dtype=bool),
        bytes=memory,
    )


def most_running(*, case: ServingCase, candidates: ServingCandidates) -> FloatArray:
    """Return the maximum number of requests that one scheduler can run concurrently; shape (n,)."""
    return _slots(case, candidates, serving_bytes(case, candidates))[0]


def _slots(
    case: ServingCase, c: ServingCandidates, memory: ServingBytes
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """Return (maximum number of concurrent requests, number of requests that fit in the cache,
    whether one request fits).
    """
    length, output = float(case.input_length), float(case.output_length)
    # In a full cache, requests have generated a fraction of their output on average.
    t = c.tensor_parallel_size
    rooms = np.maximum(memory.kv_capacity, 0.0) / memory.kv_per_token
    held = length + case.engine.kv_reserved_output_fraction * output
    by_cache = np.maximum(requests_in_cache(case, t, rooms, held), 1.0)
    return (
        np.minimum(np.minimum(by_cache, c.max_num_seqs), _most_decoding(case, c)),
        by_cache,
        has_room(case, c, memory, length + output),
    )


def has_room(
    case: ServingCase, c: ServingCandidates, memory: ServingBytes, tokens: float
) -> BoolArray:
    """Return whether the cache has room for a request of `tokens` tokens, and for one of
    `room_at_start` tokens.
    """
    rooms, t = np.maximum(memory.kv_capacity, 0.0) / memory.kv_per_token, c.tensor_parallel_size
    whole: BoolArray = rooms >= cached_tokens(case, t, tokens)
    if not case.room_at_start:
        return whole
    chunk = c.max_num_batched_tokens.astype(np.float64)
    return whole & (rooms >= cached_tokens(case, t, float(case.room_at_start), chunk=chunk))


def _most_decoding(case: ServingCase, c: ServingCandidates) -> FloatArray:
    """Return the maximum number of decoding requests at which a mixed pass still has room for the
    prompts of the requests that replace them.

    It is at least the number that fills half of a pass, because prompts also run in passes without
    decoding.
    """
    if case.engine.schedule != "mixed":
        return np.full(len(c), np.inf)
    decoded = 1.0 + drafted_tokens(case.speculative)
    follow = tokens_per_pass(case.speculative) * case.computed_length / case.output_length
    tokens = (c.max_num_batched_tokens * c.pipeline_parallel_size).astype(np.float64)
    most: FloatArray = np.maximum(tokens * max(1.0 / (decoded + follow), 0.5 / decoded), 1.0)
    return most


def prompt_overhead(case: ServingCase) -> float:
    """Return the engine's overhead per prompt over all layers, in seconds."""
    mixtures = case.experts.prompt_layer_overhead_s * case.model.moe_layers
    return case.engine.prompt_layer_overhead_s * case.model.num_hidden_layers + mixtures


def _groups_with_prompts(
    c: ServingCandidates, arrivals: FloatArray, group: FloatArray
) -> FloatArray:
    """Return the fraction of a stage's attention groups that have a prompt, in a pass with at least
    one prompt.

    The number of prompts that arrive between two such passes follows a Poisson distribution. The
    fraction is computed from its mean, conditional on at least one prompt, or from the number of
    prompts that arrive together if that is larger.
    """
    groups = c.attention_data_parallel_size
    coming = groups * arrivals
    prompts = np.maximum(coming / -np.expm1(-np.maximum(coming, 1e-9)), np.minimum(group, groups))
    share: FloatArray = np.minimum(np.maximum(prompts, 1.0), groups) / groups
    return share


def min_launch_seconds(case: ServingCase) -> float:
    """Return the minimum seconds of a pass with prompts, in which kernels are launched individually
    (without CUDA graphs).
    """
    return (
        case.engine.eager_layer_s * case.model.num_hidden_layers
        + case.experts.eager_layer_s * case.model.moe_layers
    )


def first_token_wait_seconds(case: ServingCase) -> float:
    """Return the seconds before a first token in which neither GPU nor front end works on the
    request.
    """
    mixture = case.model.num_experts is not None and case.engine.first_token_s > 0.0
    return case.engine.first_token_s + mixture * case.experts.first_token_s


def _share_before_first_token(engine: EngineEfficiency, output: float) -> float:
    whole = engine.request_overhead_s + engine.stream_overhead_s * output
    return (engine.request_overhead_s + engine.stream_overhead_s) / whole if whole > 0.0 else 1.0


def _pass_seconds(
    case: ServingCase,
    candidates: ServingCandidates,
    batch: Pass,
    context: float,
    launches: float = 0.0,
) -> FloatArray:
    """Return the time of a pass, in seconds: its forward pass, which takes at least `launches`
    seconds, and the host's overhead.
    """
    device = forward_seconds(case, candidates, batch, context=context)
    return with_host(
        case.engine, np.maximum(device, launches) if launches else device, batch.decoding
    )


def with_host(engine: EngineEfficiency, device_s: FloatArray, sequences: FloatArray) -> FloatArray:
    """Return the time of a pass including the host's work, in seconds. Some engines do this work
    during the previous pass.
    """
    host = engine.iteration_overhead_s + engine.sequence_overhead_s * sequences
    both: FloatArray = np.maximum(device_s, host) if engine.schedules_ahead else device_s + host
    return both
