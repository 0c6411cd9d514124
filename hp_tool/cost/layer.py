"""One transformer layer on one rank for one micro-batch: seconds forward and backward, and bytes kept in between.

Letters: T = s b / c tokens a rank sees, t tensor-parallel size, a heads of width d, k key/value heads, h hidden,
f MLP width, e bytes an element. The accounting of bytes is arXiv 2205.05198 section 4, of collectives its section 4.2,
generalised to GQA, gated MLPs and fused attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_tool.cost.candidates import Candidates, FloatArray, IntArray
from hp_tool.cost.communication import tensor_ring
from hp_tool.cost.compute import additive_seconds, elementwise_seconds, matmul_seconds, peak_flops
from hp_tool.cost.elementwise import maximum, minimum, where
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

ACTIVATION_BYTES = 2.0
"""16-bit activations; 4 where training.precision is fp32."""


LAYER_AXES = ("tensor_parallel_size", "context_parallel_size", "micro_batch_size", "sequence_parallel")
"""What everything here depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds per layer and micro-batch; arrays of shape (n,). Exposed means: not hidden behind compute."""

    forward: FloatArray
    """Compute of the forward pass."""
    backward: FloatArray
    attention_core: FloatArray
    """Part of `forward` that selective recomputation repeats."""
    forward_communication: FloatArray
    """Exposed tensor-parallel collectives of the forward pass."""
    backward_communication: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes per layer and micro-batch; arrays of shape (n,)."""

    saved: FloatArray
    """Kept for the backward pass without recomputation."""
    saved_selective: FloatArray
    """Kept when the attention core is recomputed."""
    saved_full: FloatArray
    """Kept when the whole layer is recomputed: its input."""
    attention_core: FloatArray
    """What selective recomputation brings back for one layer at a time."""
    backward_working: FloatArray
    """Gradients and gathered inputs alive at the worst moment of one layer's backward pass."""


def activation_element_bytes(workload: TrainingWorkload) -> float:
    return 4.0 if workload.precision == "fp32" else ACTIVATION_BYTES


def _shapes(model: ModelSpec, workload: TrainingWorkload, c: Candidates) -> tuple[IntArray, FloatArray, FloatArray]:
    """(t, T, number of ranks that share the norm and dropout work)."""
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    return t, tokens, where(c.sequence_parallel > 0, t, 1.0)


def layer_bytes(*, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates) -> LayerBytes:
    """Activation bytes. For a plain GPT with dropout and unfused attention these are the paper's formulas to the byte:
    sbh(34+5as/h) alone, sbh(10+24/t+5as/(ht)) under TP, sbh(34+5as/h)/t with SP, 34sbh/t with selective
    recomputation, 2sbh for full recomputation. With sequence parallelism the layer's input, and so what full
    recomputation keeps, is itself sharded: 2sbh/t (Megatron Core).
    """
    t, tokens, shards = _shapes(model, workload, candidates)
    e = activation_element_bytes(workload)
    mask = 1.0 if workload.dropout > 0.0 else 0.0
    h = model.hidden_size
    query = model.num_attention_heads * model.head_size / t
    key_value = model.head_size * maximum(model.kv_heads / t, 1.0)
    hidden = model.ffn_size / t
    gates = 2.0 if model.gated_mlp else 1.0

    # Inputs of two norms and of two column-parallel matmuls, and two dropout masks: whole, or sharded by SP.
    replicated = tokens * h * (4.0 * e + 2.0 * mask) / shards
    # Rotated queries and keys are new tensors, while the values, a view, keep the whole QKV projection's output.
    rotated = query + key_value if model.positions == "rotary" else 0.0
    # Q, K, V and the attention output; the MLP's pre-activation(s) and activation: always split by TP.
    split = tokens * e * (2.0 * query + 2.0 * key_value + rotated + (gates + 1.0) * hidden)
    core = attention_core_bytes(model=model, workload=workload, candidates=candidates)
    linear = replicated + split

    gathered = where(candidates.sequence_parallel > 0, 2.0 * tokens * h * e, 0.0)
    mlp_gradients = tokens * e * (gates + 1.0) * hidden + tokens * h * e
    return LayerBytes(
        saved=linear + core,
        saved_selective=linear,
        saved_full=e * tokens * h / shards,
        attention_core=core,
        backward_working=gathered + mlp_gradients,
    )


def attention_core_bytes(*, model: ModelSpec, workload: TrainingWorkload, candidates: Candidates) -> FloatArray:
    """What attention keeps besides queries, keys, values and its output, and selective recomputation does not.

    Fused: the fp32 log-sum-exp from which the backward pass rebuilds the scores, 4asb/t. Unfused: 5as^2b/t with dropout
    (softmax, mask, dropped softmax), 2as^2b/t without.
    """
    t, tokens, _ = _shapes(model, workload, candidates)
    heads = model.num_attention_heads / t
    if workload.attention == "flash":
        return 4.0 * tokens * heads
    e = activation_element_bytes(workload)
    per_score = 2.0 * e + 1.0 if workload.dropout > 0.0 else e
    return tokens * workload.sequence_length * heads * per_score


def layer_time(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> LayerTime:
    """Seconds of one layer. Matmuls run three times (forward, input gradient, weight gradient)."""
    t, tokens, shards = _shapes(model, workload, candidates)
    gpu, e = cluster.gpu, activation_element_bytes(workload)
    mask = 1.0 if workload.dropout > 0.0 else 0.0
    h = float(model.hidden_size)
    query = model.num_attention_heads * model.head_size / t
    key_value = model.head_size * maximum(model.kv_heads / t, 1.0)
    hidden = model.ffn_size / t
    gates = 2.0 if model.gated_mlp else 1.0

    # Outputs n and inputs k of the four weight matrices: QKV, attention output, MLP up, MLP down.
    matrices = ((query + 2.0 * key_value, h), (h, query), (gates * hidden, h), (h, hidden))
    matmul: dict[str, Any] = {"gpu": gpu, "profile": profile, "precision": workload.precision}
    matmul_forward = sum(matmul_seconds(tokens, n, k, **matmul) for n, k in matrices)
    # Weight gradients are added to an fp32 buffer: one read and one write of 4 bytes.
    weight_gradient = sum(matmul_seconds(n, k, tokens, output_bytes=8.0, **matmul) for n, k in matrices)

    core_forward, core_backward = _attention_seconds(
        model=model, cluster=cluster, workload=workload, profile=profile, candidates=candidates
    )
    # Forward: two norms (read, write), two residual additions (two reads, write, mask); then the activation function
    # and, with rotary positions, one pass over queries and keys.
    rotary = 2.0 * e * (query + key_value) if model.positions == "rotary" else 0.0
    forward_traffic = tokens * (h * (10.0 * e + 2.0 * mask) / shards + (gates + 1.0) * e * hidden + rotary)
    # Backward: norms read gradient and input and write; residual gradients are added; the activation reads and writes.
    backward_traffic = tokens * (h * (16.0 * e + 2.0 * mask) / shards + (2.0 * gates + 1.0) * e * hidden + rotary)
    elementwise = elementwise_seconds(forward_traffic, kernels=7.0, gpu=gpu, profile=profile)
    elementwise_backward = elementwise_seconds(backward_traffic, kernels=10.0, gpu=gpu, profile=profile)

    # Tensor parallelism. Forward: one all-reduce for attention and one for the MLP, or with SP an all-gather and a
    # reduce-scatter each (the same bytes). Backward without SP: the two all-reduces, behind the weight-gradient matmuls.
    # Backward with SP: gradients are gathered first, which nothing hides; the sharded inputs are gathered once more,
    # wholly behind the input-gradient matmuls where those are longer (arXiv 2205.05198 section 4.2.2); input gradients
    # are reduce-scattered behind the weight-gradient matmuls.
    tensor_group = tensor_ring(group_size=candidates.tensor_parallel_size, cluster=cluster, profile=profile)
    wire = tokens * h * e * (t - 1.0) / t
    gather = 2.0 * tensor_group.seconds(wire)
    all_reduce = 2.0 * tensor_group.seconds(2.0 * wire)
    sharded = candidates.sequence_parallel > 0
    overlap = profile.framework.tensor_parallel_overlap
    exposed = all_reduce - overlap * minimum(all_reduce, weight_gradient)
    exposed_sharded = 3.0 * gather - minimum(gather, matmul_forward) - overlap * minimum(gather, weight_gradient)
    return LayerTime(
        forward=matmul_forward + core_forward + elementwise,
        backward=matmul_forward + weight_gradient + core_backward + elementwise_backward,
        attention_core=core_forward,
        forward_communication=where(sharded, 2.0 * gather, all_reduce),
        backward_communication=where(sharded, exposed_sharded, exposed),
    )


def _attention_seconds(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> tuple[FloatArray, FloatArray]:
    """(forward, backward) seconds of scores, softmax, dropout and the product with the values."""
    t, tokens, _ = _shapes(model, workload, candidates)
    gpu, e, s = cluster.gpu, activation_element_bytes(workload), float(workload.sequence_length)
    heads = model.num_attention_heads / t
    d = float(model.head_size)
    if workload.attention == "flash":
        visible = 0.5 if model.architecture == "decoder" else 1.0
        flops = 4.0 * tokens * s * heads * d * visible
        traffic = tokens * e * d * (2.0 * heads + 2.0 * maximum(model.kv_heads / t, 1.0))
        # Attention stays in 16 bits where the matmuls are narrower.
        peak = peak_flops(gpu, precision=workload.precision if workload.precision in ("fp16", "fp32") else "bf16")
        forward = additive_seconds(flops, traffic, profile.gpu.attention, gpu=gpu, peak=peak)
        # Five matmuls in the backward pass against two in the forward pass.
        backward = 2.5 * forward * profile.framework.attention_backward_slowdown
        return forward, backward
    # Unfused: two batched matmuls over all s^2 scores, and kernels that pass over the scores in memory.
    batch = tokens / s * heads
    mask = 1.0 if workload.dropout > 0.0 else 0.0
    scores = tokens * s * heads
    matmuls = matmul_seconds(s, s, d, gpu=gpu, profile=profile, precision=workload.precision, batch=batch)
    matmuls = matmuls + matmul_seconds(s, d, s, gpu=gpu, profile=profile, precision=workload.precision, batch=batch)
    # Softmax reads and writes; dropout reads, writes and stores its mask. Backward softmax reads two, writes one.
    softmax = elementwise_seconds(scores * (2.0 * e + mask * (2.0 * e + 1.0)), kernels=2.0, gpu=gpu, profile=profile)
    softmax_backward = elementwise_seconds(scores * (3.0 * e + mask * (2.0 * e + 1.0)), kernels=2.0, gpu=gpu, profile=profile)
    return matmuls + softmax, 2.0 * matmuls + softmax_backward
