"""A query with its names looked up: the nouns the pure core takes. What this version does not model is refused here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hp_tool.catalog import checked_model, model_from_mapping
from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import efficiency
from hp_tool.catalog.lengths import sequence_lengths
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.lengths.imbalance import MAX_BATCH, with_imbalance
from hp_tool.cost.lengths.sequences import Rows, packed_rows, padded_rows
from hp_tool.cost.pipeline_parts import laid_out_costs, mixed_costs
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.workload import TrainingWorkload, VariableLengthWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.rules.recompute import check_recompute
from hp_tool.rules.training import check_training, check_two_kinds
from hp_tool.strategy import laid_out, resolve_strategy, with_scatter


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


def named_model(model: str | ModelSpec | dict[str, Any]) -> ModelSpec:
    """A catalogue name, a path, a mapping or a shape as a shape. Raises InputError, NotFoundError."""
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
