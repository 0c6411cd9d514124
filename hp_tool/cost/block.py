"""What the two blocks of a layer (attention, MLP) report; a layer is their sum."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hp_tool.cost.elementwise import Column, maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds per layer and micro-batch on one rank; shape (k,) or a scalar."""

    matmul: Column
    """Weight matmuls of the forward pass; the input gradients take as long again."""
    weight_gradient: Column
    core: Column = 0.0
    """Attention core, forward: what selective recomputation repeats."""
    core_backward: Column = 0.0
    elementwise: Column
    elementwise_backward: Column
    context: Column = 0.0
    """Exposed context-parallel communication, forward."""
    context_backward: Column = 0.0
    expert: Column = 0.0
    """Exposed expert-parallel communication, forward."""
    expert_backward: Column = 0.0

    def __add__(self, other: BlockTime) -> BlockTime:
        return BlockTime(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes per layer and micro-batch on one rank; shape (k,) or a scalar."""

    saved: Column
    """Kept for the backward pass besides the attention core."""
    core: Column = 0.0
    """Kept by unfused attention: the scores."""
    norm_output: Column = 0.0
    """Part of `saved` that recomputing the module layernorm does not keep; the same below for other modules."""
    mlp: Column = 0.0
    moe: Column = 0.0
    """expert_activations and shared_experts are parts of it."""
    expert_activations: Column = 0.0
    shared_experts: Column = 0.0
    up_projected: Column = 0.0
    """Of latent attention: queries, keys and values."""
    working: Column
    """Gradients and gathered inputs alive at the worst moment of the backward pass."""

    def __add__(self, other: BlockBytes) -> BlockBytes:
        # The blocks' backward passes run one after the other: their working sets do not add up.
        working = maximum(self.working, other.working)
        return BlockBytes(saved=self.saved + other.saved, core=self.core + other.core, working=working)
