"""Fields of a training query that do not go together. What one of them makes meaningless is refused, not ignored."""

from __future__ import annotations

from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.lora import target_names
from hp_tool.cost.moe import merges_passes
from hp_tool.domain.frameworks import facts
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, Recompute, RecomputeModule, zero_stages
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def check_training(model: ModelSpec, gpu: GpuSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Raises InputError or UnsupportedError, which name the field to change."""
    if workload.framework == "nanotron":
        check_nanotron(model, workload, parallel)
    _check_sharding(parallel, framework=workload.framework)
    _check_states(workload)
    _check_adapters(model, workload)
    _check_frozen(model, workload, parallel)
    _check_offload(gpu, workload)
    if merges_passes(workload):
        _check_merged_passes(model, workload, parallel)


def check_two_kinds(query: Query, *, model: ModelSpec) -> None:
    """Raises UnsupportedError for what is not modelled where cluster.stages names two kinds of GPU."""
    training, parallel = query.training, query.parallel
    schedules = parallel.pipeline_schedule if isinstance(parallel.pipeline_schedule, tuple) else (parallel.pipeline_schedule,)
    for unsupported, field in (
        (model.architecture == "encoder_decoder", "model"),
        (query.objective == "min_gpus", "objective"),
        (training is not None and training.packed, "training.packed"),
        (training is not None and facts(training.framework).balances_blocks, "training.framework"),
        (training is not None and training.task == "lora", "training.task"),
        (training is not None and bool(training.frozen), "training.frozen"),
        (training is not None and training.offload not in (None, "none"), "training.offload"),
        (not set(schedules) <= {None, "1f1b", "interleaved"}, "parallel.pipeline_schedule"),
        (parallel.pipeline_layout is not None, "parallel.pipeline_layout"),
        (parallel.rank_order is not None and not parallel.rank_order.endswith("pp"), "parallel.rank_order"),
    ):
        if unsupported:
            raise UnsupportedError(f"{field} is not modelled with two kinds of GPU (cluster.stages); change one", field=field)


def _check_sharding(parallel: ParallelQuery, *, framework: str) -> None:
    sizes, stages = (
        value if isinstance(value, tuple) else (value,) for value in (parallel.data_parallel_shard_size, parallel.zero_stage)
    )
    if any(sizes) and 0 in stages:
        raise InputError(
            "data_parallel_shard_size means nothing with zero_stage 0, which shards nothing; choose zero_stage 1 to 3",
            field="parallel.data_parallel_shard_size",
        )
    known = zero_stages(framework)
    for stage in stages:
        if stage is not None and stage not in known:
            raise InputError(
                f"{framework} has no zero_stage {stage}; choose {' or '.join(map(str, known))}",
                field="parallel.zero_stage",
            )


def _check_states(workload: TrainingWorkload) -> None:
    if workload.fp8_recipe is not None and workload.precision != "fp8":
        raise InputError(
            f"fp8_recipe belongs to precision fp8, not {workload.precision}; leave it out", field="training.fp8_recipe"
        )
    if workload.parameter_precision == "fp8" and (workload.precision not in ("fp8", "mxfp8") or workload.lora is not None):
        raise InputError(
            "parameter_precision fp8 keeps weights as the matmuls of precision fp8 or mxfp8 want them, and all are trained",
            field="training.parameter_precision",
        )
    if workload.optimizer == "sgd" and workload.exp_avg_sq_precision is not None:
        raise InputError("optimizer sgd has no second state; leave it out", field="training.exp_avg_sq_precision")
    if workload.master_precision is None:
        return
    wide = workload.precision == "fp32" or facts(workload.framework).wide_weights
    stored = workload.parameter_precision or ("fp32" if wide else "fp16" if workload.precision == "fp16" else "bf16")
    if stored == "fp32":
        raise InputError(
            "parameters of 32 bits have no master copy; leave it out, or set parameter_precision",
            field="training.master_precision",
        )
    if workload.master_precision == "remainder" and stored != "bf16":
        raise InputError(
            f"only bf16 parameters are half of an fp32 number; parameters are {stored}, so choose fp32, fp16 or none",
            field="training.master_precision",
        )


def _check_adapters(model: ModelSpec, workload: TrainingWorkload) -> None:
    lora = workload.lora
    if (lora is None) != (workload.task != "lora"):
        raise InputError(
            "task lora needs lora: {rank: ...}" if lora is None else f"lora belongs to task lora, not {workload.task}",
            field="training.lora",
            code="missing_field" if lora is None else "invalid_value",
        )
    if lora is None:
        return
    if workload.reliability is not None:
        raise UnsupportedError(
            "checkpoints of adapters are not modelled, so neither is goodput; leave training.reliability out",
            field="training.reliability",
        )
    if lora.target_modules == ():
        raise InputError("lora.target_modules is empty; name some, or leave it out", field="training.lora.target_modules")
    known = target_names(model, Candidates.alone(ParallelConfig()), moe=bool(model.num_experts))
    for name in lora.target_modules or ():
        if name not in known:
            raise InputError(
                f"{model.name} has no matrix {name!r}; known: {', '.join(sorted(known))}", field="training.lora.target_modules"
            )


def _check_frozen(model: ModelSpec, workload: TrainingWorkload, query: ParallelQuery) -> None:
    """Parts frozen by name, in plain pipelines of decoders; LoRA freezes everything already."""
    if not workload.frozen:
        return
    if model.tie_word_embeddings and set(workload.frozen) != {"embedding", "output_layer"}:
        raise InputError(
            f"{model.name} ties its output layer to the embedding: freeze both, [embedding, output_layer], or neither",
            field="training.frozen",
        )
    schedules = query.pipeline_schedule if isinstance(query.pipeline_schedule, tuple) else (query.pipeline_schedule,)
    for unsupported, what in (
        (workload.lora is not None, "LoRA, which freezes all weights already"),
        (model.architecture != "decoder", f"{model.architecture} models"),
        (model.num_nextn_predict_layers > 0, "multi-token prediction"),
        (model.has_output_bias, "an output bias"),
        (workload.framework != "megatron-core", f"framework {workload.framework}"),
        (query.pipeline_layout is not None, "parallel.pipeline_layout"),
        (not set(schedules) <= {None, "1f1b", "interleaved"}, "a schedule that splits backward passes"),
    ):
        if unsupported:
            raise UnsupportedError(f"training.frozen is not modelled with {what}", field="training.frozen")


def _check_merged_passes(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """What Megatron Core's overlap_moe_expert_parallel_comm wants of model and workload; sizes are the space's business."""
    asked = parallel.recompute if isinstance(parallel.recompute, tuple) else (parallel.recompute,)
    full = any((spec.granularity if isinstance(spec, Recompute) else spec) == "full" for spec in asked)
    field = "training.overlap.expert_parallel"
    if workload.framework != "megatron-core":
        raise UnsupportedError(f"{workload.framework} does not merge passes to hide all-to-alls; leave it out", field=field)
    if not model.num_experts:
        raise InputError(f"{model.name} has no experts whose all-to-alls could be hidden; leave it out", field=field)
    if model.num_nextn_predict_layers > 1:
        raise InputError("merged passes take at most one multi-token-prediction layer; leave it out", field=field)
    if workload.lora is not None or workload.packed:
        raise UnsupportedError("merged passes are not modelled under lora or with packed rows; leave it out", field=field)
    if full:
        raise InputError(
            "merged passes (training.overlap.expert_parallel) do not go with recompute full; leave one of them out",
            field="parallel.recompute",
        )


def _check_offload(gpu: GpuSpec, workload: TrainingWorkload) -> None:
    if workload.offload in (None, "none"):
        if workload.offload_fraction != 1.0:
            raise InputError(
                "offload_fraction says how much of offload: optimizer or activations; choose one, or leave it out",
                field="training.offload_fraction",
            )
        return
    if workload.offload != "optimizer":
        return
    if workload.optimizer == "muon":
        raise UnsupportedError("optimizer muon runs on the device; offload adam or sgd", field="training.offload")
    if gpu.host_memory_bandwidth_bytes_per_second is None:
        raise InputError(
            f"offload: optimizer needs the host's memory bandwidth, and {gpu.name} has no "
            "host_memory_bandwidth_bytes_per_second; describe the GPU with it",
            field="cluster.gpu.host_memory_bandwidth_bytes_per_second",
            code="missing_field",
        )


# What nanotron does not have, or no run of it told us: refused by name, never answered with another framework's figures.


_ALLOWED_TRAINING: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16",),
    "parameter_precision": (None, "bf16"),
    "gradient_precision": (None, "fp32"),
    "optimizer_precision": (None, "fp32"),
    "exp_avg_sq_precision": (None,),
    "master_precision": (None, "fp32"),
    "optimizer": ("adam",),
    "attention": ("flash",),
    "cross_entropy": ("unfused",),
    "dropout": (0.0,),
    "task": ("pretrain", "sft"),
    "offload": (None, "none"),
}
_ALLOWED_PARALLEL: dict[str, tuple[Any, ...]] = {
    "virtual_pipeline_parallel_size": (None, 1),
    "pipeline_schedule": (None, "1f1b"),
    "context_parallel_size": (None, 1),
    "expert_parallel_size": (None, 1),
    "expert_tensor_parallel_size": (None, 1),
    "data_parallel_shard_size": (None, 0),
    "recompute": (None, "none", "full"),
}


def check_nanotron(model: ModelSpec, workload: TrainingWorkload, parallel: ParallelQuery) -> None:
    """Raises UnsupportedError, which names the field and what may stand there."""
    if model.architecture != "decoder" or model.num_experts or model.kv_lora_rank or model.num_nextn_predict_layers:
        raise UnsupportedError(
            f"{model.name}: with framework nanotron dense decoders are modelled; experts, latent attention and multi-token "
            "prediction are not",
            field="model",
        )
    for noun, allowed in ((workload, _ALLOWED_TRAINING), (parallel, _ALLOWED_PARALLEL)):
        place = "training" if noun is workload else "parallel"
        for name, values in allowed.items():
            asked = getattr(noun, name)
            for value in asked if isinstance(asked, tuple) else (asked,):
                if value not in values:
                    known = " or ".join(str(v) for v in values if v is not None) or "nothing"
                    raise UnsupportedError(
                        f"{place}.{name} {value} is not modelled for framework nanotron; choose {known}",
                        field=f"{place}.{name}",
                    )


# What a query may say about recomputation: refused by name is what would mean nothing, or is not modelled.


FIELD = "parallel.recompute"


def check_recompute(parallel: ParallelQuery, *, model: ModelSpec, workload: TrainingWorkload) -> None:
    """Raises InputError or UnsupportedError, which name the field and the mend."""
    for value in parallel.recompute if isinstance(parallel.recompute, tuple) else (parallel.recompute,):
        spec = value if isinstance(value, Recompute) else Recompute(granularity=value or "none")
        _check(spec)
        if spec.granularity == "per_op":
            _check_per_op(model, workload)
        if spec.modules is not None:
            _check_modules(spec.modules, model=model, workload=workload)


def _check(spec: Recompute) -> None:
    if spec.modules is not None and spec.granularity != "selective":
        raise InputError(
            f"recompute.modules belongs to granularity selective, not {spec.granularity}", field=f"{FIELD}.modules"
        )
    if spec.granularity != "full" and (spec.method is not None or spec.num_layers is not None):
        raise InputError(
            f"recompute.method and num_layers belong to granularity full, not {spec.granularity}", field=f"{FIELD}.method"
        )


def _check_per_op(model: ModelSpec, workload: TrainingWorkload) -> None:
    """Which operations there are, and in which order, is known of Llama's blocks."""
    if workload.framework != "torch-fsdp":
        raise UnsupportedError(
            f"recompute per_op is torch-fsdp's, not {workload.framework}'s; choose none, selective or full", field=FIELD
        )
    for unsupported, what in (
        (model.architecture != "decoder" or not model.gated_mlp, "models other than Llama-like decoders"),
        (model.num_experts is not None, "mixtures of experts"),
        (model.kv_lora_rank is not None, "latent attention"),
        (workload.attention != "flash", f"attention {workload.attention}"),
        (workload.precision not in ("bf16", "fp16", "fp32"), f"precision {workload.precision}"),
        (workload.lora is not None or workload.task == "lora", "LoRA"),
    ):
        if unsupported:
            raise UnsupportedError(f"recompute per_op is not modelled for {what}; choose none or per_layer", field=FIELD)


def _check_modules(modules: tuple[RecomputeModule, ...], *, model: ModelSpec, workload: TrainingWorkload) -> None:
    """Each module must be there: Megatron Core skips some of the missing ones in silence."""
    field = f"{FIELD}.modules"
    if not modules:
        raise InputError("recompute.modules is an empty list; name modules, or choose recompute none", field=field)
    if set(modules) == {"core_attn"}:
        return
    if workload.framework != "megatron-core":
        raise UnsupportedError(
            f"recompute.modules are Megatron Core's, not {workload.framework}'s; choose none, selective or full", field=field
        )
    if model.architecture == "encoder_decoder":
        raise UnsupportedError("recompute.modules of encoder-decoder models are not modelled by this version", field=field)
    if workload.lora is not None:
        raise UnsupportedError("recompute.modules other than core_attn are not modelled under lora", field=field)
    dense = model.num_hidden_layers > model.moe_layers
    missing: dict[RecomputeModule, tuple[bool, str]] = {
        "mlp": (dense, "a layer with a dense MLP"),
        "moe": (model.num_experts is not None, "a model with experts"),
        "moe_act": (model.num_experts is not None, "a model with experts"),
        "shared_experts": (model.num_shared_experts > 0, "a model with shared experts"),
        "mla_up_proj": (model.kv_lora_rank is not None, "a model with latent attention"),
    }
    for name, (there, wanted) in missing.items():
        if name in modules and not there:
            raise InputError(f"recompute.modules {name} needs {wanted}; leave it out", field=field)
