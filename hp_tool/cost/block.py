"""Time and memory of the blocks of a layer (attention, MLP), and the sizes from which they are
computed.

Symbols are defined in docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.arrays import Bools, Floats, Ints, maximum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.network import Ring, tensor_ring
from hp_tool.cost.precision import is_narrow, quantized_bytes
from hp_tool.domain.frameworks import FrameworkFacts, framework_facts
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Number of elementwise kernels that a block launches for one micro-batch, forward and
    backward.
    """

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds of a block per layer and micro-batch on one rank; shape (k,) or a scalar."""

    matmul: Floats
    """Weight matmuls of the forward pass. The input gradients take the same time."""
    weight_gradient: Floats
    core: Floats = 0.0
    """Attention core of the forward pass; selective recomputation runs it again."""
    core_backward: Floats = 0.0
    elementwise: Floats
    elementwise_backward: Floats
    context: Floats = 0.0
    """Exposed context-parallel communication of the forward pass."""
    context_backward: Floats = 0.0
    expert: Floats = 0.0
    """Exposed expert-parallel communication of the forward pass."""
    expert_backward: Floats = 0.0

    def __add__(self, other: BlockTime) -> BlockTime:
        return BlockTime(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBytes:
    """Bytes of a block per layer and micro-batch on one rank; shape (k,) or a scalar."""

    saved: Floats
    """Bytes saved for the backward pass, excluding the attention core."""
    core: Floats = 0.0
    """Bytes saved by the attention core. Tensors that stay saved even if the core is recomputed
    count in `saved`.
    """
    norm_output: Floats = 0.0
    """Part of `saved` that is freed if layernorm is recomputed. Each field below is the same for
    another module.
    """
    mlp: Floats = 0.0
    moe: Floats = 0.0
    """Includes `expert_activations` and `shared_experts`."""
    expert_activations: Floats = 0.0
    shared_experts: Floats = 0.0
    up_projected: Floats = 0.0
    """Queries, keys and values of latent attention."""
    working: Floats
    """Gradients and gathered inputs at the peak of the backward pass."""

    def __add__(self, other: BlockBytes) -> BlockBytes:
        # The blocks' backward passes run in sequence, so their working sets do not add up.
        working = maximum(self.working, other.working)
        return BlockBytes(
            saved=self.saved + other.saved, core=self.core + other.core, working=working
        )


NO_TIME, NO_BYTES = (
    BlockTime(matmul=0.0, weight_gradient=0.0, elementwise=0.0, elementwise_backward=0.0),
    BlockBytes(saved=0.0, working=0.0),
)
"""Results for a missing block. Some layers have only one block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of a layer per micro-batch; shape (n,). Communication fields count only exposed
    seconds.
    """

    forward: Floats
    """Compute of the forward pass, including the attention core."""
    backward: Floats
    attention: Floats
    """Part of `forward` spent in the attention core: scores, softmax and the product with the
    values.
    """
    attention_backward: Floats
    weight_gradient: Floats
    """Part of `backward` that computes weight gradients. It can be delayed."""
    repeated: Floats
    """Seconds that selective recomputation adds, for the attention core or the named modules."""
    tensor: Floats
    """Tensor-parallel collectives of the forward pass."""
    tensor_backward: Floats
    context: Floats
    context_backward: Floats
    expert: Floats
    expert_backward: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of a layer per micro-batch; shape (n,)."""

    saved: Floats
    """Bytes saved for the backward pass without recomputation."""
    saved_selective: Floats
    """Bytes saved if the attention core or the named modules are recomputed."""
    waiting: Floats
    """Bytes that stay saved for delayed weight gradients, which are computed after the rest of the
    backward pass.
    """
    saved_full: Floats
    """Bytes saved with full recomputation of the layer: the layer's input."""
    repeated: Floats
    """Bytes that selective recomputation restores at once: those of one block of one layer."""
    backward_working: Floats
    """Gradients and gathered inputs at the peak of one layer's backward pass."""


def unfused_bytes(*, s: Shapes, split: Floats, bias: bool) -> Floats:
    """Return the additional bytes that a block's forward pass moves if bias and dropout run as
    separate kernels.

    The bias kernels read and write the `split` elements per token of the matmuls with a bias. The
    block's output is read and written once more for its `bias` and once more for dropout. The
    backward passes are separate kernels in both cases.
    """
    return 2.0 * s.e * s.tokens * (split + (float(bias) + s.mask) * s.h / s.shards)


# Eager PyTorch: each operation reads its inputs from memory and writes its result. Bytes per
# element in addition to those of one fused kernel, counted in MistralRMSNorm, apply_rotary_pos_emb
# and MistralMLP of huggingface/transformers (src/transformers/models/mistral/modeling_mistral.py)
# and in their derivatives (pytorch/pytorch, tools/autograd/derivatives.yaml), for 16 bits.
EAGER_NORM = (32.0, 78.0)
"""Additional bytes per element of an eager RMSNorm, forward and backward. Its operations: cast to
fp32, square, mean, product, cast to 16 bits, weight.
"""
EAGER_ROTARY = (16.0, 22.0)
"""Additional bytes per element of eager rotary embedding of queries and keys, forward and backward.
Its operations: negate half, concatenate, two products, sum.
"""
EAGER_GATE = (4.0, 8.0)
"""Additional bytes per element of a gated MLP's intermediate width, forward and backward. The
activation and its product with the other half of the input are separate kernels.
"""
EAGER_LAUNCHES = {"norm": (5.0, 9.0), "rotary": (9.0, 13.0), "gate": (1.0, 2.0)}
"""(forward, backward) kernels in addition to the fused ones. The rotary embeddings of queries and
keys count as one operation.
"""


def has_eager_norm(model: ModelSpec) -> bool:
    """Return True if eager PyTorch runs the model's norms one operator at a time (RMSNorm).
    LayerNorm is a single kernel.
    """
    return model.normalization == "rmsnorm"


def eager_norm_traffic(model: ModelSpec, s: Shapes) -> tuple[Floats, Floats]:
    """Return the (forward, backward) bytes that one eager norm moves in addition to those of a
    fused norm.
    """
    hidden = has_eager_norm(model) * s.tokens * s.h / s.shards
    return EAGER_NORM[0] * hidden, EAGER_NORM[1] * hidden


def eager_launches(model: ModelSpec) -> tuple[float, float]:
    """Return the (forward, backward) kernels that an eager dense layer launches in addition to
    those of a fused one.
    """
    counts = {
        "norm": 2.0 * has_eager_norm(model),
        "rotary": 1.0 * (model.positions == "rotary"),
        "gate": 1.0 * model.gated_mlp,
    }
    forward, backward = (
        sum(count * EAGER_LAUNCHES[name][side] for name, count in counts.items()) for side in (0, 1)
    )
    return forward, backward


# Sliding-window attention: a query of a windowed layer attends only to the last w keys (arXiv
# 2004.05150).


def windowed_length(model: ModelSpec, length: float) -> float:
    """Return the number of keys per token that fused attention processes in a sequence of `length`,
    before the causal mask halves it.

    A query at position i of a causal layer attends to min(i, w) keys, so a sequence has s w - w^2 /
    2 scores. Before masking, this is equivalent to w (2 - w / s) per token instead of s. A query of
    a bidirectional layer attends to w keys. The result is the mean over all L layers, of which
    `sliding_window_layers` have a window. Windows reduce neither the ring exchange of context
    parallelism nor the time of unfused attention, which also computes masked scores.
    """
    window = model.sliding_window
    if window is None or window >= length:
        return length
    seen = seen_keys(window, length) if model.architecture == "decoder" else float(window)
    layers = model.num_hidden_layers
    share = 1.0 if model.sliding_window_layers is None else model.sliding_window_layers / layers
    return share * seen + (1.0 - share) * length


def seen_keys(most: float, length: float) -> float:
    """Return W (2 - W / s): the mean number of keys per token, before the causal mask halves it, if
    tokens attend to at most `most` = W keys.

    These are the last W keys, or W selected keys.
    """
    return most * (2.0 - most / length) if most < length else length


# Sizes that every block of a layer uses, computed once per kind of candidate.


LAYER_AXES = (
    "tensor_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "moe_token_dispatcher_type",
)
"""Candidate fields that determine the costs of a layer if the ranks of a tensor-parallel group are
adjacent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Sizes of a layer for each of k combinations of its axes; shape (k,), or plain numbers."""

    t: Ints
    tokens: Floats
    attended: Floats
    """Number of scores per token that fused attention computes, before the causal mask halves it.
    This is s, or less with packed rows or sliding windows.
    """
    sharded: Bools
    """Whether sequence parallelism is enabled."""
    shards: Floats
    """Number of ranks that split the work between tensor-parallel regions: t with sequence
    parallelism, else 1.
    """
    h: float
    e: float
    mask: float
    """Bytes of a dropout mask element; 0 without dropout."""
    saved_input: float
    """Bytes per element of a saved matmul input: e, or the bytes of a quantised element with its
    scales for precisions below 16 bits.
    """
    activation_input: float
    """Bytes per element of the activation function's input."""
    product: float
    """Bytes per element that a dense MLP saves for the input of its last matmul."""
    tensor: Ring
    """Ring collectives of the tensor-parallel group."""
    gather_s: Floats
    """Seconds of an all-gather or reduce-scatter of the hidden states over the tensor-parallel
    group.
    """
    input_gather_s: Floats
    """Seconds of an all-gather of the hidden states as matmul inputs. For precisions below 16 bits,
    they are quantised before sending.
    """
    all_reduce_s: Floats
    """Seconds of an all-reduce of the hidden states over the tensor-parallel group."""
    facts: FrameworkFacts
    """How the framework uses memory."""


def further_axes(case: TrainingCase) -> tuple[str, ...]:
    """Return the candidate fields besides LAYER_AXES on which a layer's costs depend.

    In the cluster's rank order, the dimensions inside tp, cp and ep spread these groups across
    nodes. If adapters widen the residual stream, its width depends on sharding
    (`lora.residual_bytes`).
    """
    order = case.cluster.rank_order.split("-")
    last = max(order.index(name) for name in ("tp", "cp", "ep"))
    sizes = {"dp": "data_parallel_size", "pp": "pipeline_parallel_size"}
    spreading = [sizes[name] for name in order[:last] if name in sizes]
    workload = case.workload
    if (
        workload.lora is not None
        and framework_facts(workload.framework).wide_residual_with_adapters
    ):
        spreading += ["zero_stage", "data_parallel_size"]
    return tuple(dict.fromkeys(spreading))


def shapes(
    *,
    case: TrainingCase,
    candidates: Candidates,
    tokens: Floats | None = None,
    attended: Floats | None = None,
) -> Shapes:
    """Return the sizes of a layer for each candidate. `tokens` and `attended` default to those of
    the workload.
    """
    model, workload = case.model, case.workload
    t = candidates.tensor_parallel_size
    sharded = candidates.sequence_parallel > 0
    e, h = workload.activation_element_bytes, float(model.hidden_size)
    if tokens is None:
        tokens = (
            workload.sequence_length
            * candidates.micro_batch_size
            / candidates.context_parallel_size
        )
    tensor = tensor_ring(case=case, candidates=candidates)
    wire = tokens * h * e * (t - 1.0) / t
    saved_input, gather_s = e, tensor.seconds(wire)
    input_gather_s = gather_s
    if is_narrow(workload):
        saved_input = quantized_bytes(workload)
        input_gather_s = tensor.seconds(wire * saved_input / e)
    return Shapes(
        t=t,
        tokens=tokens,
        attended=windowed_length(model, workload.computed_attention_length)
        if attended is None
        else attended,
        sharded=sharded,
        shards=where(sharded, t, 1.0),
        h=h,
        e=e,
        mask=1.0 if workload.dropout > 0.0 else 0.0,
        activation_input=workload.activation_input_bytes,
        product=0.0 if workload.gated_product == "recomputed" else saved_input,
        tensor=tensor,
        gather_s=gather_s,
        input_gather_s=input_gather_s,
        all_reduce_s=tensor.seconds(2.0 * wire),
        facts=framework_facts(workload.framework),
        saved_input=saved_input,
    )
