"""Rules that follow from what a query says for all of its candidates: how context ranks communicate, what hides all-to-alls."""

from __future__ import annotations

from typing import Any

from hp_tool.cost.candidates import FULL_UNIFORM, ONE_F_ONE_B, Candidates
from hp_tool.cost.elementwise import Column, maximum
from hp_tool.cost.exchange_overlap import merges_passes
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Strategy
from hp_tool.domain.pipeline_layout import PipelineLayout
from hp_tool.domain.result import Reason
from hp_tool.domain.workload import TrainingWorkload

CONTEXT_HEADS, EXCHANGE_OVERLAP, LAYOUT = STRATEGY_REASONS = (
    "context_heads_not_divisible",
    "exchange_overlap_not_applicable",
    "layout_not_applicable",
)


def strategy_broken(
    *, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, strategy: Strategy
) -> tuple[Any, ...]:
    """Whether each of STRATEGY_REASONS is broken: False, or arrays of the candidates' shape."""
    return (
        _exchanged_heads_broken(model, candidates, strategy),
        _overlap_broken(candidates) if merges_passes(workload) else False,
        _layout_broken(strategy.pipeline_layout, candidates) if strategy.pipeline_layout is not None else False,
    )


def _exchanged_heads_broken(model: ModelSpec, c: Candidates, strategy: Strategy) -> Any:
    """Ranks that exchange a sequence's shards for heads each want as many query and key/value heads (Transformer Engine,
    context_parallel.py, AttnFuncWithCPAndQKVOA2A). Levels of a2a+p2p that no query names are chosen so that they do.
    """
    kind, levels = strategy.context_parallel_communication, strategy.hierarchical_context_parallel_sizes
    ranks: Column
    if kind == "a2a":
        ranks = c.context_parallel_size
    elif kind == "a2a+p2p" and levels is not None:
        ranks = maximum(levels[0] * (c.context_parallel_size > 1), 1)
    else:
        return False
    # Fewer key/value heads than tensor-parallel ranks: each keeps one.
    heads, kv = (maximum(count // c.tensor_parallel_size, 1) for count in (model.num_attention_heads, model.kv_heads))
    return (heads % ranks != 0) | (kv % ranks != 0)


def _overlap_broken(c: Candidates) -> Any:
    """Megatron Core merges passes with experts on several ranks, interleaved 1F1B or no pipeline, and no full recomputation
    (transformer_config.py, overlap_moe_expert_parallel_comm).
    """
    plain = (c.pipeline_parallel_size == 1) | (c.virtual_pipeline_parallel_size > 1)
    merged = plain & (c.pipeline_schedule == ONE_F_ONE_B) & (c.expert_parallel_size > 1)
    return (merged == 0) | (c.recompute_method >= FULL_UNIFORM)


def _layout_broken(layout: PipelineLayout, c: Candidates) -> Any:
    """A layout fixes p v. Megatron Core runs it under 1F1B and its interleaving, and wants multi-token prediction in the last
    chunk of its rank.
    """
    p, count = c.pipeline_parallel_size, len(layout.chunks)
    broken = (p * c.virtual_pipeline_parallel_size != count) | (c.pipeline_schedule != ONE_F_ONE_B)
    at = next((place for place, chunk in enumerate(layout.chunks) if chunk.mtp_layers), None)
    return broken if at is None else broken | (at < count - p)


def explain_strategy(name: str, *, model: ModelSpec, config: ParallelConfig, strategy: Strategy) -> Reason:
    """One of STRATEGY_REASONS with numbers and the mend."""
    t = config.tensor_parallel_size
    if name == EXCHANGE_OVERLAP:
        return Reason(
            code=name,
            message="training.overlap.expert_parallel merges the passes of two micro-batches: choose an expert_parallel_size "
            f"above 1 (here {config.expert_parallel_size}), no full recomputation, and with a pipeline_parallel_size above 1 "
            f"(here {config.pipeline_parallel_size}) interleaving, so a virtual_pipeline_parallel_size above 1 (here "
            f"{config.virtual_pipeline_parallel_size}); or leave the overlap out",
            needed=2,
            available=min(config.expert_parallel_size, config.virtual_pipeline_parallel_size),
        )
    if name == LAYOUT and strategy.pipeline_layout is not None:
        count = len(strategy.pipeline_layout.chunks)
        p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
        return Reason(
            code=name,
            message=f"pipeline_layout has {count} model chunks: choose a pipeline_parallel_size (here {p}) that times "
            f"virtual_pipeline_parallel_size (here {v}) is {count}, the schedule 1f1b or interleaved, and m in the last chunk "
            "of its rank",
            needed=count,
            available=p * v,
        )
    kind, levels = strategy.context_parallel_communication, strategy.hierarchical_context_parallel_sizes
    ranks = levels[0] if kind != "a2a" and levels is not None else config.context_parallel_size
    heads, kv = (max(count // t, 1) for count in (model.num_attention_heads, model.kv_heads))
    return Reason(
        code=name,
        message=f"context_parallel_communication {kind} gives {ranks} context ranks heads of their own, and a tensor-parallel "
        f"rank has {heads} query and {kv} key/value heads; choose a context_parallel_size that divides both, a smaller "
        "tensor_parallel_size, or context_parallel_communication p2p",
        needed=ranks,
        available=kv,
    )
