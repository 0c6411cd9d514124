"""Rules for the recomputation that a training supports."""

from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Recompute, RecomputeModule
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError


def first_case(*cases: tuple[object, str]) -> str | None:
    """Return the name of the first case that applies."""
    return next((name for holds, name in cases if holds), None)


def reject_first_case(
    field: str,
    *cases: tuple[object, str],
    error: type[InputError] = InputError,
    code: str | None = None,
) -> None:
    """Raise `error` with the message of the first case that applies."""
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
    layered = spec.method is not None or spec.num_layers is not None
    reject_first_case(f"{field}.method", (layered and kind != "full", f"{full}, not {kind}"))
    if spec.granularity == "per_op":
        _check_per_op(model, workload, field=field)
    if spec.modules is not None:
        _check_modules(spec.modules, model, workload, field=f"{field}.modules")


PER_OP_FRAMEWORKS = ("torch-fsdp", "torchtitan")
"""Frameworks with torchtitan's selective checkpointing by operation."""


def _check_per_op(model: ModelSpec, workload: TrainingWorkload, *, field: str) -> None:
    """Check the model: the order of operations is known only for Llama's blocks."""
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
        (model.num_experts is not None, "mixtures of experts"),
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
    """Check that each module exists in the model; Megatron Core silently ignores some missing
    ones.
    """
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
            f"recompute.modules are Megatron Core's, not {framework}'s; choose none, selective or "
            "full",
        ),
        (
            model.architecture == "encoder_decoder",
            "recompute.modules of encoder-decoder models are not modelled",
        ),
        (
            workload.lora is not None,
            "recompute.modules other than core_attn are not modelled under lora",
        ),
        error=UnsupportedError,
    )
    if workload.precision == "fp8" and workload.fp8_recipe == "delayed":
        again = sorted({"layernorm", "moe_act"}.intersection(modules))
        reject_first_case(
            field,
            (
                again,
                f"Megatron Core does not recompute {' and '.join(again)} under fp8_recipe "
                "delayed; remove one of them",
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
    for name, (there, wanted) in missing.items():
        reject_first_case(
            field,
            (
                name in modules and not there,
                f"recompute.modules {name} needs {wanted}; remove it",
            ),
        )
