"""Check whether candidates are compatible with a training's strategy: context-parallel exchange,
overlap, layout, dispatcher and CUDA graphs.
"""

from typing import Any

from hp_tool.cost.arrays import Ints, maximum
from hp_tool.cost.candidates import (
    ALLGATHER,
    CORE_ATTN,
    DUALPIPE,
    FLEX,
    FULL_UNIFORM,
    MLP,
    MOE,
    ONE_F_ONE_B,
    Candidates,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.domain.graphs import recorded_modules
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.pipeline_layout import PipelineLayout
from hp_tool.domain.result import Reason

CONTEXT_HEADS, EXCHANGE_OVERLAP, LAYOUT, DISPATCHER, GRAPHS = STRATEGY_REASONS = (
    "context_heads_not_divisible",
    "exchange_overlap_not_applicable",
    "layout_not_applicable",
    "dispatcher_not_applicable",
    "cuda_graphs_not_applicable",
)


def find_violations(*, case: TrainingCase, candidates: Candidates) -> tuple[Any, ...]:
    """Return, for each rule of STRATEGY_REASONS, whether it is violated: False, or an array of the
    candidates' shape.
    """
    strategy = case.strategy
    return (
        _has_unequal_exchanged_heads(case.model, candidates, strategy),
        _has_invalid_overlap(candidates) if case.workload.merges_passes else False,
        _has_invalid_layout(strategy.pipeline_layout, candidates)
        if strategy.pipeline_layout is not None
        else False,
        _has_invalid_dispatcher(case, candidates) if case.model.num_experts else False,
        has_invalid_graphs(case, candidates) if case.workload.cuda_graphs else False,
    )


def _has_unequal_exchanged_heads(model: ModelSpec, c: Candidates, strategy: Strategy) -> Any:
    """Return whether ranks would get unequal numbers of heads when context parallelism converts
    sequence sharding to head sharding (Ulysses).

    Checks query and key/value heads. Source: Transformer Engine, context_parallel.py,
    AttnFuncWithCPAndQKVOA2A. If the query omits the levels of a2a+p2p, they are chosen so that
    heads divide evenly.
    """
    kind, levels = (
        strategy.context_parallel_communication,
        strategy.hierarchical_context_parallel_sizes,
    )
    ranks: Ints
    if kind == "a2a":
        ranks = c.context_parallel_size
    elif kind == "a2a+p2p" and levels is not None:
        ranks = maximum(levels[0] * (c.context_parallel_size > 1), 1)
    else:
        return False
    # With fewer key/value heads than tensor-parallel ranks, each rank has one.
    heads, kv = (
        maximum(count // c.tensor_parallel_size, 1)
        for count in (model.num_attention_heads, model.kv_heads)
    )
    return (heads % ranks != 0) | (kv % ranks != 0)


def _has_invalid_overlap(c: Candidates) -> Any:
    """Return whether Megatron Core cannot merge forward and backward passes.

    Merging requires experts on several ranks, and either interleaved 1F1B or no pipeline. It is
    incompatible with recomputation of complete layers or complete MoE blocks
    (transformer_config.py, overlap_moe_expert_parallel_comm). DualPipe always merges passes.
    """
    plain = (c.pipeline_parallel_size == 1) | (c.virtual_pipeline_parallel_size > 1)
    merged = (plain & (c.pipeline_schedule == ONE_F_ONE_B)) | (c.pipeline_schedule >= DUALPIPE)
    merged = merged & (c.expert_parallel_size > 1)
    return (merged == 0) | (c.recompute_method >= FULL_UNIFORM) | _recomputes(c, MOE)


def _recomputes(c: Candidates, modules: int) -> Any:
    return (c.recompute_modules & modules) != 0


def has_invalid_graphs(case: TrainingCase, c: Candidates) -> Any:
    """Return whether Megatron Core rejects the case's CUDA graphs for the candidate.

    Graphs of modules, unlike graphs of complete iterations, are incompatible with recomputation of
    complete layers. Graphs of the router are incompatible with recomputation of the complete MoE
    block. A captured module with dropout cannot be recomputed (transformer_config.py,
    cuda_graph_impl).
    """
    modules = recorded_modules(case.workload, case.model)
    random = 0
    if case.workload.dropout > 0.0:
        random |= CORE_ATTN if modules is None or "attn" in modules else 0
        random |= MLP | MOE if modules is None else MLP if "mlp" in modules else 0
    if modules is None:
        return _recomputes(c, random) if random else False
    return (c.recompute_method >= FULL_UNIFORM) | _recomputes(
        c, random | (MOE if "moe_router" in modules else 0)
    )


def excluded_layouts(case: TrainingCase) -> frozenset[str]:
    """Return the names of the kinds of layouts that merged passes and CUDA graphs exclude.

    If a case excludes at least the kinds that another case excludes, it accepts no layout that the
    other rejects. Source: `_has_invalid_overlap` and `has_invalid_graphs`.
    """
    workload = case.workload
    excluded = {"unmerged", "whole layers", "moe"} if workload.merges_passes else set()
    if workload.cuda_graphs:
        modules = recorded_modules(workload, case.model)
        excluded |= {"random"} if workload.dropout > 0.0 else set()
        excluded |= set() if modules is None else {"whole layers"}
        excluded |= {"moe"} if "moe_router" in (modules or ()) else set()
    return frozenset(excluded)


def _has_invalid_dispatcher(case: TrainingCase, c: Candidates) -> Any:
    """Return whether the candidate cannot use the dispatcher.

    flex requires devices that support it. allgather stores the tokens of every rank and is
    incompatible with merged passes (Megatron Core, transformer_config.py,
    overlap_moe_expert_parallel_comm).
    """
    dispatched = c.expert_parallel_size * c.expert_tensor_parallel_size > 1
    kind = c.moe_token_dispatcher_type
    broken = (kind == FLEX) if not case.cluster.runs_flex_dispatcher else False
    merged = case.workload.merges_passes | (c.pipeline_schedule >= DUALPIPE)
    return dispatched & (broken | ((kind == ALLGATHER) & merged))


def _has_invalid_layout(layout: PipelineLayout, c: Candidates) -> Any:
    """Return whether the number of chunks differs from the layout's p v chunks, or the schedule
    does not support layouts.

    Megatron Core runs layouts under plain and interleaved 1F1B. Multi-token prediction is in the
    last chunk of its rank.
    """
    p, count = c.pipeline_parallel_size, len(layout.chunks)
    broken = (p * c.virtual_pipeline_parallel_size != count) | (c.pipeline_schedule != ONE_F_ONE_B)
    at = next((place for place, chunk in enumerate(layout.chunks) if chunk.mtp_layers), None)
    return broken if at is None else broken | (at < count - p)


def explain_strategy(name: str, *, case: TrainingCase, config: ParallelConfig) -> Reason:
    """Explain a violation of one of STRATEGY_REASONS, with numbers and the fix."""
    model, strategy = case.model, case.strategy
    t = config.tensor_parallel_size
    if name == EXCHANGE_OVERLAP:
        return Reason(
            code=name,
            message="training.overlap.expert_parallel merges the passes of two micro-batches: "
            "choose an expert_parallel_size "
            f"above 1 (here {config.expert_parallel_size}), no recomputation of whole layers or of "
            "moe, and, if pipeline_parallel_size is above 1 "
            f"(here {config.pipeline_parallel_size}), a virtual_pipeline_parallel_size above 1 "
            f"(here {config.virtual_pipeline_parallel_size}); or remove the overlap",
            needed=2,
            available=min(config.expert_parallel_size, config.virtual_pipeline_parallel_size),
        )
    if name == LAYOUT and strategy.pipeline_layout is not None:
        count = len(strategy.pipeline_layout.chunks)
        p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
        return Reason(
            code=name,
            message=f"pipeline_layout has {count} model chunks: choose sizes for which "
            f"pipeline_parallel_size (here {p}) x virtual_pipeline_parallel_size (here {v}) is "
            f"{count}, the schedule 1f1b or interleaved, and place m in the last chunk of its rank",
            needed=count,
            available=p * v,
        )
    if name == DISPATCHER:
        flex = config.moe_token_dispatcher_type == "flex"  # noqa: S105 (a token is no password here)
        why = (
            f"DeepEP and HybridEP do not run on {case.cluster.gpu.name}: they need NVIDIA GPUs "
            "with NVLink, Ampere or later"
            if flex
            else "training.overlap.expert_parallel requires all-to-alls"
        )
        return Reason(
            code=name,
            message=f"moe_token_dispatcher_type {config.moe_token_dispatcher_type}: {why}; choose "
            "alltoall, or remove it",
            needed=1,
            available=0,
        )
    if name == GRAPHS:
        modules = ", ".join(recorded_modules(case.workload, model) or ("whole iterations",))
        return Reason(
            code=name,
            message=f"Megatron Core does not combine CUDA graphs of {modules} with this "
            "recomputation: graphs exclude whole layers, recorded modules with dropout and, if the "
            "router is recorded, moe; set parallel.recompute to none or to other modules, or "
            "training.cuda_graphs to false",
            needed=1,
            available=0,
        )
    kind, levels = (
        strategy.context_parallel_communication,
        strategy.hierarchical_context_parallel_sizes,
    )
    ranks = levels[0] if kind != "a2a" and levels is not None else config.context_parallel_size
    heads, kv = (max(count // t, 1) for count in (model.num_attention_heads, model.kv_heads))
    return Reason(
        code=name,
        message=f"context_parallel_communication {kind} divides the heads of a tensor-parallel "
        f"rank ({heads} query and {kv} key/value heads) over {ranks} context-parallel ranks; "
        "choose a context_parallel_size that divides both numbers, a smaller tensor_parallel_size, "
        "or context_parallel_communication p2p",
        needed=ranks,
        available=kv,
    )
