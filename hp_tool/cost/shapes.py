"""Sizes that every block of a layer needs, worked out once per kind of candidate.

Letters: T = s b / c tokens a rank sees, t tensor-parallel size, h hidden, e bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import BoolArray, FloatArray, IntArray, where
from hp_tool.cost.lowprecision import is_narrow, quantized_bytes
from hp_tool.cost.window import windowed_length
from hp_tool.domain.frameworks import FrameworkFacts, facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

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
