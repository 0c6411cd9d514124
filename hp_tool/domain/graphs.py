"""Parts of a training step that CUDA graphs capture, and combinations that Megatron Core
rejects.
"""

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.releases import GRAPHS_BESIDE_MERGED_PASSES, LATEST, is_at_least
from hp_tool.domain.workload import GraphModule, TrainingWorkload

ITERATIONS_SINCE = {"container": (26, 6), "core": (0, 18)}
"""Releases from which recipes capture whole iterations even for dropless MoE models, and from which
a captured iteration may offload activations (transformer_config.py).
"""
MODULES_WITHOUT_EXPERTS: tuple[GraphModule, ...] = ("attn", "moe_router", "moe_preprocess")


def recorded_modules(
    workload: TrainingWorkload, model: ModelSpec
) -> tuple[GraphModule, ...] | None:
    """Return the modules that CUDA graphs capture by default; None for the whole iteration.

    Before ITERATIONS_SINCE, kernels of dropless experts are not captured, because their shapes
    depend on the tokens.
    """
    named = workload.cuda_graph_modules
    if (
        named
        or not workload.cuda_graphs
        or not model.num_experts
        or workload.expert_capacity_factor is not None
    ):
        return named
    return (
        None
        if is_at_least(workload.framework_version or LATEST, since=ITERATIONS_SINCE)
        else MODULES_WITHOUT_EXPERTS
    )


def recording_error(workload: TrainingWorkload, model: ModelSpec) -> str | None:
    """Return an error message with a fix if Megatron Core rejects these CUDA graphs, else None.

    Source: TransformerConfig of releases 0.16 to 0.19 (transformer_config.py, cuda_graph_impl). The
    rules about recomputation are in `cost.strategy_legality`.
    """
    if not workload.cuda_graphs:
        return None
    release = workload.framework_version or LATEST
    modules = recorded_modules(workload, model)
    named = set(modules or ())
    dense = any(
        kind.feed_forward != "none" and kind.moe_layers < count for count, kind in model.kinds
    )
    if workload.merges_passes:
        if modules is None and not is_at_least(release, since=GRAPHS_BESIDE_MERGED_PASSES):
            return (
                "Megatron Core does not record whole iterations with "
                "training.overlap.expert_parallel "
                "before release 0.18 (NeMo "
                "26.06); set training.cuda_graph_modules to [attn, moe_router, moe_preprocess], or "
                "cuda_graphs to false"
            )
        if "mlp" in named:
            return (
                "Megatron Core does not record mlp under training.overlap.expert_parallel; remove "
                "mlp from training.cuda_graph_modules"
            )
    if workload.offload == "activations" and (
        modules or not is_at_least(release, since=ITERATIONS_SINCE)
    ):
        return (
            "Megatron Core does not record CUDA graphs with offloaded activations, except whole "
            "iterations since release 0.18 "
            "(NeMo 26.06); set training.cuda_graphs to false, or training.offload to none"
        )
    if not model.num_experts and named & {"moe_router", "moe_preprocess"}:
        return (
            f"{model.name} has no experts; remove moe_router and moe_preprocess from "
            "training.cuda_graph_modules"
        )
    if "moe_preprocess" in named and "moe_router" not in named:
        return (
            "Megatron Core records moe_preprocess only with moe_router; add moe_router to "
            "training.cuda_graph_modules"
        )
    if "mlp" in named and not dense:
        return (
            f"every layer of {model.name} has experts instead of an MLP; remove mlp from "
            "training.cuda_graph_modules"
        )
    return None
