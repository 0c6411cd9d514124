"""The weight matrices of a layer on one rank, by Megatron Core's module names: what adapters attach to and Muon turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hp_tool.cost.arrays import Column, maximum
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = W x on one rank; shape (n,) or numbers."""

    module: str
    """linear_qkv, linear_proj, router, ...; of dense MLPs, routed and shared experts alike linear_fc1 and linear_fc2."""
    outputs: tuple[Column, ...]
    """Rows, by the parts that are fused: queries, keys, values; gate and up."""
    inputs: Column
    """Columns."""
    source: str
    """The tensor it multiplies: matrices of the same source keep it together."""
    split: Column
    """Ranks among which this matrix is divided: by rows, or of linear_proj and linear_fc2 by columns."""
    count: Column = 1.0
    """How many of its kind: local experts."""
    routed: bool = False
    """A routed expert's."""

    @property
    def row_parallel(self) -> bool:
        """Divided by columns; its input is divided likewise, its output a sum over the ranks."""
        return self.module in ("linear_proj", "linear_fc2")

    @property
    def parameters(self) -> Column:
        """Of all its kind."""
        return self.count * sum(self.outputs) * self.inputs


def layer_linears(model: ModelSpec, candidates: Candidates, *, moe: bool = False) -> Iterator[Linear]:
    """All matrices of one layer; with fewer key/value heads than ranks each rank keeps one whole head (Megatron Core)."""
    t = candidates.tensor_parallel_size
    yield from _attention(model, t)
    width = float(model.ffn_size)
    if moe:
        width = float(model.moe_intermediate_size or model.ffn_size)
        experts, etp = float(model.num_experts or 0), candidates.expert_tensor_parallel_size
        yield Linear(module="router", outputs=(experts,), inputs=float(model.hidden_size), source="mlp_input", split=1)
        local = experts / candidates.expert_parallel_size
        yield from _mlp(model, width, etp, count=local, routed=True)
        width = float(model.shared_expert_size)
    if width:
        yield from _mlp(model, width, t)


def _attention(model: ModelSpec, t: Column) -> Iterator[Linear]:
    h, heads, d = float(model.hidden_size), model.num_attention_heads / t, float(model.head_size)
    if model.kv_lora_rank is None:
        key = d * maximum(model.kv_heads / t, 1.0)
        yield Linear(module="linear_qkv", outputs=(heads * d, key, key), inputs=h, source="attention_input", split=t)
        yield Linear(module="linear_proj", outputs=(h,), inputs=heads * d, source="core", split=t)
        return
    rank, nope, rope = float(model.kv_lora_rank), float(model.qk_nope_head_dim or 0), float(model.qk_rope_head_dim or 0)
    value = float(model.v_head_dim or model.head_size)
    if model.q_lora_rank is None:
        yield Linear(module="linear_q_proj", outputs=(heads * (nope + rope),), inputs=h, source="attention_input", split=t)
    else:
        latent = float(model.q_lora_rank)
        yield Linear(module="linear_q_down_proj", outputs=(latent,), inputs=h, source="attention_input", split=1)
        yield Linear(module="linear_q_up_proj", outputs=(heads * (nope + rope),), inputs=latent, source="q_latent", split=t)
    yield Linear(module="linear_kv_down_proj", outputs=(rank + rope,), inputs=h, source="attention_input", split=1)
    yield Linear(module="linear_kv_up_proj", outputs=(heads * (nope + value),), inputs=rank, source="kv_latent", split=t)
    yield Linear(module="linear_proj", outputs=(h,), inputs=heads * value, source="core", split=t)


def _mlp(model: ModelSpec, width: float, split: Column, *, count: Column = 1.0, routed: bool = False) -> Iterator[Linear]:
    h, local = float(model.hidden_size), width / split
    kind: dict[str, Any] = {"split": split, "count": count, "routed": routed}
    outputs = (local, local) if model.gated_mlp else (local,)
    sources = ("routed_input", "routed_activation") if routed else ("mlp_input", "activation")
    yield Linear(module="linear_fc1", outputs=outputs, inputs=h, source=sources[0], **kind)
    yield Linear(module="linear_fc2", outputs=(h,), inputs=local, source=sources[1], **kind)


def layer_matrix_parameters(model: ModelSpec, candidates: Candidates, *, moe: bool = False) -> Column:
    """Entries of one layer's weight matrices besides routed experts' on one rank."""
    return sum(linear.parameters for linear in layer_linears(model, candidates, moe=moe) if not linear.routed)
