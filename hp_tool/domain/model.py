"""What is trained or served: the shape of a transformer, in Hugging Face's config.json names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["decoder", "encoder", "encoder_decoder"]
Normalization = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rotary", "relative", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer's shape. A value of None means "derived": read the property of that meaning below the fields."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str = "custom"
    """What results call this model."""
    architecture: Architecture = "decoder"
    """Causal decoder, bidirectional encoder (BERT), or both (T5: `num_hidden_layers` counts each side)."""
    num_hidden_layers: int
    """Transformer layers (L)."""
    hidden_size: int
    """Width of the residual stream (h)."""
    num_attention_heads: int
    """Query heads (a)."""
    num_key_value_heads: int | None = None
    """Key and value heads (GQA); None: as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None: hidden_size / num_attention_heads."""
    intermediate_size: int | None = None
    """Width of the dense MLP; None: 4 x hidden_size."""
    vocab_size: int
    """Rows of the embedding (V), as stored, padding included."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the embedding's weights."""
    gated_mlp: bool = False
    """SwiGLU-like MLP with three matrices instead of two."""
    normalization: Normalization = "layernorm"
    """layernorm has weight and bias, rmsnorm a weight."""
    position_embedding: PositionEmbedding | None = None
    """None: learned for layernorm models without gates (GPT), rotary otherwise."""
    max_position_embeddings: int | None = None
    """Rows of a learned position embedding; None: the workload's sequence length."""
    attention_bias: bool | None = None
    """Biases on the attention projections; None: as layernorm models without gates (GPT) have them, others not."""
    mlp_bias: bool | None = None
    """Biases on the MLP's matrices; None: like attention_bias."""
    num_experts: int | None = None
    """Routed experts per MoE layer; None: a dense model."""
    num_experts_per_tok: int | None = None
    """Experts each token is sent to (top-k)."""
    moe_intermediate_size: int | None = None
    """Width of one routed expert; None: intermediate_size."""
    num_shared_experts: int = 0
    """Experts every token passes, each moe_intermediate_size wide."""
    n_group: int | None = None
    """Group-limited routing (DeepSeek): groups of neighbouring experts; None: one, so no limit."""
    topk_group: int | None = None
    """Groups from which a token's experts may come; None: all."""
    first_k_dense_replace: int = 0
    """Leading layers that keep a dense MLP in a MoE model."""
    kv_lora_rank: int | None = None
    """Multi-head latent attention: rank of the compressed key/value; None: no MLA."""
    q_lora_rank: int | None = None
    """MLA: rank of the compressed query; None: queries are not compressed."""
    qk_nope_head_dim: int | None = None
    """MLA: part of a head without rotary embedding."""
    qk_rope_head_dim: int | None = None
    """MLA: part of a head with rotary embedding."""
    v_head_dim: int | None = None
    """MLA: width of a value head."""
    num_nextn_predict_layers: int = 0
    """Extra multi-token-prediction layers."""
    num_decoder_layers: int | None = None
    """encoder_decoder only: decoder layers; None: num_hidden_layers."""

    @property
    def decoder_layers(self) -> int:
        """encoder_decoder: layers of the decoder."""
        return self.num_decoder_layers if self.num_decoder_layers is not None else self.num_hidden_layers

    @property
    def total_layers(self) -> int:
        """Layers in all: of an encoder-decoder model both sides'."""
        both = self.architecture == "encoder_decoder"
        return self.num_hidden_layers + self.decoder_layers if both else self.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads if self.num_key_value_heads is not None else self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size if self.intermediate_size is not None else 4 * self.hidden_size

    @property
    def is_gpt_like(self) -> bool:
        """layernorm without gates: the family that has biases and learned positions unless told otherwise."""
        return self.normalization == "layernorm" and not self.gated_mlp

    @property
    def has_attention_bias(self) -> bool:
        return self.attention_bias if self.attention_bias is not None else self.is_gpt_like

    @property
    def has_mlp_bias(self) -> bool:
        return self.mlp_bias if self.mlp_bias is not None else self.has_attention_bias

    @property
    def positions(self) -> PositionEmbedding:
        if self.position_embedding is not None:
            return self.position_embedding
        return "learned" if self.is_gpt_like else "rotary"
