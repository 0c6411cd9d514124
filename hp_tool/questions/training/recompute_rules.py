"""Check that the framework and the model support the recomputation of a training query."""

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Recompute, RecomputeModule
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def first_case(*cases: tuple[object, str]) -> str | None:
    """Return the text of the first case whose condition is true; None if there is none."""
    return next((name for holds, name in cases if holds), None)


def reject_first_case(
    field: str,
    *cases: tuple[object, str],
    error: type[InputError] = InputError,
    code: str | None = None,
) -> None:
    """Raise `error` with the message of the first case whose condition is true."""
    if message := first_case(*cases):
        raise error(message, field=field, code=code)


def check_recompute(spec: Recompute, model: ModelSpec, workload: TrainingWorkload) -> None:
    field, kind = "parallel.recompute", spec.granularity
    selective, full = (
        "recompute.modules requires granularity selective",
        "recompute.method and num_layers require granularity full",
    )
    reject_first_case(
        f"{field}.modules",
        (spec.modules is not None and kind != "selective", f"{selective}, not {kind}"),
    )
    sets_layers = spec.method is not None or spec.num_layers is not None
    reject_first_case(f"{field}.method", (sets_layers and kind != "full", f"{full}, not {kind}"))
    if spec.granularity == "per_op":
        _check_per_op(model, workload, field=field)
    if spec.modules is not None:
        _check_modules(spec.modules, model, workload, field=f"{field}.modules")


PER_OP_FRAMEWORKS = ("torch-fsdp", "torchtitan")
"""Frameworks that support torchtitan's per-operation selective activation checkpointing."""


def _check_per_op(model: ModelSpec, workload: TrainingWorkload, *, field: str) -> None:
    """Check per_op recomputation. It requires that the order of operations is known, as in Llama's
    layers.
    """
    if workload.framework not in PER_OP_FRAMEWORKS:
        raise UnsupportedError(
            f"recompute per_op requires torch-fsdp, not {workload.framework}; choose "
            "none, selective or full",
            field=field,
        )
    if what := first_case(
        (
            model.architecture != "decoder" or not (model.gated_mlp and model.is_uniform),
            "models unlike Llama-like decoders",
        ),
        (model.num_experts is not None, "MoE models"),
        (model.kv_lora_rank is not None, "latent attention"),
        (workload.attention != "flash", f"attention {workload.attention}"),
        (workload.precision not in ("bf16", "fp16", "fp32"), f"precision {workload.precision}"),
        (workload.lora is not None or workload.task == "lora", "LoRA"),
    ):
        raise UnsupportedError(
            f"recompute per_op is not supported for {what}; choose none or per_layer", field=field
        )


def _check_modules(
    modules: tuple[RecomputeModule, ...],
    model: ModelSpec,
    workload: TrainingWorkload,
    *,
    field: str,
) -> None:
    """Check that the model has each module. Megatron Core silently ignores some missing modules."""
    reject_first_case(
        field,
        (not modules, "recompute.modules is an empty list; name modules, or choose recompute none"),
    )
    if set(modules) == {"core_attn"}:
        return
    framework = workload.framework
    reject_first_case(
        field,
        (
            training_engine(framework) != "megatron-core",
            f"recompute.modules requires Megatron Core, not {framework}; choose none, selective or "
            "full",
        ),
        (
            model.architecture == "encoder_decoder",
            "recompute.modules is not supported for encoder-decoder models; remove it",
        ),
        (
            workload.lora is not None,
            "recompute.modules other than core_attn are not supported with lora; remove them",
        ),
        error=UnsupportedError,
    )
    if workload.precision == "fp8" and workload.fp8_recipe == "delayed":
        unsupported = sorted({"layernorm", "moe_act"}.intersection(modules))
        reject_first_case(
            field,
            (
                unsupported,
                f"Megatron Core does not recompute {' and '.join(unsupported)} under fp8_recipe "
                "delayed; remove these modules, or choose another fp8_recipe",
            ),
        )
    dense = any(
        kind.feed_forward != "none" and kind.moe_layers < count for count, kind in model.kinds
    )
    missing: dict[RecomputeModule, tuple[bool, str]] = {
        "mlp": (dense, "a layer with a dense MLP"),
        "moe": (model.num_experts is not None, "a model with experts"),
        "moe_act": (model.num_experts is not None, "a model with experts"),
        "shared_experts": (model.num_shared_experts > 0, "a model with shared experts"),
        "mla_up_proj": (model.kv_lora_rank is not None, "a model with latent attention"),
    }
    for name, (exists, requirement) in missing.items():
        reject_first_case(
            field,
            (
                name in modules and not exists,
                f"recompute.modules {name} requires {requirement}; remove it",
            ),
        )
