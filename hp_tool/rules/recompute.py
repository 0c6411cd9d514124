"""What a query may say about recomputation: refused by name is what would mean nothing, or is not modelled."""

from __future__ import annotations

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Recompute, RecomputeModule
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError

MAX_RECOMPUTE_LAYERS = 10_000
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
    if spec.num_layers is not None and not 1 <= spec.num_layers <= MAX_RECOMPUTE_LAYERS:
        raise InputError(
            f"recompute.num_layers must be from 1 to {MAX_RECOMPUTE_LAYERS}, got {spec.num_layers}", field=f"{FIELD}.num_layers"
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
