"""Write overrides for a recipe of Megatron Bridge 0.3 (NeMo 25.11).

Keys are those of megatron/bridge/training/config.py.
"""

import shlex

from hp_tool.cost.lora import ALIASES, DEFAULT_TARGETS, PARTS
from hp_tool.domain.declared import LORA_FIELDS
from hp_tool.domain.setups import TrainingSetup
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.formats.scripts import assignments
from hp_tool.formats.tools.megatron_lm.words import (
    CONTEXT,
    EXPRESSED_FIELDS,
    PACKING_FIELDS,
    PIPELINE_BEFORE_DATA,
    SHARDING,
)
from hp_tool.formats.tools.megatron_lm.write import (
    context_level_sizes,
    cuda_graph_settings,
    end_stage_flags,
    field_name,
    max_packed_tokens,
    num_offloaded_layers,
    num_shard_groups,
    recomputation_flags,
    state_precisions,
)
from hp_tool.formats.writing import DTYPES, SHAPE_FIELDS, Values, headline, reject_inexpressible

TOOL = "Megatron Bridge 0.3"
_RECIPES: dict[str, tuple[str, Values]] = {
    "bf16": ("bf16_mixed", {}),
    "fp16": ("fp16_mixed", {}),
    "fp8 delayed": (
        "bf16_with_fp8_delayed_scaling_mixed",
        {
            "fp8": "hybrid",
            "fp8_recipe": "delayed",
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
        },
    ),
    "fp8 tensorwise": (
        "bf16_with_fp8_current_scaling_mixed",
        {
            "fp8": "hybrid",
            "fp8_recipe": "tensorwise",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 1,
            "num_layers_at_end_in_bf16": 1,
        },
    ),
    "fp8 blockwise": (
        "bf16_with_fp8_subchannel_scaling_mixed",
        {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    ),
    "mxfp8": ("bf16_with_mxfp8_mixed", {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    "nvfp4": ("bf16_with_nvfp4_mixed", {"fp4": "e2m1", "fp4_recipe": "nvfp4"}),
}
"""Named recipes of megatron/bridge/training/mixed_precision.py, and their fields.

The fp8 and mxfp8 recipes, except blockwise, store parameters in 8 bits. All recipes except fp16's
reduce gradients in fp32.
"""
_DTYPES = {ours: f"torch.{theirs}" for ours, theirs in DTYPES.items()} | {"fp8": "torch.uint8"}
"""torch dtypes of the optimizer's tensors. uint8 means fp8, as in Megatron-LM's arguments."""

_INEXPRESSIBLE_FIELDS = {"pipeline_layout", "kernel_fusion", "task", "attention"}
"""Fields that have Megatron-LM flags but no simple key in Bridge."""
FUSION_KEYS = (
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)
"""Fusion switches that are fields of Bridge's model providers."""


def overrides(setup: TrainingSetup) -> dict[str, str]:
    """Return overrides as dotted keys and values. The recipe sets the model's shape.

    Raises:
        UnsupportedError: Overrides cannot express the setup.
    """
    packed = PACKING_FIELDS if max_packed_tokens(setup) is not None else set()
    adapted = (
        frozenset() if setup.workload.lora is None else LORA_FIELDS | {"task", "frozen_precision"}
    )
    reject_inexpressible(
        setup,
        tool=TOOL,
        expressed=(EXPRESSED_FIELDS | SHAPE_FIELDS | packed) - _INEXPRESSIBLE_FIELDS | adapted,
        runs="megatron-core",
    )
    w, c, granularity = setup.workload, setup.parallel, setup.recompute.granularity
    if w.loss == "chunked":
        raise UnsupportedError(
            f"{TOOL} does not support training.cross_entropy chunked",
            field="training.cross_entropy",
        )
    if granularity not in ("none", "selective", "full"):
        raise UnsupportedError(
            f"{TOOL} does not support parallel.recompute {granularity}", field="parallel.recompute"
        )
    hidden, chunks = w.overlap or OverlapSpec(), c.virtual_pipeline_parallel_size
    if hidden.context_parallel is not None:
        raise UnsupportedError(
            f"{TOOL} has no switch for training.overlap.context_parallel",
            field="training.overlap.context_parallel",
        )
    implementation, scope = cuda_graph_settings(setup)
    values: Values = {
        "model.tensor_model_parallel_size": c.tensor_parallel_size,
        "model.pipeline_model_parallel_size": c.pipeline_parallel_size,
        "model.virtual_pipeline_model_parallel_size": chunks if chunks > 1 else "null",
        "model.context_parallel_size": c.context_parallel_size,
        "model.sequence_parallel": c.sequence_parallel and c.tensor_parallel_size > 1,
        "model.seq_length": w.sequence_length,
        "model.recompute_granularity": "null" if granularity == "none" else granularity,
        "train.micro_batch_size": c.micro_batch_size,
        "train.global_batch_size": w.global_batch_size,
        **_precision_fields(w),
        "ddp.use_distributed_optimizer": c.zero_stage >= 1,
        # comm_overlap, set here or by Bridge's default, overrides ddp (CommOverlapConfig.setup).
        **{
            f"{section}.{name}": setup.switches[name]
            for section in ("ddp", "comm_overlap")
            for name in ("overlap_grad_reduce", "overlap_param_gather")
        },
        "ddp.grad_reduce_in_fp32": (w.gradient_precision or "fp32") == "fp32",
        "dataset.sequence_length": w.sequence_length,
        "ddp.num_distributed_optimizer_instances": num_shard_groups(setup),
        "comm_overlap.overlap_p2p_comm": False if hidden.pipeline_parallel is False else None,
        **_context_fields(setup),
        **(_expert_fields(setup) if setup.model.num_experts else {}),
        "dist.use_tp_pp_dp_mapping": setup.cluster.rank_order == PIPELINE_BEFORE_DATA or None,
        "model.attention_dropout": w.dropout or None,
        "model.hidden_dropout": w.dropout or None,
        "optimizer.optimizer": w.optimizer if w.optimizer != "adam" else None,
        **_state_fields(w),
        **_adapter_fields(w),
        **_offload_fields(setup),
        "model.cross_entropy_loss_fusion": w.loss != "unfused" or None,
        "model.cross_entropy_fusion_impl": {"in_place": "te", "fused": "native"}.get(w.loss),
        "model.cuda_graph_impl": implementation,
        "model.cuda_graph_scope": scope[0] if scope == ["full_iteration"] else scope,
        **{f"model.{name}": setup.switches.get(name) for name in FUSION_KEYS},
        "comm_overlap.tp_comm_overlap": setup.switches["tp_comm_overlap"],
        "comm_overlap.overlap_moe_expert_parallel_comm": hidden.expert_parallel,
    }
    sharding: Values = {
        "ddp.use_megatron_fsdp": c.zero_stage >= 2 or None,
        "ddp.data_parallel_sharding_strategy": SHARDING.get(c.zero_stage),
    }
    return (
        _hydra_texts(values)
        | _model_fields(recomputation_flags(setup.recompute))
        | _hydra_texts(sharding)
        | _model_fields(end_stage_flags(setup))
    )


def _hydra_texts(values: Values) -> dict[str, str]:
    """Return the values in Hydra's syntax, without those that are None."""

    def hydra_text(value: object) -> str:
        if isinstance(value, list):
            return f"[{','.join(value)}]"
        return str(value).lower() if isinstance(value, bool) else str(value)

    return {name: hydra_text(value) for name, value in values.items() if value is not None}


def _context_fields(setup: TrainingSetup) -> Values:
    """Return the context-parallel communication, and how sequences are packed across its ranks."""
    if setup.parallel.context_parallel_size == 1:
        return {}
    packed = max_packed_tokens(setup)
    return {
        "model.hierarchical_context_parallel_sizes": context_level_sizes(setup),
        "model.cp_comm_type": CONTEXT[setup.strategy.context_parallel_communication][0],
        "model.dynamic_context_parallel": packed is not None or None,
        "model.sequence_packing_scheduler": None if packed is None else "default_dynamic_cp",
        "model.max_seqlen_per_dp_cp_rank": packed,
    }


def _expert_fields(setup: TrainingSetup) -> Values:
    return {
        "model.expert_model_parallel_size": setup.parallel.expert_parallel_size,
        "model.expert_tensor_parallel_size": setup.parallel.expert_tensor_parallel_size,
        "model.moe_token_dispatcher_type": setup.strategy.moe_token_dispatcher_type,
        "model.moe_flex_dispatcher_backend": setup.switches.get("moe_flex_dispatcher_backend"),
        "model.moe_expert_capacity_factor": setup.workload.expert_capacity_factor,
    }


def _offload_fields(setup: TrainingSetup) -> Values:
    share = setup.workload.offload_fraction or 1.0
    if setup.workload.offload == "optimizer":
        return {
            "optimizer.optimizer_cpu_offload": True,
            "optimizer.optimizer_offload_fraction": share,
        }
    if setup.workload.offload == "activations":
        return {
            "model.cpu_offloading": True,
            "model.cpu_offloading_num_layers": num_offloaded_layers(setup),
        }
    return {}


def _precision_fields(w: TrainingWorkload) -> dict[str, str]:
    """Return the named recipe, or its fields if gradients or parameters differ from it.

    The fields override `ddp` before training starts (MixedPrecisionConfig.setup).
    """
    kind = f"{w.precision} {w.fp8_recipe or 'delayed'}" if w.precision == "fp8" else w.precision
    if kind not in _RECIPES:
        raise UnsupportedError(
            f"{TOOL} has no precision recipe for {kind}", field="training.precision"
        )
    name, fields = _RECIPES[kind]
    computed = "fp16" if kind == "fp16" else "bf16"
    if w.parameter_precision not in (None, computed, *(("fp8",) if "fp8" in fields else ())):
        raise UnsupportedError(
            f"{TOOL}'s recipe for {kind} does not store parameters in {w.parameter_precision}",
            field="training.parameter_precision",
        )
    gradients, narrow = w.gradient_precision or "fp32", w.parameter_precision == "fp8"
    if gradients not in ("fp32", computed):
        raise UnsupportedError(
            f"{TOOL} reduces gradients in fp32 or {computed}", field="training.gradient_precision"
        )
    if (narrow, gradients == "fp32") == (
        "fp8" in fields and kind != "fp8 blockwise",
        computed == "bf16",
    ):
        return {"mixed_precision": name}
    dtype = f"{{_target_:{_DTYPES[computed]},_call_:false}}"
    values: Values = {
        "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
        computed: True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "grad_reduce_in_fp32": gradients == "fp32",
        **fields,
        "fp8_param_gather": narrow or None,
        "reuse_grad_buf_for_mxfp8_param_ag": (narrow and kind == "mxfp8") or None,
    }
    return {
        "++mixed_precision": f"{{{','.join(f'{key}:{text}' for key, text in _hydra_texts(values).items())}}}"  # noqa: E501
    }


def _adapter_fields(w: TrainingWorkload) -> Values:
    """Return the recipe's LoRA settings; none for full training."""
    if w.lora is None:
        return {}
    computed = "fp16" if w.precision == "fp16" else "bf16"
    if w.frozen_precision not in (None, computed):
        raise UnsupportedError(
            f"{TOOL} stores frozen weights in {computed}, not {w.frozen_precision}",
            field="training.frozen_precision",
        )
    names = dict.fromkeys(
        ALIASES.get(name, name) for name in w.lora.target_modules or DEFAULT_TARGETS
    )
    if parts := {part for several in PARTS.values() for names_ in several for part in names_} & set(
        names
    ):
        raise UnsupportedError(
            f"{TOOL} puts one LoRA adapter on each fused matrix, and cannot put adapters on "
            f"{', '.join(sorted(parts))}; set training.lora.target_modules to some of "
            f"{', '.join(DEFAULT_TARGETS)}",
            field="training.lora.target_modules",
        )
    return {
        "peft.target_modules": list(names),
        "peft.dim": w.lora.rank,
        "peft.dropout": w.lora.dropout,
    }


def _state_fields(w: TrainingWorkload) -> Values:
    """Return the precision-aware optimizer's settings; none if all optimizer states are fp32."""
    first, second, master, aware = state_precisions(w)
    if not aware:
        return {}
    if master not in ("fp32", "fp16", "remainder"):
        raise UnsupportedError(
            f"{TOOL} has no setting for training.master_precision {master}",
            field="training.master_precision",
        )
    return {
        "optimizer.use_precision_aware_optimizer": True,
        "optimizer.main_params_dtype": _DTYPES["fp16" if master == "fp16" else "fp32"],
        "optimizer.exp_avg_dtype": _DTYPES[first],
        "optimizer.exp_avg_sq_dtype": _DTYPES[second],
        "optimizer.store_param_remainders": master == "remainder",
    }


def _model_fields(values: Values) -> dict[str, str]:
    """Return Megatron-LM's flags as fields of Bridge's model configuration."""
    return {f"model.{field_name(name)}": text for name, text in _hydra_texts(values).items()}


def text(setup: TrainingSetup) -> str:
    """Return one override per line, to append to the command of a recipe's training script."""
    head = f"# {TOOL}: {headline(setup)}; append to your recipe's command."
    return "\n".join((head, *map(shlex.quote, assignments(overrides(setup))), ""))
