"""A training query with its names looked up: the case that the pure core takes. What is not modelled is refused here."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from hp_tool.catalog import checked_model, is_own_file, model_from_mapping
from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import efficiency
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.collectives import checked_order
from hp_tool.cost.lengths.imbalance import MAX_BATCH, with_imbalance
from hp_tool.cost.lengths.sequences import Rows, packed_rows, padded_rows
from hp_tool.cost.pipeline_parts import laid_out_costs, mixed_costs
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Strategy, TokenDispatcher
from hp_tool.domain.pipeline_layout import FIELD as LAYOUT_FIELD
from hp_tool.domain.pipeline_layout import PipelineLayout, check_layout, parse_layout
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.workload import TrainingWorkload, VariableLengthWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.training.rules import check_recompute, check_training, check_two_kinds

FLEX_SINCE = {"container": (26, 2, 1), "core": (0, 16)}
"""Releases since which recipes exchange tokens by the flex dispatcher: NeMo containers (year.month) and Megatron Core.
Megatron Core has it since 0.12 (DeepEP), with HybridEP since 0.15; Megatron-Bridge's recipes of Qwen3-30B-A3B name it."""


def resolve_strategy(*, parallel: ParallelQuery, model: ModelSpec, workload: TrainingWorkload) -> Strategy:
    """What the query says, else what its framework does. Raises InputError for what would change nothing."""
    dispatcher = parallel.moe_token_dispatcher_type
    if dispatcher is not None and not model.num_experts:
        raise InputError(
            f"{model.name} has no experts to dispatch tokens to; leave it out", field="parallel.moe_token_dispatcher_type"
        )
    return Strategy(
        context_parallel_communication=parallel.context_parallel_communication or "p2p",
        hierarchical_context_parallel_sizes=_context_levels(parallel, model),
        moe_token_dispatcher_type=dispatcher or usual_dispatcher(workload.framework_version if model.num_experts else None),
        pipeline_layout=_pipeline_layout(parallel.pipeline_layout, model=model, workload=workload),
    )


def _pipeline_layout(text: str | None, *, model: ModelSpec, workload: TrainingWorkload) -> PipelineLayout | None:
    """The layout, if it is this model's. Raises UnsupportedError for what is not modelled along with it."""
    if text is None:
        return None
    for unsupported, what in (
        (workload.framework != "megatron-core", f"framework {workload.framework}"),
        (model.architecture != "decoder", f"architecture {model.architecture}"),
        (workload.task == "lora" or workload.lora is not None, "LoRA"),
        (workload.packed, "packed rows"),
        (workload.offload not in (None, "none"), f"offload {workload.offload}"),
    ):
        if unsupported:
            raise UnsupportedError(f"a pipeline_layout with {what} is not modelled; leave it out", field=LAYOUT_FIELD)
    layout = parse_layout(text)
    check_layout(layout, num_layers=model.num_hidden_layers, mtp_layers=model.num_nextn_predict_layers)
    return layout


def _context_levels(parallel: ParallelQuery, model: ModelSpec) -> tuple[int, int] | None:
    """The levels of a2a+p2p that a query gives. Raises InputError where Megatron Core would not run them."""
    sizes, field = parallel.hierarchical_context_parallel_sizes, "parallel.hierarchical_context_parallel_sizes"
    if sizes is None:
        return None
    if parallel.context_parallel_communication != "a2a+p2p":
        raise InputError(f"{list(sizes)} belongs to context_parallel_communication a2a+p2p; leave one of them out", field=field)
    asked = parallel.context_parallel_size
    if min(sizes) < 1 or (asked if isinstance(asked, tuple) else (asked,)) != (sizes[0] * sizes[1],):
        raise InputError(
            f"{list(sizes)} wants a context_parallel_size of {sizes[0] * sizes[1]}, and both of them at least 1", field=field
        )
    if model.num_attention_heads % sizes[0]:
        raise InputError(
            f"{sizes[0]} ranks cannot share {model.num_attention_heads} attention heads; make the first a divisor", field=field
        )
    return sizes


def with_scatter(profile: EfficiencyProfile, *, model: ModelSpec, workload: TrainingWorkload) -> EfficiencyProfile:
    """The profile with the scatter of step times that holds for this kind of model, under this release."""
    constants = profile.framework
    if not model.num_experts:
        return profile
    today = usual_dispatcher(workload.framework_version) == "flex"
    scatter = constants.expert_time_log_sd if today else constants.earlier_expert_time_log_sd
    if scatter is None:
        return profile
    return dataclasses.replace(profile, framework=dataclasses.replace(constants, time_log_sd=scatter))


def usual_dispatcher(framework_version: str | None) -> TokenDispatcher:
    """flex from the releases of FLEX_SINCE on; alltoall before, and where the release is not known: it runs everywhere."""
    if framework_version is None:
        return "alltoall"
    numbers = tuple(int(part) for part in re.findall(r"\d+", framework_version)[:3])
    if not numbers:
        return "alltoall"
    since = FLEX_SINCE["container" if numbers[0] >= 20 else "core"]
    return "flex" if numbers >= since else "alltoall"


def laid_out(cluster: ClusterSpec, *, model: ModelSpec, parallel: ParallelQuery) -> ClusterSpec:
    """The cluster with its ranks in the order asked for."""
    if parallel.rank_order is None:
        return cluster
    order = checked_order(parallel.rank_order)
    if model.num_experts and not order.endswith("pp"):
        raise UnsupportedError(
            f"rank_order {order}: with experts pp must come last, or attention and experts would not share their stages",
            field="parallel.rank_order",
        )
    return dataclasses.replace(cluster, rank_order=order)


# A query with its names looked up: the nouns the pure core takes. What this version does not model is refused here.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProblem(TrainingCase):
    """A query's case, what it wants of it, and what the mean sequence hides."""

    constraints: Constraints
    kind_profiles: tuple[EfficiencyProfile, ...] = ()
    """Of cluster.kinds; `profile` is then that of the kind whose predictions scatter more."""
    parallel: ParallelQuery = dataclasses.field(default_factory=ParallelQuery)
    """As asked."""
    rows: Rows | None = None
    """What packed rows hold; None where all rows cost the same."""

    def costs(self, candidates: Candidates) -> TrainingCosts:
        """Memory and step time of legal candidates."""
        headroom = self.constraints.memory_headroom_fraction
        if self.cluster.kinds:
            return mixed_costs(self.kinds, candidates, memory_headroom_fraction=headroom)
        layout = self.strategy.pipeline_layout
        if layout is not None:
            return laid_out_costs(self, candidates, layout=layout, memory_headroom_fraction=headroom)
        costs = training_costs(case=self, candidates=candidates, memory_headroom_fraction=headroom)
        return costs if self.rows is None else with_imbalance(costs, rows=self.rows, case=self, candidates=candidates)

    @property
    def kinds(self) -> tuple[TrainingCase, TrainingCase]:
        """The case on either kind of GPU, where there are two."""
        first, second = (
            TrainingCase(model=self.model, cluster=cluster, workload=self.workload, profile=profile, strategy=self.strategy)
            for cluster, profile in zip(self.cluster.kinds, self.kind_profiles, strict=True)
        )
        return first, second

    def with_num_gpus(self, num_gpus: int) -> TrainingProblem:
        """The same on fewer devices of the same kind."""
        per_node = min(self.cluster.gpus_per_node, num_gpus)
        domain = max(per_node, min(self.cluster.nvlink_domain_size, num_gpus))
        cluster = dataclasses.replace(self.cluster, num_gpus=num_gpus, gpus_per_node=per_node, nvlink_domain_size=domain)
        return dataclasses.replace(self, cluster=cluster)


def resolve_training(query: Query) -> TrainingProblem:
    """Look the names up. Raises InputError, NotFoundError for unknown names, UnsupportedError for what is not modelled."""
    if query.kind != "training" or query.training is None:
        raise UnsupportedError(
            "this is asked about trainings alone; queries of kind inference are answered by `hp-tool recommend` and `tune`",
            field="kind",
        )
    model = resolve_model(query)
    cluster = laid_out(catalogue_cluster(query.cluster), model=model, parallel=query.parallel)
    if cluster.kinds:
        check_two_kinds(query, model=model)
    _refuse_of_inference(query)
    _refuse_unmodelled(model, query.training, query.parallel)
    check_training(model, cluster.gpu, query.training, query.parallel)
    check_recompute(query.parallel, model=model, workload=query.training)
    peak_flops(cluster.gpu, precision=query.training.precision)
    if query.constraints.max_days is not None and query.training.total_tokens is None:
        raise InputError(
            "constraints.max_days needs training.total_tokens", field="training.total_tokens", code="missing_field"
        )
    if query.constraints.max_cost is not None and (query.training.total_tokens is None or cluster.price_per_gpu_hour is None):
        raise InputError(
            "constraints.max_cost needs training.total_tokens and cluster.price_per_gpu_hour",
            field="cluster.price_per_gpu_hour" if query.training.total_tokens else "training.total_tokens",
            code="missing_field",
        )
    workload, rows = _with_lengths(query.training)
    if model.architecture == "encoder_decoder" and workload.decoder_sequence_length is None:
        workload = dataclasses.replace(workload, decoder_sequence_length=workload.sequence_length)
    profiles = [
        with_scatter(
            efficiency(
                gpu=kind.gpu,
                framework=workload.framework,
                overlap=workload.overlap,
                cuda_graphs=workload.cuda_graphs,
                cluster=cluster.name,
            ),
            model=model,
            workload=workload,
        )
        for kind in cluster.kinds or (cluster,)
    ]
    return TrainingProblem(
        model=model,
        cluster=cluster,
        workload=workload,
        rows=rows,
        profile=max(profiles, key=lambda one: (not one.gpu.measured, one.framework.time_log_sd)),
        kind_profiles=tuple(profiles) if cluster.kinds else (),
        constraints=query.constraints,
        parallel=query.parallel,
        strategy=resolve_strategy(parallel=query.parallel, model=model, workload=query.training),
    )


def resolve_model(query: Query) -> ModelSpec:
    """The model a query names or describes. Raises InputError, NotFoundError."""
    return named_model(query.model)


def self_contained(query: Query) -> Query:
    """The query to be kept: a model that is a file stands in it, so that it asks the same tomorrow, and by another process."""
    return dataclasses.replace(query, model=resolve_model(query)) if is_own_file(query.model) else query


def named_model(model: str | ModelSpec | dict[str, Any]) -> ModelSpec:
    """A catalogue name, an own file, a mapping or a shape as a shape. Raises InputError, NotFoundError."""
    if isinstance(model, ModelSpec):
        return checked_model(model)
    return catalogue_model(model) if isinstance(model, str) else model_from_mapping(model)


def _with_lengths(workload: TrainingWorkload) -> tuple[TrainingWorkload, Rows | None]:
    """The workload with its sequence_lengths looked up, and what its rows hold where they are packed."""
    if workload.sequence_lengths is None:
        if workload.packed:
            raise InputError(
                "training.packed needs training.sequence_lengths: what packing wins depends on them",
                field="training.sequence_lengths",
                code="missing_field",
            )
        return workload, None
    if workload.packed and workload.attention == "unfused":
        raise UnsupportedError(
            "packed rows need attention: flash; unfused attention computes the scores between sequences too",
            field="training.attention",
        )
    if workload.global_batch_size > MAX_BATCH:
        raise InputError(
            f"with sequence_lengths global_batch_size may be at most {MAX_BATCH:,}, got {workload.global_batch_size:,}",
            field="training.global_batch_size",
        )
    distribution = sequence_lengths(workload.sequence_lengths)
    rows = (packed_rows if workload.packed else padded_rows)(distribution, row_tokens=workload.sequence_length)
    values: dict[str, Any] = {f.name: getattr(workload, f.name) for f in dataclasses.fields(workload)}
    resolved = VariableLengthWorkload(**values, row_tokens=rows.mean_tokens, row_squares=rows.mean_squares)
    return resolved, rows if workload.packed else None


_UNMODELLED_PARALLEL = (
    "attention_data_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)
_INFERENCE_OBJECTIVES = ("throughput_per_gpu", "ttft", "tpot")


def _refuse_of_inference(query: Query) -> None:
    """What says something about serving says nothing about training."""
    if query.objective in _INFERENCE_OBJECTIVES:
        raise InputError(
            f"objective {query.objective} belongs to inference; choose throughput, days, cost or min_gpus", field="objective"
        )
    for name in ("inference", "targets"):
        if getattr(query, name) is not None:
            raise InputError(f"{name} belongs to queries of kind inference; leave it out", field=name)


def _refuse_unmodelled(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Nothing a query asks for is silently ignored."""
    if model.architecture == "encoder_decoder":
        _refuse_two_sided(model, workload)
    elif workload.decoder_sequence_length is not None:
        raise InputError(
            f"decoder_sequence_length belongs to encoder-decoder models, which {model.name} is not; leave it out",
            field="training.decoder_sequence_length",
        )
    for name in _UNMODELLED_PARALLEL:
        if getattr(parallel, name) is not None:
            raise UnsupportedError(f"parallel.{name} is not modelled by this version; leave it out", field=f"parallel.{name}")
    schedules = parallel.pipeline_schedule if isinstance(parallel.pipeline_schedule, tuple) else (parallel.pipeline_schedule,)
    if workload.sequence_lengths is not None and (model.sliding_window or workload.sequence_length) < workload.sequence_length:
        raise UnsupportedError(
            f"sequences of unequal length are not modelled with a sliding_window ({model.sliding_window}) shorter than "
            "sequence_length; leave sliding_window out to count full attention",
            field="model.sliding_window",
        )
    if workload.packed and set(schedules) - {None, "1f1b", "interleaved"}:
        raise UnsupportedError(
            "the imbalance of packed rows is modelled for the pipeline schedules 1f1b and interleaved alone",
            field="parallel.pipeline_schedule",
        )


def _refuse_two_sided(model: ModelSpec, workload: TrainingWorkload) -> None:
    """What is not modelled of encoder-decoder models."""
    for given, what, field in (
        (model.num_experts is not None, "experts", "model.num_experts"),
        (model.kv_lora_rank is not None, "latent attention", "model.kv_lora_rank"),
        (model.sliding_window is not None, "sliding-window attention", "model.sliding_window"),
        (model.num_nextn_predict_layers > 0, "multi-token prediction", "model.num_nextn_predict_layers"),
        (workload.sequence_lengths is not None, "unequal sequence lengths", "training.sequence_lengths"),
        (workload.optimizer == "muon", "optimizer muon", "training.optimizer"),
        (workload.lora is not None or workload.task == "lora", "LoRA", "training.task"),
        (workload.offload == "activations", "offload of activations", "training.offload"),
    ):
        if given:
            raise UnsupportedError(f"{what} of encoder-decoder models is not modelled by this version", field=field)
