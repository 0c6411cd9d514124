"""Model FLOPs and hardware FLOPs of one optimizer step: the numerators of MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from hp_tool.cost.arrays import Floats
from hp_tool.cost.block import seen_keys, windowed_length
from hp_tool.cost.encoder_decoder import decoder_length, row_flops
from hp_tool.cost.lora import token_adapter_parameters
from hp_tool.cost.matrices import attention_flops, has_indexer, mixer_matrices, mlp_matrices
from hp_tool.cost.matrix import entries
from hp_tool.cost.parameters import active_expert_matrices, head_matrices
from hp_tool.cost.recurrent import recurrent_width
from hp_tool.cost.scans import index_flops
from hp_tool.cost.shared import Shared
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

FLOPS_TOLERANCE = 1.25
"""Factor by which a rank's measured FLOPs may differ from the FLOPs predicted for the query's
model.

Shapes must match exactly. The factor covers padding of the vocabulary or the sequences, and matmuls
that the formula omits.
"""
UNEVEN_TOLERANCE = 2.0
"""Additional factor with pipeline or expert parallelism, because ranks have unequal work."""


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """Forward FLOPs of one token in the complete model, by part. A multiply-add counts as two."""

    layers: float
    """Projections, and MLPs or experts, of all layers."""
    attention: float
    """Attention scores and their product with the values. The workload's convention counts the full
    matrix or its causal half.
    """
    logits: float
    masked: float = 0.0
    """Part of `attention` that a causal mask removes."""
    frozen: float = 0.0
    """Part of `layers` and `logits` spent in frozen matrices."""

    @property
    def forward(self) -> float:
        return self.layers + self.attention + self.logits

    @cached_property
    def model(self) -> float:
        """Return the model FLOPs of both passes: three forward passes, minus the weight gradients
        of frozen matrices.

        For a plain GPT: 72 L h^2 (1 + s/6h + V/12hL).
        """
        return 3.0 * self.forward - self.frozen

    @cached_property
    def causal(self) -> TokenFlops:
        """Return the model FLOPs without the part of attention that a causal mask removes."""
        return replace(self, attention=self.attention - self.masked)


_flops: Shared[TokenFlops] = Shared()


def token_flops(model: ModelSpec, workload: TrainingWorkload) -> TokenFlops:
    """Return the forward FLOPs per token; for an encoder-decoder model, per token of encoder and
    decoder.

    Generalises arXiv 2205.05198 appendix A to GQA, latent attention, gated MLPs and MoE (top-k,
    shared experts and router). Excludes embeddings, norms, and scores outside a sliding window.
    """
    return _flops.get((model, workload), (), lambda: _token_flops(model, workload))


def _token_flops(model: ModelSpec, workload: TrainingWorkload) -> TokenFlops:
    visible = (
        0.5
        if workload.attention_mask_flops == "causal" and model.architecture == "decoder"
        else 1.0
    )
    if model.architecture == "encoder_decoder":
        return _two_sided_flops(model, workload)
    extra = float(model.num_nextn_predict_layers)
    counts = [
        count + extra * mtp for (count, _), mtp in zip(model.kinds, model.mtp_kinds, strict=True)
    ]
    matrices, states, scores = 0.0, 0.0, 0.0
    for layers, (_, kind) in zip(counts, model.kinds, strict=True):
        matrices += _active_entries(kind, layers=layers)
        states += layers * _state_flops(kind)
        scores += _score_flops(kind, workload, layers=layers, visible=visible)
    matrices = 2.0 * float(matrices + extra * 2.0 * model.hidden_size**2)
    adapters = (
        2.0 * token_adapter_parameters(model, workload.lora) if workload.lora is not None else 0.0
    )
    logits = 2.0 * ((1.0 + extra) * model.hidden_size * model.vocab_size + head_matrices(model))
    return TokenFlops(
        layers=matrices + adapters + states,
        frozen=(matrices if workload.lora is not None else 0.0)
        + (logits if workload.freezes_output_layer else 0.0),
        attention=scores,
        masked=0.5 * scores if visible == 1.0 and model.architecture == "decoder" else 0.0,
        logits=logits,
    )


def _active_entries(model: ModelSpec, *, layers: float) -> float:
    second: Floats = 0.0
    if model.num_experts:
        second = active_expert_matrices(model)
    elif model.feed_forward != "none":
        second = entries(mlp_matrices(model))
    return float(layers * entries(mixer_matrices(model)) + layers * second)


def _state_flops(model: ModelSpec) -> float:
    """Return the forward FLOPs per token to update and read the recurrent state of one layer:
    decay, write and read.

    An SSM uses 7 FLOPs per state element (Megatron-LM, training.py), a delta rule 6 (arXiv
    2412.06464, section 3.1).
    """
    if not model.is_recurrent:
        return 0.0
    width = (
        7.0 * (model.ssm_state_size or 0)
        if model.mixer in ("mamba", "mamba2")
        else 6.0 * (model.linear_key_head_dim or 0)
    )
    return width * recurrent_width(model)


def _score_flops(
    model: ModelSpec, workload: TrainingWorkload, *, layers: float, visible: float
) -> float:
    """Return the forward FLOPs per token of the attention core in all layers of one kind.

    With sparse attention, the selected keys stay in the latent space, and the indexer's scores of
    all keys are included.
    """
    length = workload.attended_length
    if model.mixer != "attention":
        return 0.0
    if model.index_topk is None:
        width = model.qk_head_size + model.v_head_size
        return (
            layers
            * 2.0
            * windowed_length(model, length)
            * model.num_attention_heads
            * width
            * visible
        )
    index = length * index_flops(model) if has_indexer(model) else 0.0
    return (
        layers
        * visible
        * (
            seen_keys(model.index_topk, length) * float(attention_flops(model, 1, decoding=True))
            + index
        )
    )


def _two_sided_flops(model: ModelSpec, workload: TrainingWorkload) -> TokenFlops:
    """Return the FLOPs of a row of an encoder-decoder model, divided by the number of encoder and
    decoder tokens. Only the decoder has logits.
    """
    _, causal_attention = row_flops(model, workload, causal=0.5)
    layers, attention = row_flops(model, workload, causal=1.0)
    attention = causal_attention if workload.attention_mask_flops == "causal" else attention
    logits = 2.0 * model.hidden_size * model.vocab_size * decoder_length(workload)
    tokens = workload.tokens_per_row
    masked = (attention - causal_attention) / tokens
    return TokenFlops(
        layers=layers / tokens, attention=attention / tokens, masked=masked, logits=logits / tokens
    )


def step_tokens(workload: TrainingWorkload) -> float:
    """Return the number of tokens in one optimizer step, B s, excluding padding."""
    return float(workload.global_batch_size) * workload.tokens_per_row


def flops_tolerance(config: ParallelConfig) -> float:
    """Return the factor by which a rank's measured FLOPs may differ from the FLOPs predicted for
    the query's model.
    """
    uneven = config.pipeline_parallel_size > 1 or config.expert_parallel_size > 1
    return FLOPS_TOLERANCE * (UNEVEN_TOLERANCE if uneven else 1.0)
