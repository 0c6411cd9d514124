"""Model FLOPs and hardware FLOPs of one optimizer step: the numerators of MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.parameters import attention_matrices, mlp_matrices
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """Forward FLOPs of one token through the whole model, by where they are spent; a multiply-add counts two."""

    layers: float
    """Projections and MLP."""
    attention: float
    """Scores and their product with the values, by the workload's convention (full or causal half)."""
    logits: float

    @property
    def forward(self) -> float:
        return self.layers + self.attention + self.logits

    @property
    def model(self) -> float:
        """Forward and backward: three times the forward pass. For a plain GPT 72 L h^2 (1 + s/6h + V/12hL)."""
        return 3.0 * self.forward


def token_flops(model: ModelSpec, workload: TrainingWorkload) -> TokenFlops:
    """FLOPs a token. Generalises arXiv 2205.05198 appendix A to GQA and gated MLPs; embeddings and norms are not counted."""
    visible = 0.5 if workload.attention_mask_flops == "causal" and model.architecture == "decoder" else 1.0
    width = model.num_attention_heads * model.head_size
    layers = float(model.num_hidden_layers)
    return TokenFlops(
        layers=layers * 2.0 * (attention_matrices(model) + mlp_matrices(model)),
        attention=layers * 4.0 * workload.sequence_length * width * visible,
        logits=2.0 * model.hidden_size * model.vocab_size,
    )


def step_tokens(workload: TrainingWorkload) -> float:
    """Tokens of one optimizer step, B s."""
    return float(workload.global_batch_size) * workload.sequence_length
