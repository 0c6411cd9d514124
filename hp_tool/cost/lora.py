"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen weights: parameters, saved tensors and time of one layer.

y = W x + B A x with A of rank x inputs and B of outputs x rank; W has no gradient. Laid out as Megatron Bridge's
ParallelLinearAdapter: of a column-parallel W both A (by rank) and B (by outputs) are split by rows; of a row-parallel one
A by columns and B by rows, so that B's outputs are gathered. Adapters run in 16 bits, and the local experts of a rank
share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.cost.arrays import Column
from hp_tool.cost.block import BlockBytes, BlockTime, Shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.collectives import tensor_ring
from hp_tool.cost.matrices import Linear, layer_linears
from hp_tool.cost.moe import routed_tokens
from hp_tool.cost.parameters import moe_layers
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls, wide_precision
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import LoraSpec, TrainingWorkload

ALIASES = {
    "o_proj": "linear_proj",
    "down_proj": "linear_fc2",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
"""Hugging Face's names of whole matrices, by Megatron Core's."""
PARTS = {
    "linear_qkv": (("q_proj", "linear_q"), ("k_proj", "linear_k"), ("v_proj", "linear_v")),
    "linear_q_proj": (("q_proj",),),
    "linear_fc1": (("gate_proj", "linear_fc1_gate"), ("up_proj", "linear_fc1_up")),
}
"""Names of the parts of fused matrices: Hugging Face's, and Megatron Bridge's canonical LoRA's."""
DEFAULT_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One pair A and B on one rank."""

    linear: Linear
    rows: Column
    """Outputs of W on this rank: those of the part it belongs to."""
    rank: float

    @property
    def matrices(self) -> tuple[tuple[Column, Column], tuple[Column, Column]]:
        """(rows, columns) of A and of B on this rank."""
        split = self.linear.split
        if self.linear.row_parallel:
            return (self.rank, self.linear.inputs), (self.rows / split, self.rank)
        return (self.rank / split, self.linear.inputs), (self.rows, self.rank)

    @property
    def parameters(self) -> Column:
        """r (k + n) / t of a matrix with k inputs and n outputs in all."""
        return sum(rows * columns for rows, columns in self.matrices)


def adapters(linear: Linear, lora: LoraSpec) -> Iterator[Adapter]:
    """The adapters that the targets name: one of a whole matrix, or one for each named part of it."""
    targets = {ALIASES.get(name, name) for name in lora.target_modules or DEFAULT_TARGETS}
    rank = float(lora.rank)
    if linear.module in targets:
        yield Adapter(linear=linear, rows=sum(linear.outputs), rank=rank)
        return
    names = PARTS.get(linear.module, ())
    for aliases, rows in zip(names[-len(linear.outputs) :], linear.outputs, strict=False):
        if targets.intersection(aliases):
            yield Adapter(linear=linear, rows=rows, rank=rank)


def target_names(model: ModelSpec, candidates: Candidates, *, moe: bool) -> set[str]:
    """Every name that a query may give for a matrix of this model."""
    modules = {linear.module: linear for linear in layer_linears(model, candidates, moe=moe) if linear.module != "router"}
    aliases = {alias for alias, module in ALIASES.items() if module in modules}
    parts = (PARTS[name][-len(linear.outputs) :] for name, linear in modules.items() if name in PARTS)
    return set(modules) | aliases | {name for several in parts for names in several for name in names}


def layer_adapter_parameters(model: ModelSpec, lora: LoraSpec, candidates: Candidates, *, moe: bool, routed: bool) -> Column:
    """Of one layer on one rank: the routed experts', or all others'."""
    linears = (linear for linear in layer_linears(model, candidates, moe=moe) if linear.routed == routed)
    return sum((one.parameters for linear in linears for one in adapters(linear, lora)), 0.0)


def token_adapter_parameters(model: ModelSpec, lora: LoraSpec) -> float:
    """Adapter parameters of the whole model that one token passes: the experts' once for each expert it is sent to."""
    alone = Candidates.alone(ParallelConfig())

    def layer(*, moe: bool, routed: bool) -> float:
        return float(layer_adapter_parameters(model, lora, alone, moe=moe, routed=routed))

    sparse = moe_layers(model)
    dense = (model.num_hidden_layers - sparse) * layer(moe=False, routed=False)
    if not sparse:
        return dense
    each = layer(moe=True, routed=False) + (model.num_experts_per_tok or 1) * layer(moe=True, routed=True)
    return dense + sparse * each


def with_adapter_bytes(
    block: BlockBytes, *, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates, s: Shapes, moe: bool
) -> BlockBytes:
    """The layer's saved bytes when only adapters are trained. A frozen matrix keeps no input (torch and Transformer Engine
    save it for the weight gradient alone); one with adapters keeps it in 16 bits for A, whole where sequence parallelism
    gathers it first, and A's output for B. What attention or the activation function keeps anyway is counted there.
    """
    assert workload.lora is not None
    routed = routed_tokens(model, workload, candidates, s) if moe else 0.0
    saved = block.saved
    sources: dict[str, bool] = {}
    for linear in layer_linears(model, candidates, moe=moe):
        tokens = routed if linear.routed else s.tokens
        attached = list(adapters(linear, workload.lora))
        if linear.source not in sources:
            saved = saved - _kept_input(linear, tokens, s, moe=moe)
        if attached and not sources.get(linear.source) and linear.source != "core":
            saved = saved + tokens * linear.inputs * s.e
        sources[linear.source] = sources.get(linear.source, False) or bool(attached)
        saved = saved + len(attached) * tokens * workload.lora.rank * s.e
    return replace(block, saved=saved)


def _kept_input(linear: Linear, tokens: Column, s: Shapes, *, moe: bool) -> Column:
    """Bytes that training all weights keeps of a matrix's input, as attention_bytes, mlp_bytes and expert_bytes count it."""
    whole = tokens * linear.inputs
    if linear.source in ("activation", "routed_input", "routed_activation"):
        return whole * s.saved_input
    if linear.source == "core":
        return whole * s.saved_input * (s.saved_input < s.e)
    return whole * (s.e if moe and linear.source == "mlp_input" else s.saved_input) / s.shards


def with_adapter_time(
    block: BlockTime,
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    s: Shapes,
    moe: bool,
) -> BlockTime:
    """The layer's seconds when only adapters are trained: no weight gradients but theirs, their matmuls, and the sums of
    both paths (forward reads two and writes one output; backward the same for the input's gradient).
    """
    assert workload.lora is not None
    routed = routed_tokens(model, workload, candidates, s) if moe else 0.0
    machine: dict[str, Any] = {"gpu": cluster.gpu, "profile": profile}
    matmul, gradient, forward, backward = block.matmul, 0.0, block.elementwise, block.elementwise_backward
    for linear in layer_linears(model, candidates, moe=moe):
        tokens = routed if linear.routed else s.tokens
        for one in adapters(linear, workload.lora):
            both, both_gradient = weight_matmuls(tokens, one.matrices, precision=wide_precision(workload), **machine)
            matmul, gradient = matmul + both, gradient + both_gradient
            forward = forward + elementwise_seconds(3.0 * s.e * tokens * one.rows, kernels=2.0, **machine)
            backward = backward + elementwise_seconds(3.0 * s.e * tokens * linear.inputs, kernels=2.0, **machine)
    return replace(block, matmul=matmul, weight_gradient=gradient, elementwise=forward, elementwise_backward=backward)


def adapter_tensor_seconds(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    candidates: Candidates,
    s: Shapes,
    moe: bool,
) -> tuple[Column, Column]:
    """(forward, backward) seconds of the adapters' tensor-parallel collectives, none hidden; routed experts' not counted.

    A's output is gathered (column-parallel) or all-reduced (row-parallel), and its gradient likewise; B's output of a
    row-parallel matrix is gathered, with sequence parallelism its gradient too. Gathered inputs are the base layer's own.
    """
    assert workload.lora is not None
    group = tensor_ring(candidates=candidates, cluster=cluster, profile=profile)
    away = s.tokens * s.e * (s.t - 1.0) / s.t
    forward: Column = 0.0
    backward: Column = 0.0
    for linear in layer_linears(model, candidates, moe=moe):
        for one in adapters(linear, workload.lora) if not linear.routed else ():
            inner = group.seconds(away * one.rank * (2.0 if linear.row_parallel else 1.0))
            outer = group.seconds(away * one.rows) if linear.row_parallel else 0.0
            forward, backward = forward + inner + outer, backward + inner + outer * s.sharded
    return forward, backward
