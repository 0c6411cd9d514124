"""The ends of the model, embedding and output layer with its loss: seconds, and bytes kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.arrays import Floats, minimum, where
from hp_tool.cost.block import activation_element_bytes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.network import tensor_ring
from hp_tool.cost.parameters import head_matrices
from hp_tool.cost.roofline import elementwise_seconds, matmul_seconds
from hp_tool.domain.frameworks import facts
from hp_tool.domain.workload import TrainingWorkload

LOSS_TRAFFIC_BYTES = {"unfused": 44.0, "fused": 14.0}
"""Bytes the vocabulary-parallel loss moves per logit, forward and backward. Unfused: cast to fp32 (2+4), maximum (4),
subtraction (8), exponential (8), sum (4), division (8), gradient in place and cast (6). Fused: two passes over 16 bit
and fp32 in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTime:
    """Seconds per micro-batch, forward and backward together; arrays of shape (n,)."""

    embedding: Floats
    output: Floats
    output_communication: Floats
    """Tensor-parallel collectives around the output layer and inside the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBytes:
    """Bytes besides the layers' that micro-batches under way keep on a rank with that end of the model; shape (n,)."""

    dropout_mask: Floats
    """The embedding's."""
    inputs: Floats
    """Of the final norm and of the output layer."""
    logits: Floats
    """With what the loss makes of them."""


def head_bytes(*, case: TrainingCase, candidates: Candidates, micro_batches: Floats) -> HeadBytes:
    """Activations of both ends, for T = s b / c tokens of e bytes an element, divided over r ranks by sequence parallelism.

    dropout_mask: T h / r, a byte each, for up to p micro-batches. inputs: 2 e T h / r, half where the output layer is frozen.
    logits: T V / t of `loss.logit_bytes`, once more for each multi-token prediction.
    """
    model, workload = case.model, case.workload
    c, e = candidates, activation_element_bytes(workload)
    hidden = _hidden_elements(case, c)
    sharded = hidden / where(c.sequence_parallel > 0, c.tensor_parallel_size, 1)
    outputs = logit_bytes(workload, e=e) * (1 + model.num_nextn_predict_layers) * model.vocab_size / model.hidden_size
    return HeadBytes(
        dropout_mask=sharded * minimum(c.pipeline_parallel_size, micro_batches) if workload.dropout > 0.0 else 0.0,
        inputs=(1.0 if workload.freezes_output_layer else 2.0) * e * sharded,
        logits=outputs * hidden / c.tensor_parallel_size,
    )


def waiting_logit_bytes(case: TrainingCase, candidates: Candidates, *, micro_batches: Floats) -> Floats:
    """Gradients of the logits, e T V / t for each of the micro-batches that wait for the output layer's weight gradient."""
    model = case.model
    outputs = micro_batches * activation_element_bytes(case.workload) * model.vocab_size / model.hidden_size
    return outputs * _hidden_elements(case, candidates) / candidates.tensor_parallel_size


def _hidden_elements(case: TrainingCase, candidates: Candidates) -> Floats:
    """T h: one micro-batch's hidden states on one context-parallel rank."""
    return (
        case.workload.sequence_length * candidates.micro_batch_size / candidates.context_parallel_size * case.model.hidden_size
    )


def head_time(*, case: TrainingCase, candidates: Candidates) -> HeadTime:
    """Embedding look-up, output matmul (three times), loss over V/t logits. Frozen (LoRA, or by name): the embedding has no
    gradient, the output layer no weight gradient.
    """
    model, workload = case.model, case.workload
    c, e = candidates, activation_element_bytes(workload)
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    shards = where(c.sequence_parallel > 0, t, 1.0)
    h, local_vocab = float(model.hidden_size), model.vocab_size / t

    # Read a row and write it; backward reads the gradient and adds it into fp32. The mask of the dropout is noise.
    frozen = workload.freezes_output_layer
    moved = 2.0 * e if workload.freezes_embedding else 4.0 * e + 8.0
    embedding = elementwise_seconds(tokens * h * moved / shards, machine=case, kernels=4.0)
    precision = workload.precision
    output = 2.0 * matmul_seconds(tokens, local_vocab, h, machine=case, precision=precision)
    if not frozen:
        output = output + matmul_seconds(local_vocab, h, tokens, machine=case, output_bytes=8.0, precision=precision)
    if head_matrices(model):
        output = output + 2.0 * matmul_seconds(tokens / shards, h, h, machine=case, precision=precision)
        if not frozen:
            output = output + matmul_seconds(h, h, tokens / shards, machine=case, output_bytes=8.0, precision=precision)
        # Activation and norm: forward reads and writes each, backward reads two and writes one.
        output = output + elementwise_seconds(tokens * h * 10.0 * e / shards, machine=case, kernels=6.0)
    loss_traffic = tokens * local_vocab * LOSS_TRAFFIC_BYTES[workload.cross_entropy]
    output = output + elementwise_seconds(loss_traffic, machine=case, kernels=10.0)

    # Input gathered forward (with SP) and its gradient reduced backward; the loss reduces three fp32 numbers a token.
    tensor_group = tensor_ring(case=case, candidates=c)
    wire = tokens * h * e * (t - 1.0) / t
    around = where(c.sequence_parallel > 0, 3.0 * tensor_group.seconds(wire), tensor_group.seconds(2.0 * wire))
    inside = 3.0 * tensor_group.seconds(8.0 * tokens * (t - 1.0) / t)
    return HeadTime(embedding=embedding, output=output, output_communication=around + inside)


# What the loss keeps of the logits on the last stage.


def logit_bytes(workload: TrainingWorkload, *, e: float) -> float:
    """Bytes a logit takes at the peak of the loss, `e` of them the logit itself.

    Megatron Core: its fp32 copy, overwritten with the gradient, fused or not. Plain torch (FSDP): the fp32 log-softmax that
    backward keeps, its gradient and that of the logits in fp32; a fused kernel (flash-attn's) the gradient alone, e bytes.
    nanotron: the fp32 logits and their softmax, in which the gradient is computed; the 16-bit logits are gone.
    """
    kept = facts(workload.framework)
    if kept.fused_loss_in_place and workload.cross_entropy == "fused":
        return 2.0 * e
    return e * kept.keeps_narrow_logits + 4.0 * kept.loss_copies
