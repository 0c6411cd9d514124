"""A serving query with resolved names. Features that are not modelled are rejected by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog.efficiency import (
    check_power_cap,
    defaults_efficiency,
    efficiency_profile,
    engine_efficiency,
    expert_efficiency,
    expert_kernels,
)
from hp_tool.catalog.models import keeps_attention_wide, published_precision
from hp_tool.catalog.releases import check_release
from hp_tool.catalog.traces import Trace, request_trace
from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.matrices import cached_width
from hp_tool.cost.precision import ELEMENT_BYTES
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.engine import ServingCosts, serving_costs
from hp_tool.cost.serving.load import costs_at_rate, offline_costs, open_means
from hp_tool.cost.serving.operations import state_block
from hp_tool.cost.serving.weights import formats
from hp_tool.domain.clients import CLIENTS, DEFAULT_REQUESTS_PER_SLOT
from hp_tool.domain.engines import (
    DefaultsEfficiency,
    EngineEfficiency,
    ExpertEfficiency,
    device_defaults,
    engine_facts,
)
from hp_tool.domain.hardware import ClusterSpec, GpuSpec, Precision
from hp_tool.domain.inference import (
    MAX_TRACE_REQUESTS,
    ConcurrencyRange,
    InferenceWorkload,
    RateRange,
    TraceSpec,
)
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.targets import Targets
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.serving.drafters import drafter
from hp_tool.questions.serving.prefixes import resume_interval, resumed_tokens
from hp_tool.questions.training.problem import resolve_model

Scattered = TypeVar("Scattered", EngineEfficiency, ExpertEfficiency)
NETWORK_PROFILE = "megatron-core"
"""Framework whose measured inter-node network constants also apply to serving, because both use
NCCL rings.
"""

QUEUE_LATENCIES = ("ttft_s", "request_latency_s")
"""Latencies that include waiting for a slot."""

_TRAINING_ONLY = (
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_shard_size",
    "micro_batch_size",
    "sequence_parallel",
    "recompute",
    "zero_stage",
    "pipeline_schedule",
    "pipeline_layout",
    "rank_order",
    "context_parallel_communication",
    "hierarchical_context_parallel_sizes",
    "moe_token_dispatcher_type",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Loads among which the highest one within the targets is searched: `values`, or all loads from
    `lowest` to `highest`.
    """

    by_rate: bool
    """Whether loads are in requests per second. False: in requests in flight."""
    values: tuple[float, ...] | None = None
    """Loads to try, ascending."""
    lowest: float | None = None
    highest: float | None = None
    """Highest load to try; None: the highest that the devices sustain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem(ServingCase):
    """Case, load and limits of a serving query."""

    precision: str
    """Precision of the weights, as named in queries."""
    concurrency: int | None
    """Requests in flight over all GPUs; None for a request rate, for an offline load, or if
    `unknown` is set.
    """
    request_rate_per_second: float | None
    unknown: Loads | None
    """Loads among which the highest one within the targets is searched; None if the query sets a
    single load.
    """
    think_time_s: float
    """Seconds between an answer and the same user's next request."""
    trace: Trace | None
    """Requests to simulate. The lengths of the problem are then the means over the trace."""
    offline: bool
    """Whether all requests are queued at once in the engine's process, without an HTTP front
    end.
    """
    num_prompts: int | None
    """Number of requests of an offline load; None if it exceeds the number that can run at once."""
    constraints: Constraints
    targets: Targets
    may_queue: bool = True
    """Whether requests in flight may wait for a slot; see `_may_queue`."""
    resumes: int | None = None
    """Interval in tokens at which prompts of the trace can resume (see `prefixes`); None: at any
    position.
    """
    engine_version: str | None = None
    """Engine release set by the query."""
    assumed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Assumed values of fields that the query omits, by path."""
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values other than `parallel` that were inserted into the query, by path. Answers include them
    in `set`.
    """

    def cost_candidates(
        self, candidates: ServingCandidates, *, rates: FloatArray | None = None
    ) -> CostedRows:
        """Return latency, throughput and memory of legal candidates, at their concurrency or, with
        `rates`, at one rate each.
        """
        in_flight = None
        rate = self.request_rate_per_second if rates is None else rates
        if self.offline:
            costs = offline_costs(case=self, candidates=candidates, num_prompts=self.num_prompts)
        elif rate is not None:
            costs, in_flight = costs_at_rate(
                case=self, candidates=candidates, requests_per_second=rate
            )
        elif self.think_time_s > 0.0:
            in_flight = candidates.concurrency.astype(np.float64)
            costs = open_means(case=self, candidates=candidates, load=in_flight)
        else:
            costs = serving_costs(case=self, candidates=candidates)
        return CostedRows(problem=self, candidates=candidates, costs=costs, in_flight=in_flight)

    def cost_candidate_at(self, load: float, candidate: ServingCandidates) -> CostedRows:
        """Return the costs of one candidate under a load. The load is in requests per second if a
        rate is searched, else in requests in flight.
        """
        if self.unknown is not None and self.unknown.by_rate:
            return dataclasses.replace(
                self, unknown=None, request_rate_per_second=float(load)
            ).cost_candidates(candidate)
        loaded = dataclasses.replace(
            self, unknown=None, request_rate_per_second=None, concurrency=int(load)
        )
        return loaded.cost_candidates(candidate.with_concurrency(np.array([int(load)])))

    def with_num_gpus(self, num_gpus: int) -> ServingProblem:
        """Return the problem on `num_gpus` devices of the same kind. Answers include the number in
        `set`.
        """
        cluster = (
            self.cluster
            if num_gpus == self.cluster.num_gpus
            else self.cluster.with_num_gpus(num_gpus)
        )
        return dataclasses.replace(
            self, cluster=cluster, chosen={**self.chosen, "cluster.num_gpus": num_gpus}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedRows:
    """Legal candidates of a problem with their costs. Arrays have shape (n,)."""

    problem: ServingProblem
    candidates: ServingCandidates
    costs: ServingCosts
    in_flight: FloatArray | None = None
    """Mean number of requests in flight over all GPUs, for independent arrivals; None for a closed
    loop.
    """


def resolve_serving(query: Query) -> ServingProblem:
    """Resolve the names of a query.

    Raises:
        InputError: The query is invalid.
        NotFoundError: A name is unknown.
        UnsupportedError: A feature is not modelled.
    """
    if query.kind != "inference" or query.inference is None:
        raise InputError("Expected an inference query (kind: inference).", field="kind")
    _reject_unmodelled(query, query.inference)
    model = _served_model(query, query.inference)
    workload, trace = _resolve_trace(resolve_workload(query))
    assumed = {} if query.inference.precision else {"inference.precision": workload.precision}
    named_hit_rate = query.inference.prefix_cache_hit_rate
    concurrency, rate = workload.concurrency, workload.request_rate_per_second
    load = workload.load
    offline = load is not None and load.arrival == "offline"
    if concurrency is not None and rate is not None:
        raise InputError(
            "Set either inference.concurrency (requests in flight over all GPUs) or "
            "inference.request_rate_per_second. Without either, the answer is the highest load "
            "within the targets.",
            field="inference.concurrency",
        )
    unlimited, query = query.leaves_num_gpus_open(), query.with_most_devices()
    cluster = catalogue_cluster(query.cluster)
    check_power_cap(query.cluster, gpu=cluster.gpu, serves=True)
    if cluster.kinds:
        raise UnsupportedError(
            "A server with two kinds of GPU is not modelled. Describe one kind, or use "
            "`recommend` with inference.disaggregated.",
            field="cluster.stages",
        )
    case = resolve_case(query, workload, model=model, cluster=cluster)
    if trace is not None:
        case = dataclasses.replace(
            case, longest_request=int((trace.input_tokens + trace.output_tokens).max())
        )
    # A hit rate in the query was reported by an engine, so prompts could resume there.
    resumes = None
    has_prefixes = trace is not None and trace.prefix_tokens.any()
    if trace is not None and has_prefixes and not named_hit_rate and state_block(case) > 1:
        resumes = resume_interval(case, release=workload.engine_version or case.engine.version)
        trace = dataclasses.replace(
            trace, prefix_tokens=resumed_tokens(trace.prefix_tokens, resumes)
        )
        case = dataclasses.replace(case, prefix_cache_hit_rate=trace.prefix_share)
    return ServingProblem(
        **{field.name: getattr(case, field.name) for field in dataclasses.fields(case)},
        precision=str(workload.precision),
        concurrency=concurrency if isinstance(concurrency, int) else None,
        request_rate_per_second=rate if isinstance(rate, int | float) else None,
        unknown=None if offline else unknown_loads(workload),
        think_time_s=workload.think_time_s,
        trace=trace,
        offline=offline,
        num_prompts=load.num_prompts if load is not None else None,
        may_queue=offline or _may_queue(query, workload),
        resumes=resumes,
        constraints=query.constraints,
        targets=query.targets or Targets(),
        engine_version=workload.engine_version,
        assumed=assumed,
        chosen={"cluster.num_gpus": cluster.num_gpus} if unlimited else {},
    )


def _served_model(query: Query, workload: InferenceWorkload) -> ModelSpec:
    """Return the model of the query.

    Raises:
        UnsupportedError: Serving the model is not supported.
        InputError: A field of the workload does not apply to the model.
    """
    model = _with_longest_request(resolve_model(query.model), workload)
    if not any(cached_width(kind, 1) for _, kind in model.kinds):
        raise UnsupportedError(
            f"{model.name}: serving a model without attention layers is not supported",
            field="model.mixer",
        )
    if model.architecture != "decoder":
        raise UnsupportedError(
            f"{model.name}: serving {model.architecture} models is not supported", field="model"
        )
    for name in ("expert_imbalance", "two_batch_overlap"):
        if model.num_experts is None and getattr(workload, name) is not None:
            raise InputError(
                f"{model.name} has no experts; remove {name}", field=f"inference.{name}"
            )
    return model


def resolve_case(
    query: Query, workload: InferenceWorkload, *, model: ModelSpec, cluster: ClusterSpec
) -> ServingCase:
    """Return the case of a query with its engine's constants and settings."""
    name, release, gpu = workload.engine, workload.engine_version, cluster.gpu
    if release is not None:
        check_release(name, release, field="inference.engine_version")
    engine = with_device_defaults(
        engine_efficiency(engine=name, version=release, silicon=gpu.silicon),
        gpu=gpu,
        release=release,
        model=model,
        speculative=workload.speculative is not None,
    )
    engine = _with_memory_fraction(engine, workload, query.constraints)
    case = serving_case(
        model=model,
        cluster=cluster,
        workload=workload,
        engine=engine,
        wide_attention=keeps_attention_wide(query.model, precision=str(workload.precision)),
    )
    if workload.engine_settings != "defaults":
        return case
    defaults = defaults_efficiency(engine=name, silicon=gpu.silicon)
    return dataclasses.replace(
        case,
        engine=_with_default_scatter(engine, defaults),
        slowdown=defaults.slowdown,
        experts=_with_default_scatter(case.experts, defaults),
    )


def _with_longest_request(model: ModelSpec, workload: InferenceWorkload) -> ModelSpec:
    """Return the model with inference.max_model_len as its number of positions.

    Raises:
        InputError: The model has fewer positions.
    """
    longest, positions = workload.max_model_len, model.max_position_embeddings
    if longest is None:
        return model
    if positions is not None and longest > positions:
        raise InputError(
            f"inference.max_model_len {longest:,} exceeds the {positions:,} positions of "
            f"{model.name} (max_position_embeddings), so engines would not start. Lower it, or set "
            "`model` to a config.json with the RoPE scaling in use.",
            field="inference.max_model_len",
        )
    return dataclasses.replace(model, max_position_embeddings=longest)


def resolve_workload(query: Query) -> InferenceWorkload:
    """Return the workload of the query. If the query sets no precision, it is that of the published
    checkpoint.
    """
    assert query.inference is not None  # Checked when the query was parsed.
    if query.inference.precision is not None:
        return query.inference
    return dataclasses.replace(query.inference, precision=published_precision(query.model))  # type: ignore[arg-type]


def _with_default_scatter(constants: Scattered, doubt: DefaultsEfficiency) -> Scattered:
    """Return the constants with deviations that are at least those of an engine with default
    settings.
    """
    names = ("ttft_log_sd", "tpot_log_sd", "throughput_log_sd")
    wider = {name: max(getattr(constants, name), getattr(doubt, name)) for name in names}
    return dataclasses.replace(constants, **wider)


def with_device_defaults(
    engine: EngineEfficiency,
    *,
    gpu: GpuSpec,
    release: str | None,
    model: ModelSpec,
    speculative: bool = False,
) -> EngineEfficiency:
    """Return the engine with the default settings of this release on this GPU."""
    limits = device_defaults(
        engine.engine,
        memory_bytes=float(gpu.memory_bytes),
        silicon=gpu.silicon,
        version=engine.version,
        release=release,
        positions=model.max_position_embeddings,
        item_tokens=model.bidirectional_item_tokens,
        speculative=speculative,
    )
    return dataclasses.replace(engine, **limits)


def _with_memory_fraction(
    engine: EngineEfficiency, workload: InferenceWorkload, constraints: Constraints
) -> EngineEfficiency:
    """Return the engine with the query's memory fraction. By default, it is the engine's default,
    limited so that the headroom stays free.
    """
    if workload.memory_fraction is None:
        return dataclasses.replace(
            engine,
            memory_fraction=min(engine.memory_fraction, 1.0 - constraints.memory_headroom_fraction),
        )
    return dataclasses.replace(
        engine,
        memory_fraction=workload.memory_fraction,
        memory_fraction_of=engine_facts(engine.engine).memory_fraction_of,
    )


def _resolve_trace(workload: InferenceWorkload) -> tuple[InferenceWorkload, Trace | None]:
    """Return the workload and its trace. The workload has the mean lengths, cached prefixes and
    rate of the trace.
    """
    workload = _burst_as_trace(workload)
    if workload.trace is None:
        return workload, None
    trace = request_trace(workload.trace)
    if workload.input_length:  # A length in the query overrides those in the trace.
        inputs = np.full(len(trace.input_tokens), workload.input_length)
        trace = dataclasses.replace(
            trace, input_tokens=inputs, prefix_tokens=np.minimum(trace.prefix_tokens, inputs - 1)
        )
    if workload.output_length:
        trace = dataclasses.replace(
            trace, output_tokens=np.full(len(trace.input_tokens), workload.output_length)
        )
    if workload.prefix_cache_hit_rate:  # It overrides those in the trace.
        cached_tokens = np.floor(workload.prefix_cache_hit_rate * trace.input_tokens).astype(
            np.int64
        )
        trace = dataclasses.replace(trace, prefix_tokens=cached_tokens)
    if workload.disaggregated is not None:
        raise UnsupportedError(
            "Pools are modelled only for requests of equal length; remove trace or disaggregated.",
            field="inference.disaggregated",
        )
    if (
        workload.concurrency is None
        and workload.request_rate_per_second is None
        and trace.rate_per_second is not None
    ):
        workload = dataclasses.replace(workload, request_rate_per_second=trace.rate_per_second)
    if workload.load is not None and (
        trace.arrival_s is not None or workload.load.arrival not in ("closed", "poisson")
    ):
        raise UnsupportedError(
            "A trace defines its arrivals; remove load. For the highest rate or concurrency, set "
            "request_rate_per_second or concurrency to a list or {min, max}, or use lengths "
            "without arrivals.",
            field="inference.load",
        )
    return dataclasses.replace(
        workload,
        input_length=max(round(float(trace.input_tokens.mean())), 1),
        output_length=max(round(float(trace.output_tokens.mean())), 1),
        prefix_cache_hit_rate=trace.prefix_share,
    ), trace


def _burst_as_trace(workload: InferenceWorkload) -> InferenceWorkload:
    """Return a burst as a trace whose requests are all in flight from the start. Other workloads
    are returned unchanged.
    """
    load = workload.load
    if load is None or load.arrival != "burst":
        return workload
    if load.num_prompts is None:
        raise InputError(
            "A burst requires num_prompts, the number of simultaneous requests.",
            field="inference.load.num_prompts",
        )
    if load.num_prompts > MAX_TRACE_REQUESTS:
        raise InputError(
            f"A burst has at most {MAX_TRACE_REQUESTS:,} requests; use arrival offline for more.",
            field="inference.load.num_prompts",
        )
    if workload.disaggregated is not None or load.warmup is not None or workload.think_time_s:
        raise UnsupportedError(
            "Bursts are modelled only without disaggregated, warmup and think_time_s; remove these "
            "fields",
            field="inference.load.arrival",
        )
    shorter = CLIENTS[load.client].mean_length if load.client is not None else 1.0
    lengths = (workload.input_length, workload.output_length)
    inputs, outputs = ((round(shorter * length),) * load.num_prompts for length in lengths)
    return dataclasses.replace(
        workload,
        trace=TraceSpec(input_tokens=inputs, output_tokens=outputs),
        concurrency=load.num_prompts,
        input_length=0,
        output_length=0,
        load=None,
    )


def counts_by_rate(workload: InferenceWorkload) -> bool:
    """Return whether the load is given in requests per second. False: in requests in flight."""
    poisson = workload.load is not None and workload.load.arrival == "poisson"
    return workload.request_rate_per_second is not None or poisson


def unknown_loads(workload: InferenceWorkload) -> Loads | None:
    """Return the loads that a workload leaves open; None if it sets a single load."""
    by_rate = counts_by_rate(workload)
    field = "request_rate_per_second" if by_rate else "concurrency"
    load = getattr(workload, field)
    if isinstance(load, ConcurrencyRange | RateRange):
        if load.min > load.max:
            raise InputError(
                f"min {load.min:g} exceeds max {load.max:g}", field=f"inference.{field}"
            )
        return Loads(by_rate=by_rate, lowest=load.min, highest=load.max)
    if isinstance(load, tuple):
        return Loads(by_rate=by_rate, values=tuple(sorted({float(value) for value in load})))
    return Loads(by_rate=by_rate) if load is None else None


def _may_queue(query: Query, workload: InferenceWorkload) -> bool:
    """Return whether requests in flight may wait for a slot.

    They may not if the query asks for the fewest devices for a concurrency and no target limits the
    wait. Otherwise, a single device would serve any number of users, with most of them waiting.
    """
    by_rate = counts_by_rate(workload)
    limited = {latency for _, latency, _, _ in (query.targets or Targets()).limits()}
    return query.objective != "min_gpus" or by_rate or not limited.isdisjoint(QUEUE_LATENCIES)


def seeks_concurrency(query: Query) -> bool:
    """Return whether the answer is the highest number of requests in flight."""
    workload = query.inference
    assert workload is not None
    if workload.trace is not None or (
        workload.load is not None and workload.load.arrival in ("offline", "burst")
    ):
        return False
    unknown = unknown_loads(workload)
    return unknown is not None and not unknown.by_rate and workload.output_length > 1


def serving_case(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: InferenceWorkload,
    engine: EngineEfficiency,
    wide_attention: bool = False,
) -> ServingCase:
    """Return the cost model's input for a workload. Without a precision in the workload, weights
    have 16 bits.

    `wide_attention`: the checkpoint stores attention weights in 16 bits.

    Raises:
        InputError: `precision_unsupported`, the GPU does not support matmuls in this precision.
    """
    stored = formats(
        workload.precision or "bf16",
        gpu=cluster.gpu,
        experts=model.num_experts is not None,
        wide_attention=wide_attention,
    )
    client = workload.load.client if workload.load is not None else None
    shorter = CLIENTS[client].mean_length if client is not None else 1.0
    come = client_arrivals(client, engine=engine)
    profile = efficiency_profile(gpu=cluster.gpu, framework=NETWORK_PROFILE)
    return ServingCase(
        model=model,
        cluster=cluster,
        profile=profile,
        engine=engine,
        compute_precision=stored.mlps[1],
        weight_bytes=stored.mlps[0],
        mixer_precision=stored.mixers[1],
        mixer_bytes=stored.mixers[0],
        expert_precision=stored.experts[1],
        expert_bytes=stored.experts[0],
        kv_element_bytes=ELEMENT_BYTES[cache_precision(workload, engine=engine)],
        input_length=round(shorter * workload.input_length),
        output_length=round(shorter * workload.output_length),
        prefix_cache_hit_rate=workload.prefix_cache_hit_rate,
        # A trace does not record which requests share a prefix.
        prefix_groups=math.inf if workload.trace is not None else workload.prefix_groups or 1,
        prefill_group=come["prefill_group"],
        wave_share=come["wave_share"],
        speculative=workload.speculative,
        drafter=drafter(workload.speculative, model=model, gpu=cluster.gpu),
        experts=expert_efficiency(engine=engine.engine),
        expert_kernels=expert_kernels(profile.gpu, engine=engine.engine, version=engine.version),
        expert_imbalance=workload.expert_imbalance,
        two_batch_overlap=workload.two_batch_overlap,
        longest_request=workload.input_length + workload.output_length,
        room_at_start=workload.max_model_len or 0
        if engine_facts(engine.engine).needs_room_for_longest
        else 0,
    )


def client_arrivals(client: str | None, *, engine: EngineEfficiency) -> dict[str, float]:
    """Return {prefill_group, wave_share} of a closed load from this client; None: see
    `LoadSpec.client`.
    """
    # Without a server, the engine's own loop sends requests of equal length.
    known = CLIENTS[client] if client is not None else None
    equal = known.equal_lengths if known is not None else engine.engine == "megatron-core"
    each = known.requests_each if known is not None else DEFAULT_REQUESTS_PER_SLOT
    return {
        "prefill_group": engine.prefill_group if equal else 1.0,
        "wave_share": engine.wave_share
        if equal and (known is None or each is None)
        else 1.0 / (each or DEFAULT_REQUESTS_PER_SLOT),
    }


def cache_precision(workload: InferenceWorkload, *, engine: EngineEfficiency) -> Precision:
    """Return the precision of cached keys and values: that of the workload, by default the engine's
    default for the checkpoint.
    """
    if workload.kv_cache_precision is not None:
        return workload.kv_cache_precision
    if workload.precision in engine.fp8_cache_with:
        return "fp8"
    return "fp32" if workload.precision == "fp32" else "bf16"


def _reject_unmodelled(query: Query, workload: InferenceWorkload) -> None:
    load, named = (
        workload.load,
        {name for name in ("concurrency", "request_rate_per_second") if getattr(workload, name)},
    )
    burst = load is not None and load.arrival == "burst"
    if burst and (named or workload.trace is not None):
        raise InputError(
            "A burst sends num_prompts requests at once; remove concurrency, "
            "request_rate_per_second and trace",
            field=f"inference.{min(named, default='trace')}",
        )
    if load is not None and load.arrival == "offline" and named:
        raise InputError(
            "An offline load queues all requests at once (inference.load.num_prompts); "
            "remove concurrency and request_rate_per_second",
            field=f"inference.{min(named)}",
        )
    if load is not None and load.arrival == "offline" and workload.disaggregated is not None:
        raise UnsupportedError(
            "Pools require a concurrency or a request rate, not an offline load; remove "
            "inference.load or inference.disaggregated",
            field="inference.load.arrival",
        )
    arrivals: dict[str, set[str]] = {
        "offline": set(),
        "closed": {"concurrency"},
        "poisson": {"request_rate_per_second"},
        "burst": set(),
    }
    finite = load is not None and (
        load.warmup is not None
        or (load.num_prompts is not None and load.arrival not in ("offline", "burst"))
    )
    open_ended = load is not None and load.arrival in ("closed", "poisson") and not named
    if load is not None and ((arrivals[load.arrival] != named and not open_ended) or finite):
        raise UnsupportedError(
            "inference.load.arrival conflicts with the other keys of the load. Use closed "
            "with concurrency, poisson with request_rate (both without num_prompts and "
            "warmup), burst with num_prompts, or offline. To find the highest load, use "
            "closed or poisson without concurrency and request_rate.",
            field="inference.load",
        )
    if workload.prefix_groups is not None:
        if workload.trace is not None or burst:
            raise UnsupportedError(
                "Simulations of single requests do not support prefix_groups; remove it",
                field="inference.prefix_groups",
            )
        if not workload.prefix_cache_hit_rate:
            raise InputError(
                "prefix_groups requires prefix_cache_hit_rate, the cached fraction of "
                "prompt tokens",
                field="inference.prefix_groups",
            )
    for name in _TRAINING_ONLY:
        if getattr(query.parallel, name) not in (None, 1, (1,), False, "none"):
            raise InputError(
                f"parallel.{name} is for training queries only; remove it", field=f"parallel.{name}"
            )
    if query.objective == "days":
        raise InputError("objective days is for training queries only", field="objective")
    for name in ("max_days", "max_cost"):
        if getattr(query.constraints, name) is not None:
            raise InputError(
                f"constraints.{name} is for training queries only; remove it",
                field=f"constraints.{name}",
            )
    if query.training is not None:
        raise InputError("`training` is for training queries only; remove it", field="training")
