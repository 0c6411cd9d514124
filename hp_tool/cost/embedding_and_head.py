"""Seconds of the embedding and of the output layer with its loss, and the bytes that they save for
the backward pass.
"""

from dataclasses import dataclass

from hp_tool.cost.arrays import Floats, minimum, where
from hp_tool.cost.block import Shapes, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.roofline import accumulation_slowdown, elementwise_seconds, matmul_seconds
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.workload import TrainingWorkload

LOSS_CHUNK_TOKENS = 256
"""Number of tokens whose logits are materialised at once with cross_entropy chunked (TRL,
chunked_nll).
"""
LOSS_TRAFFIC_BYTES = {"unfused": 44.0, "chunked": 44.0, "fused": 14.0, "in_place": 6.0}
"""Bytes that the vocabulary-parallel loss moves per logit, forward and backward. Unfused: cast to
fp32 (2+4), maximum (4), subtraction (8), exponential (8), sum (4), division (8), gradient in place
and cast (6). Fused: two passes over the 16-bit logits with fp32 values in registers. In place: two
16-bit reads and one write.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTime:
    """Seconds of embedding, output layer and loss per micro-batch, forward and backward together;
    shape (n,).
    """

    embedding: Floats
    output: Floats
    output_communication: Floats
    """Tensor-parallel collectives of the output layer and of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """Bytes of the embedding, the output layer and the loss for all micro-batches in flight on a
    rank; shape (n,). Excludes the layers.
    """

    dropout_mask: Floats
    """Mask of the dropout after the embedding."""
    inputs: Floats
    """Inputs of the final norm and of the output layer."""
    logits: Floats
    """Logits and the copies that the loss makes of them."""


def head_bytes(*, case: TrainingCase, candidates: Candidates, micro_batches: Floats) -> HeadBytes:
    """Return the activation bytes of the embedding, and of the output layer with its loss.

    - dropout_mask: T h / r, one byte each, for up to p micro-batches.
    - inputs: 2 e T h / r, half if the output layer is frozen.
    - logits: T V / t of `logit_bytes`, and the same again for each depth of multi-token prediction;
      a chunked loss stores only one chunk.
    """
    model, workload = case.model, case.workload
    c, e = candidates, workload.activation_element_bytes
    hidden = _hidden_elements(case, c)
    sharded = hidden / where(c.sequence_parallel > 0, c.tensor_parallel_size, 1)
    outputs = (
        logit_bytes(workload, e=e)
        * (1 + model.num_nextn_predict_layers)
        * model.vocab_size
        / model.hidden_size
    )
    return HeadBytes(
        dropout_mask=sharded * minimum(c.pipeline_parallel_size, micro_batches)
        if workload.dropout > 0.0
        else 0.0,
        inputs=(1.0 if workload.freezes_output_layer else 2.0) * e * sharded,
        logits=outputs
        * _live_logits_fraction(workload, hidden, model.hidden_size)
        / c.tensor_parallel_size,
    )


def _live_logits_fraction(workload: TrainingWorkload, hidden: Floats, width: int) -> Floats:
    """Return the fraction of the tokens whose logits are materialised at once."""
    return (
        minimum(hidden, float(LOSS_CHUNK_TOKENS * width)) if workload.loss == "chunked" else hidden
    )


def waiting_logit_bytes(
    case: TrainingCase, candidates: Candidates, *, micro_batches: Floats
) -> Floats:
    """Return e T V / t, the bytes of the logit gradients, for each micro-batch whose weight
    gradients are delayed.
    """
    model = case.model
    outputs = (
        micro_batches
        * case.workload.activation_element_bytes
        * model.vocab_size
        / model.hidden_size
    )
    hidden = _live_logits_fraction(
        case.workload, _hidden_elements(case, candidates), model.hidden_size
    )
    return outputs * hidden / candidates.tensor_parallel_size


def _hidden_elements(case: TrainingCase, candidates: Candidates) -> Floats:
    """Return T h, the elements of the hidden states of one micro-batch on one context-parallel
    rank.
    """
    return (
        case.workload.sequence_length
        * candidates.micro_batch_size
        / candidates.context_parallel_size
        * case.model.hidden_size
    )


def head_time(*, case: TrainingCase, candidates: Candidates, s: Shapes | None = None) -> HeadTime:
    """Return the time in seconds of the embedding, the output layer and the loss over V/t logits.

    The output layer runs three matmuls: forward, input gradient and weight gradient. A frozen
    embedding has no gradient, and a frozen output layer has no weight gradient. A chunked loss
    computes its logits twice.
    """
    model, workload = case.model, case.workload
    s = s or shapes(case=case, candidates=candidates)
    t, tokens, shards, h, e = s.t, s.tokens, s.shards, s.h, s.e
    local_vocab = model.vocab_size / t

    # Read a row and write it; backward reads the gradient and adds it into fp32. The dropout mask
    # is negligible.
    frozen = workload.freezes_output_layer
    moved = 2.0 * e if workload.freezes_embedding else 4.0 * e + 8.0
    embedding = elementwise_seconds(tokens * h * moved / shards, machine=case, kernels=4.0)
    precision = workload.precision
    added = accumulation_slowdown(case, precision)
    passes = 3.0 if workload.loss == "chunked" else 2.0
    output = passes * matmul_seconds(tokens, local_vocab, h, machine=case, precision=precision)
    if not frozen:
        output = output + added * matmul_seconds(
            local_vocab, h, tokens, machine=case, output_bytes=8.0, precision=precision
        )
    if model.head_dense_vectors:
        output = output + 2.0 * matmul_seconds(
            tokens / shards, h, h, machine=case, precision=precision
        )
        if not frozen:
            output = output + added * matmul_seconds(
                h, h, tokens / shards, machine=case, output_bytes=8.0, precision=precision
            )
        # Activation and norm: the forward pass reads and writes each, the backward pass reads two
        # tensors and writes one.
        output = output + elementwise_seconds(
            tokens * h * 10.0 * e / shards, machine=case, kernels=6.0
        )
    loss_traffic = tokens * local_vocab * LOSS_TRAFFIC_BYTES[workload.loss]
    output = output + elementwise_seconds(loss_traffic, machine=case, kernels=10.0)

    # The input is gathered forward (with SP), its gradient reduced backward; the loss reduces three
    # fp32 numbers per token.
    around = where(s.sharded, 3.0 * s.gather_s, s.all_reduce_s)
    inside = 3.0 * s.tensor.seconds(8.0 * tokens * (t - 1.0) / t)
    return HeadTime(embedding=embedding, output=output, output_communication=around + inside)


# Logits that the loss saves on the last stage.


def logit_bytes(workload: TrainingWorkload, *, e: float) -> float:
    """Return the bytes per logit at the peak of the loss, including `e` for the logit itself.

    Megatron Core stores an fp32 copy and overwrites it with the gradient, whether the loss is fused
    or not. Plain PyTorch (FSDP) stores three fp32 tensors: the log-softmax for the backward pass,
    its gradient, and the gradient of the logits. With a fused kernel (flash-attn's), it stores only
    the gradient, e bytes; in place, the gradient overwrites the logit. Transformers passes a
    shifted copy and an fp32 copy of the logits to a fused loss. nanotron stores the fp32 logits and
    their softmax, which the gradient overwrites; the 16-bit logits are freed.
    """
    facts = framework_facts(workload.framework)
    if workload.loss == "in_place":
        return e
    if facts.fused_loss_copies is not None and workload.loss == "fused":
        return e + (4.0 * facts.fused_loss_copies or e)
    return e * facts.keeps_narrow_logits + 4.0 * facts.loss_copies
