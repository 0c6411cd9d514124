"""Reject training queries with incompatible fields or unsupported features."""

from collections.abc import Collection
from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.lora import target_names
from hp_tool.cost.optimizer import stored_precision
from hp_tool.domain.blocks import Mixer
from hp_tool.domain.frameworks import DEGREES, framework_facts, training_engine
from hp_tool.domain.graphs import recording_error
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.domain.knobs import KNOBS
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import (
    ParallelConfig,
    ParallelQuery,
    Recompute,
    RecomputeName,
    axis_values,
)
from hp_tool.domain.query import Query
from hp_tool.domain.releases import LOOP_REFUSES_IN_PLACE_LOSS, is_at_least, is_core_release
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training.recompute_rules import (
    check_recompute,
    first_case,
    reject_first_case,
)

_PLAIN_SCHEDULES = {"1f1b", "interleaved"}


def check_training(query: Query, *, model: ModelSpec, cluster: ClusterSpec) -> None:
    """Check a training query.

    Raises:
        InputError: Fields are incompatible. The error names the field to change.
        UnsupportedError: A feature is not modelled.
    """
    workload, parallel = query.training, query.parallel
    assert workload is not None  # Checked together with `kind`.
    _check_training_only(query)
    check_degrees(parallel, framework=workload.framework)
    check_unlike(model=model, workload=workload, parallel=parallel, cluster=cluster)
    if cluster.kinds:
        _check_two_kinds(query, model, workload)
    if model.architecture == "encoder_decoder":
        _check_two_sided(model, workload)
    else:
        alone = (
            f"decoder_sequence_length applies to encoder-decoder models only, and {model.name} is "
            "not one; remove it"
        )
        reject_first_case(
            "training.decoder_sequence_length",
            (workload.decoder_sequence_length is not None, alone),
        )
    if framework_facts(workload.framework).is_plain:
        _check_framework(model, workload, parallel)
    _check_lengths(model, workload, parallel)
    _check_dynamic_context(model, workload, parallel)
    _check_sharding(parallel, workload)
    _check_states(workload)
    for name in ("expert_precision", "dispatch_precision"):
        foreign = getattr(workload, name) is not None and not model.num_experts
        reject_first_case(
            f"training.{name}",
            (
                foreign,
                f"{name} applies to MoE models only, and {model.name} has no experts; remove it",
            ),
        )
    formed_again = workload.gated_product == "recomputed" and not (
        model.gated_mlp and not model.num_experts
    )
    gated = (
        "gated_product recomputed is supported only for dense models with a gated MLP, and "
        f"{model.name} is not one; remove it"
    )
    reject_first_case("training.gated_product", (formed_again, gated))
    _check_adapters(model, workload)
    _check_frozen(model, workload, parallel)
    _check_offload(cluster.gpu, workload)
    if workload.merges_passes:
        _check_merged_passes(model, workload, parallel)
    if training_engine(workload.framework) == "megatron-core":
        _check_release(model, workload)
    recompute: tuple[RecomputeName | Recompute, ...] = axis_values(parallel.recompute)
    for value in recompute:
        check_recompute(
            value if isinstance(value, Recompute) else Recompute(granularity=value), model, workload
        )
    _check_constraints(query, cluster)


def _check_training_only(query: Query) -> None:
    serves = query.objective in ("throughput_per_gpu", "ttft", "tpot")
    reject_first_case(
        "objective",
        (
            serves,
            f"objective {query.objective} is for inference; choose throughput, days, cost or "
            "min_gpus",
        ),
    )
    for name in ("inference", "targets"):
        reject_first_case(
            name,
            (
                getattr(query, name) is not None,
                f"{name} is only for inference queries; remove it",
            ),
        )
    for name in (
        "attention_data_parallel_size",
        "redundant_experts",
        "max_num_seqs",
        "max_num_batched_tokens",
    ):
        if getattr(query.parallel, name) is not None:
            raise UnsupportedError(
                f"parallel.{name} is not supported by this version; remove it",
                field=f"parallel.{name}",
            )


def _check_constraints(query: Query, cluster: ClusterSpec) -> None:
    limits, tokens = query.constraints, query.training and query.training.total_tokens
    priced = cluster.price_per_gpu_hour is not None
    reject_first_case(
        "cluster.price_per_gpu_hour" if tokens else "training.total_tokens",
        (
            limits.max_days is not None and tokens is None,
            "constraints.max_days requires training.total_tokens; set it",
        ),
        (
            limits.max_cost is not None and (tokens is None or not priced),
            "constraints.max_cost requires training.total_tokens and cluster.price_per_gpu_hour; "
            "set "
            "both",
        ),
        code="missing_field",
    )


def _check_two_kinds(query: Query, model: ModelSpec, workload: TrainingWorkload) -> None:
    parallel = query.parallel
    if field := first_case(
        (model.architecture == "encoder_decoder", "model"),
        (query.objective == "min_gpus", "objective"),
        (workload.packed, "training.packed"),
        (framework_facts(workload.framework).balances_blocks, "training.framework"),
        (workload.task == "lora", "training.task"),
        (workload.frozen, "training.frozen"),
        (workload.offload not in (None, "none"), "training.offload"),
        (
            set(axis_values(parallel.pipeline_schedule)) - _PLAIN_SCHEDULES,
            "parallel.pipeline_schedule",
        ),
        (parallel.pipeline_layout is not None, "parallel.pipeline_layout"),
        (
            parallel.rank_order is not None and not parallel.rank_order.endswith("pp"),
            "parallel.rank_order",
        ),
    ):
        raise UnsupportedError(
            f"{field} is not supported with two kinds of GPU (cluster.stages); remove one of them",
            field=field,
        )


def _check_two_sided(model: ModelSpec, workload: TrainingWorkload) -> None:
    if field := first_case(
        (model.num_experts is not None, "model.num_experts"),
        (model.kv_lora_rank is not None, "model.kv_lora_rank"),
        (model.sliding_window is not None, "model.sliding_window"),
        (model.num_nextn_predict_layers > 0, "model.num_nextn_predict_layers"),
        (workload.sequence_lengths is not None, "training.sequence_lengths"),
        (workload.optimizer == "muon", "training.optimizer"),
        (workload.lora is not None or workload.task == "lora", "training.task"),
        (workload.offload == "activations", "training.offload"),
    ):
        raise UnsupportedError(
            f"{field} is not supported for encoder-decoder models; remove {field} or choose a "
            "decoder-only model",
            field=field,
        )


def _check_lengths(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    if workload.sequence_lengths is None:
        needed = (
            "training.packed requires training.sequence_lengths, on which the gain of packing "
            "depends"
        )
        reject_first_case(
            "training.sequence_lengths", (workload.packed, needed), code="missing_field"
        )
        return
    if (model.sliding_window or workload.sequence_length) < workload.sequence_length:
        raise UnsupportedError(
            "sequences of unequal length are not supported with a sliding_window "
            f"({model.sliding_window}) shorter than sequence_length; remove "
            "sliding_window to count full attention",
            field="model.sliding_window",
        )
    if workload.packed:
        splits = set(axis_values(parallel.pipeline_schedule)) - _PLAIN_SCHEDULES
        imbalance = (
            "packed rows support only pipeline_schedule 1f1b and interleaved; set one of these or "
            "remove pipeline_schedule"
        )
        reject_first_case("parallel.pipeline_schedule", (splits, imbalance), error=UnsupportedError)
        unfused = (
            "packed rows require training.attention: flash, because unfused attention also "
            "computes "
            "scores between sequences; set it"
        )
        reject_first_case(
            "training.attention", (workload.attention == "unfused", unfused), error=UnsupportedError
        )
    from hp_tool.cost.lengths.imbalance import MAX_BATCH

    batch = workload.global_batch_size
    too_large = (
        f"with sequence_lengths, global_batch_size may be at most {MAX_BATCH:,}, got {batch:,}"
    )
    reject_first_case("training.global_batch_size", (batch > MAX_BATCH, too_large))


def _check_dynamic_context(
    model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery
) -> None:
    field = "parallel.dynamic_context_parallel"
    if not parallel.dynamic_context_parallel:
        return
    if workload.sequence_lengths is None or not workload.packed:
        message = (
            "dynamic_context_parallel schedules packed sequences; set training.packed and "
            "training.sequence_lengths"
        )
        raise InputError(message, field=field)
    if what := first_case(
        (training_engine(workload.framework) != "megatron-core", f"framework {workload.framework}"),
        (model.num_experts is not None, "an MoE model"),
        (model.architecture != "decoder", f"architecture {model.architecture}"),
        (
            parallel.context_parallel_communication not in (None, "p2p"),
            "a context_parallel_communication other than p2p",
        ),
        (parallel.pipeline_layout is not None, "a pipeline_layout"),
    ):
        raise UnsupportedError(
            f"dynamic_context_parallel with {what} is not supported; remove it", field=field
        )
    has_larger_micro_batch = any(size > 1 for size in axis_values(parallel.micro_batch_size))
    reject_first_case(
        "parallel.micro_batch_size",
        (
            has_larger_micro_batch,
            "with dynamic_context_parallel, a packed row is a micro-batch; set "
            "micro_batch_size to 1",
        ),
    )


def _check_sharding(parallel: ParallelQuery, workload: TrainingWorkload) -> None:
    stages, framework = axis_values(parallel.zero_stage), workload.framework
    supported, by_run = framework_facts(framework).zero_stages, workload.gradient_reduction == "run"
    no_sharding = (
        "data_parallel_shard_size has no effect with zero_stage 0, which shards nothing; choose "
        "zero_stage 1 to 3"
    )
    reject_first_case(
        "parallel.data_parallel_shard_size",
        (0 in stages and any(axis_values(parallel.data_parallel_shard_size)), no_sharding),
    )
    unrun = by_run and 2 not in (stages or supported)
    reject_first_case(
        "training.gradient_reduction",
        (
            unrun,
            "gradient_reduction run requires zero_stage 2; set that, or remove gradient_reduction",
        ),
    )
    unknown, choices = (
        next((stage for stage in stages if stage not in supported), None),
        " or ".join(map(str, supported)),
    )
    reject_first_case(
        "parallel.zero_stage",
        (unknown is not None, f"{framework} has no zero_stage {unknown}; choose {choices}"),
    )


def _check_states(workload: TrainingWorkload) -> None:
    precision = workload.precision
    is_unused_recipe = workload.fp8_recipe is not None and precision != "fp8"
    reject_first_case(
        "training.fp8_recipe",
        (is_unused_recipe, f"fp8_recipe requires precision fp8, not {precision}; remove it"),
    )
    reject_first_case(
        "training.cuda_graph_modules",
        (
            workload.cuda_graph_modules is not None
            and not (workload.cuda_graphs and workload.cuda_graph_modules),
            "cuda_graph_modules lists the modules that cuda_graphs: true records; set cuda_graphs "
            "and list modules, or remove it",
        ),
    )
    trained_narrow = precision in ("fp8", "mxfp8") and workload.lora is None
    fp8_parameters = (
        "parameter_precision fp8 requires precision fp8 or mxfp8 and training of all weights (not "
        "LoRA); remove parameter_precision, or change precision or task"
    )
    reject_first_case(
        "training.parameter_precision",
        (workload.parameter_precision == "fp8" and not trained_narrow, fp8_parameters),
    )
    lacks_second_state = workload.optimizer == "sgd" and workload.exp_avg_sq_precision is not None
    reject_first_case(
        "training.exp_avg_sq_precision",
        (lacks_second_state, "optimizer sgd has no second moment; remove exp_avg_sq_precision"),
    )
    if workload.master_precision is None:
        return
    stored = stored_precision(workload)
    reject_first_case(
        "training.master_precision",
        (
            stored == "fp32",
            "fp32 parameters have no master copy; remove master_precision, or set "
            "parameter_precision",
        ),
        (
            workload.master_precision == "remainder" and stored != "bf16",
            f"master_precision remainder requires bf16 parameters, and parameters are {stored}; "
            "choose fp32, fp16 or none",
        ),
    )


def _check_adapters(model: ModelSpec, workload: TrainingWorkload) -> None:
    lora = workload.lora
    if (lora is None) != (workload.task != "lora"):
        raise InputError(
            "task lora requires training.lora, such as {rank: 16}"
            if lora is None
            else f"training.lora requires task lora, not {workload.task}; change task, or remove "
            "training.lora",
            field="training.lora",
            code="missing_field" if lora is None else "invalid_value",
        )
    if lora is None:
        if workload.frozen_precision is not None:
            raise InputError(
                "frozen_precision requires task lora, whose base weights are frozen; remove it",
                field="training.frozen_precision",
            )
        return
    supported = framework_facts(workload.framework).frozen_precisions
    if workload.frozen_precision in ("fp8", "nf4") and workload.frozen_precision not in supported:
        raise UnsupportedError(
            f"{workload.framework} does not store frozen weights in {workload.frozen_precision}; "
            f"use {' or '.join(('bf16', *supported))}",
            field="training.frozen_precision",
        )
    if workload.reliability is not None:
        raise UnsupportedError(
            "Goodput with adapters is not supported, because their checkpoints are not "
            "modelled; remove training.reliability",
            field="training.reliability",
        )
    field = "training.lora.target_modules"
    reject_first_case(
        field,
        (lora.target_modules == (), "lora.target_modules is empty; list modules, or remove it"),
    )
    known = target_names(model, Candidates.alone(ParallelConfig()))
    for name in lora.target_modules or ():
        reject_first_case(
            field,
            (
                name not in known,
                f"{model.name} has no matrix {name!r}; known: {', '.join(sorted(known))}",
            ),
        )


def _check_frozen(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Check `training.frozen`. It is supported for decoders in plain pipelines without LoRA."""
    if not workload.frozen:
        return
    if model.tie_word_embeddings and set(workload.frozen) != {"embedding", "output_layer"}:
        raise InputError(
            f"the output layer of {model.name} is tied to the embedding; freeze both "
            "([embedding, output_layer]) or neither",
            field="training.frozen",
        )
    if what := first_case(
        (workload.lora is not None, "LoRA, which freezes all weights already"),
        (model.architecture != "decoder", f"{model.architecture} models"),
        (model.num_nextn_predict_layers > 0, "multi-token prediction"),
        (model.has_output_bias, "an output bias"),
        (training_engine(workload.framework) != "megatron-core", f"framework {workload.framework}"),
        (parallel.pipeline_layout is not None, "parallel.pipeline_layout"),
        (
            set(axis_values(parallel.pipeline_schedule)) - _PLAIN_SCHEDULES,
            "a schedule that splits backward passes",
        ),
    ):
        raise UnsupportedError(
            f"training.frozen is not supported with {what}; remove one of them",
            field="training.frozen",
        )


def _check_merged_passes(
    model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery
) -> None:
    """Check that the model and the workload support Megatron Core's
    overlap_moe_expert_parallel_comm.

    The parallel sizes are checked by the layout rules.
    """
    field = "training.overlap.expert_parallel"
    if training_engine(workload.framework) != "megatron-core":
        raise UnsupportedError(
            f"{workload.framework} does not overlap all-to-alls with another pass; remove "
            "overlap.expert_parallel",
            field=field,
        )
    if not model.num_experts:
        raise InputError(
            f"{model.name} has no experts, so there are no all-to-alls to overlap; remove "
            "overlap.expert_parallel",
            field=field,
        )
    if model.num_nextn_predict_layers > 1:
        raise InputError(
            "overlap.expert_parallel supports at most one multi-token-prediction layer; remove it",
            field=field,
        )
    if workload.lora is not None or workload.packed:
        raise UnsupportedError(
            "overlap.expert_parallel is not supported with lora or packed rows; remove it",
            field=field,
        )
    recomputes_layers = any(
        (spec.granularity if isinstance(spec, Recompute) else spec) == "full"
        for spec in axis_values(parallel.recompute)
    )
    message = (
        "training.overlap.expert_parallel is not supported with recompute full; disable this "
        "overlap or choose another recompute"
    )
    reject_first_case("parallel.recompute", (recomputes_layers, message))


def _check_release(model: ModelSpec, workload: TrainingWorkload) -> None:
    """Reject combinations with which this Megatron Core release fails to start."""
    if workload.cuda_graphs and (refused := recording_error(workload, model)):
        raise InputError(refused, field="training.cuda_graphs")
    release = workload.framework_version or ""
    if (
        workload.loss == "in_place"
        and is_core_release(release)
        and is_at_least(release, since=LOOP_REFUSES_IN_PLACE_LOSS)
    ):
        raise InputError(
            f"Megatron Core {release} rejects cross_entropy in_place "
            "(--cross-entropy-fusion-impl te) since 0.18.2; set it to fused",
            field="training.cross_entropy",
        )


def _check_offload(gpu: GpuSpec, workload: TrainingWorkload) -> None:
    if workload.offload in (None, "none"):
        alone = "offload_fraction requires offload: optimizer or activations; set one, or remove it"
        reject_first_case(
            "training.offload_fraction", (workload.offload_fraction not in (None, 1.0), alone)
        )
        return
    if workload.offload != "optimizer":
        return
    if workload.optimizer == "muon":
        raise UnsupportedError(
            "optimizer muon cannot be offloaded; use adam or sgd", field="training.offload"
        )
    if gpu.host_memory_bandwidth_bytes_per_second is None:
        raise InputError(
            "offload: optimizer requires host_memory_bandwidth_bytes_per_second, which "
            f"{gpu.name} lacks; set it in cluster.gpu",
            field="cluster.gpu.host_memory_bandwidth_bytes_per_second",
            code="missing_field",
        )


_SUPPORTED_VALUES: dict[str, dict[str, Collection[Any]]] = {
    "training": {name: knob.plain for name, knob in KNOBS.items() if knob.plain is not None},
    "parallel": {
        "virtual_pipeline_parallel_size": (1,),
        "pipeline_schedule": ("1f1b",),
        "context_parallel_size": (1,),
        "expert_parallel_size": (1,),
        "expert_tensor_parallel_size": (1,),
        "recompute": ("none", "full"),
    },
}
"""Supported values for plain frameworks (`FrameworkFacts.is_plain`), from their measured runs."""


def _check_framework(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Reject settings that the framework does not support or that none of its measured runs
    used.
    """
    framework = workload.framework
    if (
        model.architecture != "decoder"
        or model.num_experts
        or model.kv_lora_rank
        or model.num_nextn_predict_layers
    ):
        raise UnsupportedError(
            f"framework {framework} does not support {model.name}: it supports only dense "
            "decoders without latent attention or multi-token prediction; choose another model "
            "or framework",
            field="model",
        )
    gradients = {"gradient_precision": (framework_facts(framework).gradient_precision,)}
    shards = (
        {} if framework_facts(framework).broadcasts_weights else {"data_parallel_shard_size": (0,)}
    )
    for section, spec, more in (("training", workload, gradients), ("parallel", parallel, shards)):
        for name, values in {**_SUPPORTED_VALUES[section], **more}.items():
            field, choices = f"{section}.{name}", " or ".join(map(str, values)) or "nothing"
            for value in axis_values(getattr(spec, name)):
                message = (
                    f"{field} {value} is not modelled for framework {framework}; choose {choices}"
                )
                reject_first_case(field, (value not in values, message), error=UnsupportedError)


def check_degrees(parallel: ParallelQuery, *, framework: str) -> None:
    """Check that the framework supports each parallel size above 1.

    Raises:
        InputError: The framework does not support a kind of parallelism.
    """
    supported = framework_facts(framework).degrees
    for name in DEGREES:
        if name not in supported and any(size > 1 for size in axis_values(getattr(parallel, name))):
            raise InputError(
                f"{framework} does not support {name}; set it to 1, or choose another "
                "training.framework",
                field=f"parallel.{name}",
            )


_SCHEDULES = {"1f1b", "interleaved", "gpipe", "zb-h1"}
"""Schedules with one stage per rank."""
_MEGATRON_MIXERS: tuple[Mixer, ...] = ("attention", "gated_delta", "mamba2", "none")
"""Mixers that Megatron Core supports (0.16: ssm/, transformer/)."""


def check_unlike(
    *, model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery, cluster: ClusterSpec
) -> None:
    """Check the training of a hybrid model, whose layers differ or are not attention and MLP.

    Raises:
        UnsupportedError: A feature is not modelled, or the framework lacks a mixer.
    """
    if model.is_uniform and model.index_topk is None:
        return
    framework = workload.framework
    if what := next(
        (each for holds, each in _unsupported_cases(model, workload, parallel, cluster) if holds),
        None,
    ):
        field, name = what
        raise UnsupportedError(
            f"{model.name}: {name} is not supported with layers of different kinds or "
            "without attention",
            field=field,
        )
    if training_engine(framework) == "megatron-core":
        for _, kind in model.kinds:
            if kind.mixer not in _MEGATRON_MIXERS:
                raise UnsupportedError(
                    f"{model.name}: Megatron Core does not support {kind.mixer} layers; choose "
                    "another training.framework",
                    field="training.framework",
                )


def _unsupported_cases(
    model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery, cluster: ClusterSpec
) -> tuple[tuple[object, tuple[str, str]], ...]:
    """Return (whether the query uses it, (field, name)) for each feature that is not supported."""
    return (
        (
            framework_facts(workload.framework).is_plain,
            ("training.framework", f"framework {workload.framework}"),
        ),
        (cluster.kinds, ("cluster.stages", "a pipeline over two kinds of GPU")),
        (workload.lora is not None or workload.task == "lora", ("training.task", "LoRA")),
        (workload.optimizer == "muon", ("training.optimizer", "optimizer muon")),
        (
            workload.sequence_lengths is not None,
            ("training.sequence_lengths", "a distribution of lengths"),
        ),
        (workload.merges_passes, ("training.overlap.expert_parallel", "overlap.expert_parallel")),
        (
            set(axis_values(parallel.pipeline_schedule)) - _SCHEDULES,
            ("parallel.pipeline_schedule", "a schedule with two stages on a rank"),
        ),
        (model.architecture != "decoder", ("model.architecture", f"an {model.architecture}")),
    )
