"""From a query's `parallel` to what is the same for all candidates: rank order, and how each kind of communication works."""

from __future__ import annotations

import dataclasses
import re

from hp_tool.cost.network import checked_order
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery, Strategy, TokenDispatcher
from hp_tool.domain.pipeline_layout import FIELD as LAYOUT_FIELD
from hp_tool.domain.pipeline_layout import PipelineLayout, check_layout, parse_layout
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError, UnsupportedError

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
