"""What the two blocks of a layer (attention, MLP) report; a layer is their sum."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hp_tool.cost.arrays import BoolArray, Column, FloatArray, IntArray, maximum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.roofline import is_narrow, quantized_bytes
from hp_tool.domain.frameworks import FrameworkFacts, facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


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


# Sliding-window attention: a query of a windowed layer sees the last w keys alone (arXiv 2004.05150).


def windowed_length(model: ModelSpec, length: float) -> float:
    """Keys that fused attention computes for a token of a sequence of `length`, mean over layers, before the causal half.

    A causal layer's query at place i sees min(i, w) keys: s w - w^2 / 2 scores a sequence, so w (2 - w / s) a token where full
    attention has s. A bidirectional one sees w. With `sliding_window_layers` of L the mean is weighted. Ring exchange of
    keys and values between context-parallel ranks, and unfused attention, which computes the scores it masks, stay whole.
    """
    window = model.sliding_window
    if window is None or window >= length:
        return length
    seen = window * (2.0 - window / length) if model.architecture == "decoder" else float(window)
    layers = model.num_hidden_layers
    share = 1.0 if model.sliding_window_layers is None else model.sliding_window_layers / layers
    return share * seen + (1.0 - share) * length


# Sizes that every block of a layer needs, worked out once per kind of candidate.
#
# Letters: T = s b / c tokens a rank sees, t tensor-parallel size, h hidden, e bytes an element.


LAYER_AXES = (
    "tensor_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
)
"""What everything inside a layer depends on, where ranks of a layer are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Per kind of candidate, shape (k,) or numbers of one alone, and a few scalars."""

    t: IntArray
    tokens: FloatArray
    attended: FloatArray | float
    """Scores that fused attention computes for each token, before the causal half: s, less where rows are packed or
    layers have a sliding window."""
    sharded: BoolArray
    """Sequence parallelism on."""
    shards: FloatArray
    """Ranks that share the work between the tensor-parallel regions: t with sequence parallelism, else 1."""
    h: float
    e: float
    mask: float
    """Bytes of a dropout mask element, 0 without dropout."""
    saved_input: float
    """Bytes an element of a matmul input kept for the weight gradient: quantised with its scales below 16 bits, else e."""
    facts: FrameworkFacts
    """What the framework keeps."""


def spreading_axes(cluster: ClusterSpec) -> tuple[str, ...]:
    """What it depends on beside LAYER_AXES in the cluster's rank order: dimensions inside of tp, cp and ep spread their
    groups over nodes.
    """
    order = cluster.rank_order.split("-")
    last = max(order.index(name) for name in ("tp", "cp", "ep"))
    sizes = {"dp": "data_parallel_size", "pp": "pipeline_parallel_size"}
    return tuple(sizes[name] for name in order[:last] if name in sizes)


def activation_element_bytes(workload: TrainingWorkload) -> float:
    """16-bit activations; 4 bytes where training.precision is fp32."""
    return 4.0 if workload.precision == "fp32" else 2.0


def shapes(*, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates) -> Shapes:
    """The sizes of each candidate."""
    t = candidates.tensor_parallel_size
    sharded = candidates.sequence_parallel > 0
    e = activation_element_bytes(workload)
    return Shapes(
        t=t,
        tokens=workload.sequence_length * candidates.micro_batch_size / candidates.context_parallel_size,
        attended=windowed_length(model, workload.computed_attention_length),
        sharded=sharded,
        shards=where(sharded, t, 1.0),
        h=float(model.hidden_size),
        e=e,
        mask=1.0 if workload.dropout > 0.0 else 0.0,
        facts=facts(workload.framework),
        saved_input=quantized_bytes(workload) if is_narrow(workload) else e,
    )
