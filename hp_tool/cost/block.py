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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds per layer and micro-batch; arrays of shape (n,). Communication is the exposed part."""

    forward: Column
    """Compute of the forward pass."""
    backward: Column
    weight_gradient: Column
    """Part of `backward` that may run later than the rest."""
    repeated: Column
    """What selective recomputation runs again: of `forward` the attention core, or what the named modules take."""
    tensor: Column
    """Tensor-parallel collectives of the forward pass."""
    tensor_backward: Column
    context: Column
    context_backward: Column
    expert: Column
    expert_backward: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes per layer and micro-batch; arrays of shape (n,), or (2, n) where the pipeline's ends have different layers."""

    saved: Column
    """Kept for the backward pass without recomputation."""
    saved_selective: Column
    """Kept when the attention core, or the named modules, are recomputed."""
    waiting: Column
    """Kept for the weight gradients when the rest of the backward pass is over."""
    saved_full: Column
    """Kept when the whole layer is recomputed: its input."""
    repeated: Column
    """What selective recomputation brings back at a time: one block's worth of one layer."""
    backward_working: Column
    """Gradients and gathered inputs alive at the worst moment of one layer's backward pass."""
