"""Encoder-decoder models (T5) as one stack: the mean layer of encoder and decoder, and
cross-attention.

These models have no pipeline parallelism: Megatron Core removed encoder pipelines, and its
schedules support only decoders or encoders. The encoder has training.sequence_length tokens per
row, the decoder decoder_sequence_length.
"""

from dataclasses import fields, replace
from typing import Any, TypeVar

from hp_tool.cost.arrays import Floats, maximum, minimum, where
from hp_tool.cost.attention import core_bytes, core_seconds
from hp_tool.cost.block import (
    BlockBytes,
    BlockTime,
    LayerBytes,
    LayerTime,
    Shapes,
    shapes,
    unfused_bytes,
)
from hp_tool.cost.candidates import FULL_BLOCK, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime, head_time
from hp_tool.cost.layer import as_layer_time, layer_bytes, layer_time
from hp_tool.cost.matrices import attention_matrices, kv_heads, mlp_matrices, query_heads
from hp_tool.cost.matrix import entries
from hp_tool.cost.precision import cast_traffic
from hp_tool.cost.roofline import elementwise_seconds, weight_matmuls
from hp_tool.domain.frameworks import fuses_kernels
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload

Columns = TypeVar("Columns", LayerBytes, LayerTime)


def decoder_length(workload: TrainingWorkload) -> int:
    """Return the number of decoder tokens per row."""
    return workload.decoder_sequence_length or workload.sequence_length


def decoder_case(case: TrainingCase) -> TrainingCase:
    """Return the case for the decoder, the output layer and the loss. Its rows have the decoder's
    length.
    """
    return replace(
        case, workload=replace(case.workload, sequence_length=decoder_length(case.workload))
    )


def _encoder_tokens_per_decoder_token(case: TrainingCase) -> float:
    """Return r = s_e / s_d, the encoder tokens per decoder token."""
    return case.workload.sequence_length / decoder_length(case.workload)


def counted_candidates(model: ModelSpec, candidates: Candidates) -> Candidates:
    """Return the candidates with recompute_num_layers converted to a count over the whole stack.

    `full block` recomputes that many leading layers of the encoder and of the decoder.
    """
    count, decoder = candidates.recompute_num_layers, model.decoder_layers
    both = minimum(count, decoder) + minimum(count, model.total_layers - decoder)
    counted: Any = where(candidates.recompute_method == FULL_BLOCK, both, count)
    return replace(candidates, recompute_num_layers=counted)


def mean_layer_bytes(*, case: TrainingCase, candidates: Candidates) -> LayerBytes:
    """Return the activation bytes of the stack's mean layer.

    Tensors that are saved only once are distributed over the layers: the dropout mask after the
    encoder's embedding, the input of the encoder's final norm, and the encoder's output, from which
    every decoder layer computes keys and values.
    """
    model = case.model
    encoder_layer = layer_bytes(case=case, candidates=candidates)
    s = shapes(case=case, candidates=candidates)
    once = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards / model.total_layers
    mean = _mean(model, encoder_layer, decoder_layer_bytes(case=case, candidates=candidates))
    return replace(
        mean,
        saved=mean.saved + once,
        saved_selective=mean.saved_selective + once,
        saved_full=mean.saved_full + once,
    )


def decoder_layer_bytes(*, case: TrainingCase, candidates: Candidates) -> LayerBytes:
    """Return the activation bytes of one decoder layer: attention, MLP and cross-attention.

    Excludes the encoder's output.
    """
    decoder = decoder_case(case)
    layer = layer_bytes(case=decoder, candidates=candidates)
    s = shapes(case=decoder, candidates=candidates)
    cross = cross_bytes(case=decoder, s=s, ratio=_encoder_tokens_per_decoder_token(case))
    return replace(
        layer,
        saved=layer.saved + cross.saved + cross.core,
        saved_selective=layer.saved_selective + cross.saved,
        waiting=layer.waiting + cross.saved,
        repeated=layer.repeated + cross.core,
        backward_working=maximum(layer.backward_working, cross.working),
    )


def mean_layer_time(*, case: TrainingCase, candidates: Candidates) -> LayerTime:
    """Return the time of the stack's mean layer, in seconds.

    Encoder layers have bidirectional attention, decoder layers causal attention and
    cross-attention.
    """
    decoder, ratio = decoder_case(case), _encoder_tokens_per_decoder_token(case)
    one_stack, other_stack = (
        replace(case.model, architecture=side) for side in ("encoder", "decoder")
    )
    encoder_layer = layer_time(case=replace(case, model=one_stack), candidates=candidates)
    encoder_or_decoder = layer_time(case=replace(decoder, model=other_stack), candidates=candidates)
    s = shapes(case=decoder, candidates=candidates)
    block = cross_time(case=decoder, s=s, ratio=ratio)
    cross = as_layer_time(block, case=case, s=s, regions=1.0)
    read, read_backward = memory_read_seconds(case=case, s=s, block=block, ratio=ratio)
    cross = replace(
        cross, tensor=cross.tensor + read, tensor_backward=cross.tensor_backward + read_backward
    )
    decoder_layer = LayerTime(
        **{
            f.name: getattr(encoder_or_decoder, f.name) + getattr(cross, f.name)
            for f in fields(LayerTime)
        }
    )
    return _mean(case.model, encoder_layer, decoder_layer)


def ends_time(*, case: TrainingCase, candidates: Candidates) -> HeadTime:
    """Return the time in seconds of both embeddings, and of the decoder's output layer and loss."""
    ends = head_time(case=decoder_case(case), candidates=candidates)
    return replace(ends, embedding=ends.embedding * (1.0 + _encoder_tokens_per_decoder_token(case)))


def row_flops(
    model: ModelSpec, workload: TrainingWorkload, *, causal: float
) -> tuple[float, float]:
    """Return the forward FLOPs of one row, encoder and decoder: (projections and MLPs, attention
    cores).

    `causal` is the fraction of the decoder's self-attention scores that the FLOP convention counts.
    """
    encoder_tokens, decoder_tokens = (
        float(workload.sequence_length),
        float(decoder_length(workload)),
    )
    matrices = 2.0 * float(entries(attention_matrices(model)) + entries(mlp_matrices(model)))
    scores = 4.0 * model.num_attention_heads * model.head_size
    projections, read = cross_flops(
        model, decoder_tokens=decoder_tokens, encoder_tokens=encoder_tokens
    )
    encoder, decoder = model.total_layers - model.decoder_layers, model.decoder_layers
    return (
        encoder * matrices * encoder_tokens + decoder * (matrices * decoder_tokens + projections),
        encoder * scores * encoder_tokens**2
        + decoder * (scores * decoder_tokens**2 * causal + read),
    )


def _mean(model: ModelSpec, encoder: Columns, decoder: Columns) -> Columns:
    share = model.decoder_layers / model.total_layers
    columns = {
        f.name: (getattr(encoder, f.name), getattr(decoder, f.name)) for f in fields(encoder)
    }
    return type(encoder)(
        **{name: (1.0 - share) * one + share * other for name, (one, other) in columns.items()}
    )


# Cross-attention: each layer of a decoder reads the encoder's output (arXiv 1910.10683, Megatron
# Core's T5).
#
# Queries are computed from the decoder's T = s_d b / c tokens, keys and values from the encoder's
# r T, where r = s_e / s_d.


def cross_bytes(*, case: TrainingCase, s: Shapes, ratio: float) -> BlockBytes:
    """Return the activation bytes of one cross-attention block.

    The block saves the norm input, the input of the query projection and the dropout mask (sharded
    by sequence parallelism, else replicated), queries and the core's output (split by heads), and
    keys and values of the encoder's r T tokens. The encoder's output, which all layers share, is
    excluded.
    """
    model = case.model
    qk, v = model.qk_head_size, model.v_head_size
    heads, keys = query_heads(model, s.t), kv_heads(model, s.t)
    replicated = s.tokens * s.h * (s.e + s.saved_input + s.mask) / s.shards
    split = s.tokens * s.e * (heads * (qk + v) + ratio * keys * (qk + v))
    if s.saved_input < s.e:  # As in self-attention.
        split = split + s.tokens * s.saved_input * heads * v
    gathered = s.tokens * s.h * s.e * (1.0 + ratio) * where(s.sharded, 2.0, 1.0)
    return BlockBytes(
        saved=replicated + split,
        core=core_bytes(workload=case.workload, s=s, heads=heads, keys_per_query=ratio),
        working=gathered + split,
    )


def cross_time(*, case: TrainingCase, s: Shapes, ratio: float) -> BlockTime:
    """Return the time of one cross-attention block, in seconds.

    There is no causal mask. Norm, residual and dropout are as in self-attention.
    """
    model, workload = case.model, case.workload
    precision = workload.precision
    fused, output = attention_matrices(model, tensor=s.t)
    queries, keys, values = fused.outputs
    own, read = [(queries, s.h), output.shape], [(keys + values, s.h)]
    forward, gradient = weight_matmuls(s.tokens, own, case=case, precision=precision)
    forward_read, gradient_read = weight_matmuls(
        ratio * s.tokens, read, case=case, precision=precision
    )
    core, core_backward = core_seconds(case=case, s=s, keys_per_query=ratio, causal=False)
    cast, cast_backward = cast_traffic(workload, own)
    cast_read, cast_read_backward = cast_traffic(workload, read)
    traffic = s.tokens * (s.h * (5.0 * s.e + s.mask) / s.shards + cast + ratio * cast_read)
    traffic_backward = s.tokens * (
        s.h * (8.0 * s.e + s.mask) / s.shards + cast_backward + ratio * cast_read_backward
    )
    if not fuses_kernels(workload):
        traffic = traffic + unfused_bytes(s=s, split=0.0, bias=model.has_attention_output_bias)
    return BlockTime(
        matmul=forward + forward_read,
        weight_gradient=gradient + gradient_read,
        core=core,
        core_backward=core_backward,
        elementwise=elementwise_seconds(traffic, machine=case, kernels=3.0),
        elementwise_backward=elementwise_seconds(traffic_backward, machine=case, kernels=5.0),
    )


def memory_read_seconds(
    *, case: TrainingCase, s: Shapes, block: BlockTime, ratio: float
) -> tuple[Floats, Floats]:
    """Return the exposed (forward, backward) seconds of the tensor-parallel collectives of the
    encoder's output.

    The encoder's output is the input of the key/value projection. With sequence parallelism, it is
    all-gathered in both passes and its gradient is reduce-scattered. Without, the gradient is
    all-reduced. In the backward pass, these collectives overlap with the weight-gradient matmuls,
    which hide the framework's overlap fraction of their time.
    """
    gather = s.tensor.seconds(ratio * s.tokens * s.h * s.e * (s.t - 1.0) / s.t)
    backward = where(
        s.sharded,
        2.0 * gather,
        s.tensor.seconds(2.0 * ratio * s.tokens * s.h * s.e * (s.t - 1.0) / s.t),
    )
    hidden = case.profile.framework.tensor_parallel_overlap * minimum(
        backward, block.weight_gradient
    )
    return where(s.sharded, gather, 0.0), backward - hidden


def cross_flops(
    model: ModelSpec, *, decoder_tokens: float, encoder_tokens: float
) -> tuple[float, float]:
    """Return the forward FLOPs of one row in one cross-attention block: (projections, attention
    core).
    """
    qk, v = model.qk_head_size, model.v_head_size
    read = model.hidden_size * model.kv_heads * (qk + v)
    own = float(entries(attention_matrices(model))) - read
    scores = 2.0 * decoder_tokens * encoder_tokens * model.num_attention_heads * (qk + v)
    return 2.0 * (own * decoder_tokens + read * encoder_tokens), scores
