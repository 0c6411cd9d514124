"""torchtitan's selective recomputation per operation (recompute per_op): what it keeps of a Llama block and runs again.

Of a block it keeps the input and the outputs of attention, of every second matmul (queries, values, the MLP's gate and down
projection) and of reduce-scatters; all else runs again before the block's backward pass, gathers of tensor parallelism too.
Source: torchtitan 0.2, distributed/activation_checkpoint.py (_apply_op_sac) and models/llama3/infra/parallelize.py.
"""

from __future__ import annotations

from hp_tool.cost.attention import core_bytes
from hp_tool.cost.block import BlockTime
from hp_tool.cost.compute import weight_matmuls
from hp_tool.cost.elementwise import Column, maximum
from hp_tool.cost.shapes import Shapes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def per_op_bytes(*, model: ModelSpec, workload: TrainingWorkload, s: Shapes) -> Column:
    """Bytes a layer and micro-batch: e T (h/r + a d + k d + a d + f + h + 2 h / t where SP is on) + the fp32 log-sum-exp, with
    a query and k key/value heads of d and an MLP of f on the rank, and the layer's input divided over the r ranks of SP.

    The down projection's output is kept before its reduce-scatter, so whole; those of the two reduce-scatters divided.
    """
    heads, kv_heads, hidden = _on_rank(model, s)
    width = s.h / s.shards + (2.0 * heads + kv_heads) * model.head_size + hidden + s.h + s.sharded * 2.0 * s.h / s.t
    return s.e * s.tokens * width + core_bytes(workload=workload, s=s, heads=heads)


def per_op_seconds(
    *,
    model: ModelSpec,
    workload: TrainingWorkload,
    gpu: GpuSpec,
    profile: EfficiencyProfile,
    s: Shapes,
    attention: BlockTime,
    second: BlockTime,
    region: Column,
) -> Column:
    """Seconds a layer and micro-batch: the matmuls for keys, the output projection and the MLP's other half, all elementwise
    kernels, and one of the two collectives around each block (`region` is both of one block).
    """
    heads, kv_heads, hidden = _on_rank(model, s)
    again = [(kv_heads * model.head_size, s.h), (s.h, heads * model.head_size), (hidden, s.h)]
    matmul, _ = weight_matmuls(s.tokens, again, gpu=gpu, profile=profile, precision=workload.precision)
    return matmul + attention.elementwise + second.elementwise + region


def per_op_matrices(model: ModelSpec) -> float:
    """Entries of one layer's matrices that multiply again."""
    width = (model.num_attention_heads + model.kv_heads) * model.head_size
    return float(model.hidden_size * (width + model.ffn_size))


def _on_rank(model: ModelSpec, s: Shapes) -> tuple[Column, Column, Column]:
    """(query heads, key/value heads, MLP width) of one tensor-parallel rank."""
    return model.num_attention_heads / s.t, maximum(model.kv_heads / s.t, 1.0), model.ffn_size / s.t
