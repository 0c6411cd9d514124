"""A training query with resolved names: the cost model's case, and the query's limits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hp_tool.catalog import check_model, is_own_file, model_from_mapping
from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import check_power_cap, efficiency_profile, machine_profile
from hp_tool.catalog.releases import check_release
from hp_tool.cost.arrays import BoolArray
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.flops import step_tokens, token_flops
from hp_tool.cost.goodput import goodput
from hp_tool.cost.legality import legality
from hp_tool.cost.lora import with_named_targets
from hp_tool.cost.network import checked_order, with_local_ramp
from hp_tool.cost.pipeline_parts import laid_out_costs, mixed_costs
from hp_tool.cost.precision import QUANTIZED_BYTES
from hp_tool.cost.roofline import attention_kernel, peak_flops
from hp_tool.cost.shared import Shared
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.cost.uncertainty import with_pairs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.graphs import recorded_modules
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import (
    ParallelConfig,
    ParallelQuery,
    Strategy,
    TokenDispatcher,
    axis_values,
    common_settings,
)
from hp_tool.domain.parts import label
from hp_tool.domain.pipeline_layout import layout_text, splits_unevenly
from hp_tool.domain.query import Constraints, OwnFile, Query
from hp_tool.domain.result import Estimate, Reason
from hp_tool.domain.units import SECONDS_PER_DAY, SECONDS_PER_HOUR, format_factor
from hp_tool.domain.workload import TrainingWorkload, VariableLengthWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training.graphs import profile_with_graphs
from hp_tool.questions.training.layouts import drop_default_layout, parse_pipeline_layout
from hp_tool.questions.training.recipes import assumed_settings, with_recipe
from hp_tool.questions.training.releases import (
    default_dispatcher,
    release_factor,
    release_variance,
    unnamed_release_variance,
)
from hp_tool.questions.training.rules import check_training

if TYPE_CHECKING:
    from hp_tool.cost.lengths.sequences import LengthDistribution, Rows

T = TypeVar("T")
MAX_PEAK_FACTOR = 2.0
"""Maximum ratio of counted to computed FLOPs. It exceeds 1 because kernels skip the masked half of
causal attention.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Usual settings of a problem (`training.usual_settings`), and the layouts that have them."""

    plain: TrainingProblem
    """The problem without usual settings."""
    set: Mapping[str, Any]
    """The usual settings as query values, by path."""
    earlier: tuple[TrainingProblem, ...] = ()
    """Problems with other usual settings. They take precedence for layouts that support them."""

    def belong(self, candidates: Candidates, *, problem: TrainingProblem) -> BoolArray:
        """Return (n,) whether each candidate has the usual settings of `problem`, the problem to
        which `self` belongs.
        """
        legal = (legality(case=self.plain, candidates=candidates) == 0) & (
            legality(case=problem, candidates=candidates) == 0
        )
        for problem_with_precedence in self.earlier:
            legal = legal & (legality(case=problem_with_precedence, candidates=candidates) != 0)
        belong: BoolArray = np.broadcast_to(legal, candidates.shape).ravel()
        return belong

    def with_parallel(self, **values: Any) -> Usual:
        """Return the usual settings for the problem with these values of `parallel`."""
        return dataclasses.replace(
            self,
            plain=self.plain.with_parallel(**values),
            earlier=tuple(each.with_parallel(**values) for each in self.earlier),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProblem(TrainingCase):
    """The case and the limits of a training query."""

    constraints: Constraints
    parallel: ParallelQuery = dataclasses.field(default_factory=ParallelQuery)
    """The query's `parallel`."""
    kinds: tuple[TrainingCase, TrainingCase] | tuple[()] = ()
    """Case for each kind of GPU, if there are two. `profile` is then that of the kind with the
    larger deviation.
    """
    rows: Rows | None = None
    """Contents of packed rows; None if all rows cost the same."""
    lengths: LengthDistribution | None = None
    """Lengths of the sequences in packed rows."""
    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values other than `parallel` that were inserted into the query, by path. Answers include them
    in `set`.
    """
    asked: Query | None = None
    """The query, if its layouts get the usual settings that it omits; else None."""
    usual: Usual | None = None
    """The usual settings of this problem; None if there are none."""

    @property
    def plain(self) -> TrainingProblem:
        """Return the problem without usual settings."""
        return self if self.usual is None else self.usual.plain

    def costs(self, candidates: Candidates) -> TrainingCosts:
        """Return the memory and step time of legal candidates."""
        headroom = self.constraints.memory_headroom_fraction
        if self.kinds:
            return mixed_costs(self.kinds, candidates, memory_headroom_fraction=headroom)
        layout = self.strategy.pipeline_layout
        if layout is not None:
            return laid_out_costs(
                self, candidates, layout=layout, memory_headroom_fraction=headroom
            )
        costs = training_costs(case=self, candidates=candidates, memory_headroom_fraction=headroom)
        if self.rows is None:
            return costs
        from hp_tool.cost.lengths.imbalance import with_imbalance

        return with_imbalance(costs, rows=self.rows, case=self, candidates=candidates)

    def scheduled(self, costs: TrainingCosts, candidates: Candidates) -> TrainingCosts:
        """Return the costs with the schedule of dynamic context parallelism, if the query enables
        it.

        Computing the schedule takes seconds per candidate.
        """
        if not self.strategy.dynamic_context_parallel or self.lengths is None:
            return costs
        from hp_tool.cost.lengths.dynamic import with_dynamic_context

        return with_dynamic_context(costs, case=self, candidates=candidates, lengths=self.lengths)

    def with_common_settings(self, config: ParallelConfig) -> ParallelConfig:
        """Return the configuration with the settings that all layouts of the query have in common
        and, if stages are uneven, the framework's pipeline layout.
        """
        values = common_settings(self.parallel, context_parallel_size=config.context_parallel_size)
        if any(getattr(config, name) != value for name, value in values.items()):
            config = dataclasses.replace(config, **values)
        if (
            self.strategy.pipeline_layout is not None
            or framework_facts(self.workload.framework).is_plain
            or self.kinds
        ):
            return config
        layers, mtp = self.model.num_hidden_layers, self.model.num_nextn_predict_layers
        p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
        if layers % (p * v) == 0 or not splits_unevenly(num_layers=layers, stages=p, chunks=v):
            return config
        layout = layout_text(
            num_layers=layers,
            mtp_layers=mtp,
            stages=p,
            chunks=v,
            begins_dense=self.model.begins_dense,
        )
        return dataclasses.replace(config, pipeline_layout=layout)

    def with_num_gpus(self, num_gpus: int) -> TrainingProblem:
        """Return the problem on fewer devices of the same kind."""
        if num_gpus == self.cluster.num_gpus:
            return self
        return dataclasses.replace(self, cluster=self.cluster.with_num_gpus(num_gpus)).choosing(
            {"cluster.num_gpus": num_gpus}
        )

    def choosing(self, values: Mapping[str, Any]) -> TrainingProblem:
        """Return the problem with these values, by path, added to the `set` of its answers."""
        return dataclasses.replace(self, chosen={**self.chosen, **values})

    def with_parallel(self, **values: Any) -> TrainingProblem:
        """Return the problem with these values of `parallel`. They do not count as assumed."""
        parallel = dataclasses.replace(self.parallel, **values)
        strategy = _resolve_strategy(
            parallel, model=self.model, workload=self.workload, cluster=self.cluster
        )
        if values.get("moe_token_dispatcher_type") is None:  # may be that of a usual recipe
            strategy = dataclasses.replace(
                strategy, moe_token_dispatcher_type=self.strategy.moe_token_dispatcher_type
            )
        return dataclasses.replace(
            self,
            parallel=parallel,
            strategy=strategy,
            assumed={
                name: value
                for name, value in self.assumed.items()
                if name.removeprefix("parallel.") not in values
            },
            usual=None if self.usual is None else self.usual.with_parallel(**values),
        )

    def as_release(self, release: str | None) -> TrainingProblem:
        """Return the problem with another framework release but the same constants."""
        return dataclasses.replace(
            self, workload=dataclasses.replace(self.workload, framework_version=release)
        )

    @property
    def longest_step_s(self) -> float:
        """Return the longest step time in seconds with which the training run satisfies max_days
        and max_cost; infinity if neither is set.

        With training.reliability, the time lost to failures is included.
        """
        limits, price, tokens = (
            self.constraints,
            self.cluster.price_per_gpu_hour,
            self.workload.total_tokens,
        )
        longest_s = math.inf
        if tokens is None:
            return longest_s
        estimated_goodput = goodput(case=self)
        steps = (
            tokens
            / step_tokens(self.workload)
            / (1.0 if estimated_goodput is None else estimated_goodput.fraction)
        )
        if limits.max_days is not None:
            longest_s = limits.max_days * SECONDS_PER_DAY / steps
        if limits.max_cost is not None and price:
            longest_s = min(
                longest_s,
                limits.max_cost / (price * self.cluster.num_gpus) * SECONDS_PER_HOUR / steps,
            )
        return longest_s

    @property
    def least_step_s(self) -> float:
        """Return a lower bound of the step time in seconds: the time of its model FLOPs at
        MAX_PEAK_FACTOR times the devices' peak.
        """
        return self._at_peak_s(token_flops(self.model, self.workload).model) / MAX_PEAK_FACTOR

    @property
    def peak_step_s(self) -> float:
        """Return the time of a step's FLOPs at the devices' peak in seconds, counting half of
        causal attention.
        """
        return self._at_peak_s(token_flops(self.model, self.workload).causal.model)

    def _at_peak_s(self, flops_per_token: float) -> float:
        cluster, workload = self.cluster, self.workload
        precisions = {workload.precision, workload.of_experts.precision}
        peak = max(
            peak_flops(kind.gpu, precision=precision)
            for kind in cluster.kinds or (cluster,)
            for precision in precisions
        )
        return flops_per_token * step_tokens(workload) / (peak * cluster.num_gpus)

    def missed_targets(self, estimate: Estimate) -> tuple[Reason, ...]:
        """Return a reason for each exceeded limit. It contains the value, the limit, and the parts
        of the value.
        """
        limits, reasons = self.constraints, []
        for name, limit in (("days", limits.max_days), ("cost", limits.max_cost)):
            value = (
                None
                if limit is None
                else estimate.calendar_days
                if name == "days"
                else estimate.cost
            )
            if value is not None and limit is not None and value > limit:
                value_text, limit_text = (
                    (f"{value:,.1f} days", f"{limit:,.12g}")
                    if name == "days"
                    else (f"${value:,.0f}", f"${limit:,.0f}")
                )
                parts = _describe_parts(estimate, value, currency="" if name == "days" else "$")
                message = (
                    f"{value_text} is {format_factor(value / limit)} the maximum of "
                    f"{limit_text}{parts}"
                )
                reasons.append(
                    Reason(code="target_missed", message=message, needed=value, available=limit)
                )
        return tuple(reasons)

    def with_missed_targets(self, estimate: Estimate) -> Estimate:
        """Return the estimate with a reason for each exceeded limit. An estimate with such reasons
        is infeasible.
        """
        missed = self.missed_targets(estimate)
        return (
            dataclasses.replace(estimate, feasible=False, reasons=estimate.reasons + missed)
            if missed
            else estimate
        )


def resolve_training(query: Query) -> TrainingProblem:
    """Resolve the names and the recipe of a training query, and check its settings.

    Raises:
        InputError: The query is invalid.
        NotFoundError: A name is unknown.
        UnsupportedError: A feature is not supported.
    """
    if query.kind != "training" or query.training is None:
        raise UnsupportedError(
            "Supported only for training queries. For inference queries, use "
            "`hp-tool recommend` or `hp-tool tune`.",
            field="kind",
        )
    for name, values in query.training.choices.items():
        message = (
            f"training.{name} has {len(values)} values, which only `recommend` supports; set one "
            "value"
        )
        raise InputError(message, field=f"training.{name}")
    unlimited, query = query.leaves_num_gpus_open(), query.with_most_devices()
    model = resolve_model(query.model)
    if (parallel := drop_default_layout(query.parallel, model)) is not query.parallel:
        query = dataclasses.replace(query, parallel=parallel)
    cluster = _with_rank_order(
        catalogue_cluster(query.cluster), model=model, parallel=query.parallel
    )
    original, query = (
        query,
        with_recipe(query, model=model, gpu=cluster.gpu, num_gpus=cluster.num_gpus),
    )
    assert query.training is not None
    if (release := query.training.framework_version) is not None:
        check_release(
            training_engine(query.training.framework), release, field="training.framework_version"
        )
    check_training(query, model=model, cluster=cluster)
    check_power_cap(query.cluster, gpu=cluster.gpu)
    peak_flops(cluster.gpu, precision=query.training.precision)
    if query.training.expert_precision is not None:
        peak_flops(
            cluster.gpu,
            precision=query.training.expert_precision,
            field="training.expert_precision",
        )
    training = _first_equal_value(query.training)
    workload, rows, lengths = _resolve_lengths(with_named_targets(training, model=model))
    if model.architecture == "encoder_decoder" and workload.decoder_sequence_length is None:
        workload = dataclasses.replace(workload, decoder_sequence_length=workload.sequence_length)
    fuses = framework_facts(workload.framework).fuses_beside_experts and model.num_experts
    if fuses and workload.kernel_fusion is None:
        workload = dataclasses.replace(workload, kernel_fusion=True)
    workload = training if workload is training else _first_equal_value(workload)
    strategy = _first_equal_value(
        _resolve_strategy(query.parallel, model=model, workload=workload, cluster=cluster)
    )
    open_knobs = assumed_settings(
        original,
        workload=training,
        parallel=query.parallel,
        model=model,
        gpu=cluster.gpu,
        strategy=strategy,
    )
    cases = [
        TrainingCase(
            model=model,
            cluster=kind,
            workload=workload,
            profile=_profile(kind, model=model, workload=workload, name=cluster.name),
            strategy=strategy,
            assumed=open_knobs,
        )
        for kind in cluster.kinds or (cluster,)
    ]
    profile = max(
        (case.profile for case in cases),
        key=lambda one: (not one.gpu.measured, one.framework.time_log_sd),
    )
    return TrainingProblem(
        model=model,
        cluster=cluster,
        workload=workload,
        profile=profile,
        recorded=profile_with_graphs(
            original, cluster=cluster, model=model, workload=workload, profile=profile
        ),
        strategy=strategy,
        assumed=open_knobs,
        constraints=query.constraints,
        parallel=query.parallel,
        kinds=(cases[0], cases[1]) if cluster.kinds else (),
        rows=rows,
        lengths=lengths,
        chosen={"cluster.num_gpus": cluster.num_gpus} if unlimited else {},
    )


def _describe_parts(estimate: Estimate, value: float, *, currency: str) -> str:
    """Return the parts of a value, largest first, such as `: compute 18.1, pipeline bubble 2.3`.

    The value is divided in proportion to the parts of the step time.
    """
    if estimate.time is None:
        return ""
    shares = {
        label(name): seconds / estimate.time.step_s
        for name, seconds in estimate.time.parts_s.items()
    }
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ": " + ", ".join(
        f"{name} {currency}{share * value:,.1f}" for name, share in largest if share >= 0.01
    )


def inline_files(query: Query) -> Query:
    """Return the query with the contents of its model and trace files in place of their paths.
    Other processes can then use it, and later changes of the files have no effect.
    """
    if query.inference is not None and isinstance(query.inference.trace, OwnFile):
        from hp_tool.catalog.traces import request_trace

        trace = request_trace(query.inference.trace).spec()
        query = dataclasses.replace(
            query, inference=dataclasses.replace(query.inference, trace=trace)
        )
    return (
        dataclasses.replace(query, model=resolve_model(query.model))
        if is_own_file(query.model)
        else query
    )


def resolve_model(model: str | ModelSpec | dict[str, Any]) -> ModelSpec:
    """Return a model specification from a catalogue name, a local file, a mapping or a
    specification.

    Raises:
        InputError: The model is malformed.
        NotFoundError: The name is unknown.
    """
    if isinstance(model, ModelSpec):
        return check_model(model)
    return catalogue_model(model) if isinstance(model, str) else model_from_mapping(model)


def _with_rank_order(
    cluster: ClusterSpec, *, model: ModelSpec, parallel: ParallelQuery
) -> ClusterSpec:
    if parallel.rank_order is None:
        return cluster
    order = checked_order(parallel.rank_order)
    if model.num_experts and not order.endswith("pp"):
        raise UnsupportedError(
            f"rank_order {order} is not supported for MoE models, whose attention and experts "
            "share "
            "pipeline stages; put pp last",
            field="parallel.rank_order",
        )
    return dataclasses.replace(cluster, rank_order=order)


def _resolve_strategy(
    parallel: ParallelQuery, *, model: ModelSpec, workload: TrainingWorkload, cluster: ClusterSpec
) -> Strategy:
    """Return the settings that all layouts have in common, with the framework's defaults.

    Raises:
        InputError: A setting is invalid or has no effect.
    """
    dispatcher: TokenDispatcher = "alltoall"
    if model.num_experts:
        dispatcher = _resolve_dispatcher(
            parallel, release=workload.framework_version if cluster.runs_flex_dispatcher else None
        )
    elif parallel.moe_token_dispatcher_type is not None:
        raise InputError(
            f"{model.name} has no experts; remove moe_token_dispatcher_type",
            field="parallel.moe_token_dispatcher_type",
        )
    return Strategy(
        context_parallel_communication=parallel.context_parallel_communication or "p2p",
        hierarchical_context_parallel_sizes=_resolve_context_levels(parallel, model),
        dynamic_context_parallel=bool(parallel.dynamic_context_parallel),
        moe_token_dispatcher_type=dispatcher,
        pipeline_layout=parse_pipeline_layout(
            parallel.pipeline_layout, model=model, workload=workload
        ),
    )


def _resolve_dispatcher(parallel: ParallelQuery, *, release: str | None) -> TokenDispatcher:
    """Return the release's default dispatcher or, if the query lists only others, the first one
    listed.
    """
    allowed: tuple[TokenDispatcher, ...] = axis_values(parallel.moe_token_dispatcher_type)
    default = default_dispatcher(release)
    return default if default in allowed or not allowed else allowed[0]


def _resolve_context_levels(parallel: ParallelQuery, model: ModelSpec) -> tuple[int, int] | None:
    """Return the query's level sizes for the context exchange a2a+p2p; None if it sets none.

    Raises:
        InputError: Megatron Core does not support the sizes.
    """
    sizes, field = (
        parallel.hierarchical_context_parallel_sizes,
        "parallel.hierarchical_context_parallel_sizes",
    )
    if sizes is None:
        return None
    if parallel.context_parallel_communication != "a2a+p2p":
        raise InputError(
            f"hierarchical_context_parallel_sizes {list(sizes)} requires "
            "context_parallel_communication a2a+p2p; set it, or remove the sizes",
            field=field,
        )
    product = sizes[0] * sizes[1]
    if min(sizes) < 1 or axis_values(parallel.context_parallel_size) != (product,):
        raise InputError(
            f"hierarchical_context_parallel_sizes {list(sizes)} requires context_parallel_size "
            f"{product}, and sizes of at least 1",
            field=field,
        )
    if model.num_attention_heads % sizes[0]:
        raise InputError(
            f"the first of hierarchical_context_parallel_sizes, {sizes[0]}, must divide the "
            f"model's {model.num_attention_heads} attention heads",
            field=field,
        )
    return sizes


@functools.lru_cache(maxsize=1024)
def _intern(value: Any) -> Any:
    return value


def _first_equal_value(value: T) -> T:
    """Return the first object that was equal to this one. Equal objects then share cached
    derivations (`cost.shared`).
    """
    try:
        first: T = _intern(value)
    except TypeError:  # A value that contains a mapping has no hash.
        return value
    return first


_profiles: Shared[EfficiencyProfile] = Shared()


def _profile(
    cluster: ClusterSpec, *, model: ModelSpec, workload: TrainingWorkload, name: str
) -> EfficiencyProfile:
    """Return the efficiency profile of a GPU with the workload's framework.

    `name` is the name of the whole cluster, which may contain more than one kind of GPU.
    """
    objects = (cluster.gpu, model, workload, machine_profile(name))
    return _profiles.get(
        objects, (name,), lambda: _new_profile(cluster, model=model, workload=workload, name=name)
    )


def _new_profile(
    cluster: ClusterSpec, *, model: ModelSpec, workload: TrainingWorkload, name: str
) -> EfficiencyProfile:
    profile = efficiency_profile(
        gpu=cluster.gpu,
        framework=workload.framework,
        overlap=workload.overlap,
        cuda_graphs=bool(workload.cuda_graphs),
        cuda_graph_modules=recorded_modules(workload, model),
        narrow=workload.precision in QUANTIZED_BYTES,
        attention_kernel=attention_kernel(workload, model),
        cluster=name,
    )
    if profile.gpu.gpu != cluster.gpu.name:  # not measured on this card
        kernels = with_local_ramp(profile.gpu, gpu=cluster.gpu)
        profile = dataclasses.replace(profile, gpu=kernels)
    factor = release_factor(profile.framework, workload.framework_version)
    if factor != 1.0:
        profile = dataclasses.replace(profile, release_factor=factor)
    return with_scatter(profile, model=model, workload=workload, gpu=cluster.gpu)


def with_scatter(
    profile: EfficiencyProfile, *, model: ModelSpec, workload: TrainingWorkload, gpu: GpuSpec
) -> EfficiencyProfile:
    """Return the profile with the standard deviations of step time and memory for this model, task
    and release.
    """
    if model.num_experts or workload.lora is not None:
        profile = with_pairs(
            profile, experts=bool(model.num_experts), adapters=workload.lora is not None
        )
    constants = profile.framework
    experts, release = bool(model.num_experts), workload.framework_version
    variance = release_variance(profile, experts=experts, gpu=gpu, release=release)
    memory = constants.memory_log_sd
    if workload.task != "pretrain":
        variance += constants.tuning_log_sd**2
        memory = math.hypot(memory, constants.tuning_memory_log_sd)
    if variance == 0.0 and memory == constants.memory_log_sd:
        return profile
    framework = dataclasses.replace(
        constants, time_log_sd=math.sqrt(constants.time_log_sd**2 + variance), memory_log_sd=memory
    )
    release_sd = math.sqrt(unnamed_release_variance(profile, experts=experts, release=release))
    return dataclasses.replace(profile, framework=framework, release_log_sd=release_sd)


def _resolve_lengths(
    workload: TrainingWorkload,
) -> tuple[TrainingWorkload, Rows | None, LengthDistribution | None]:
    """Return the workload with resolved sequence_lengths and, for packed rows, their contents and
    the length distribution.
    """
    if workload.sequence_lengths is None:
        return workload, None, None
    from hp_tool.catalog.lengths import sequence_lengths
    from hp_tool.cost.lengths.sequences import packed_rows, padded_rows

    distribution = sequence_lengths(workload.sequence_lengths)
    rows = (packed_rows if workload.packed else padded_rows)(
        distribution, row_tokens=workload.sequence_length
    )
    values = {f.name: getattr(workload, f.name) for f in dataclasses.fields(workload)}
    resolved = VariableLengthWorkload(
        **values, row_tokens=rows.mean_tokens, row_squares=rows.mean_squares
    )
    return (resolved, rows, distribution) if workload.packed else (resolved, None, None)
