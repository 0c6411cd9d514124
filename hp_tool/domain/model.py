"""The model that is trained or served: the shape of a transformer, with the field names of Hugging
Face's config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval

from hp_tool.domain.blocks import RECURRENT_MIXERS, Block, FeedForward, Mixer
from hp_tool.domain.fields import Strict

Architecture = Literal["decoder", "encoder", "encoder_decoder"]
Normalization = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rotary", "relative", "none"]
Vectors = Literal["none", "weight", "weight_bias"]
QueryKeyNorm = Literal["head", "all_heads"]
OutputGate = Literal["channel", "head"]

Layers = Annotated[int, Interval(ge=1, le=10_000)]
Size = Annotated[int, Interval(ge=1, le=1 << 26)]
"""A size, with an upper bound far above that of any real model."""
ZeroOrMore = Annotated[int, Interval(ge=0, le=1 << 26)]

AttentionKind = Literal["grouped", "latent"]
MlpKind = Literal["dense", "experts"]

_VECTORS: dict[Vectors, int] = {"none": 0, "weight": 1, "weight_bias": 2}
T = TypeVar("T")


def _optional_or(
    field: Callable[[ModelSpec], T | None], otherwise: Callable[[ModelSpec], T]
) -> cached_property[T]:
    """Return a property with the field's value or, if that is None, the value derived from other
    fields.
    """

    def value(model: ModelSpec) -> T:
        return otherwise(model) if (written := field(model)) is None else written

    return cached_property(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Kind of a layer. Layers of one kind have the same matrices."""

    attention: AttentionKind = "grouped"
    """grouped: query heads that share key/value heads (MHA, GQA, MQA); latent: multi-head latent
    attention (DeepSeek).
    """
    mlp: MlpKind = "dense"


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Strict):
    """Shape of a transformer.

    Properties below the fields give the values of fields that are None.
    """

    name: str = "custom"
    """Name of the model in results."""
    architecture: Architecture = "decoder"
    """Causal decoder, bidirectional encoder (BERT), or both (T5: `num_hidden_layers` counts each
    side).
    """
    num_hidden_layers: Layers
    """Transformer layers (L)."""
    hidden_size: Size
    """Width of the residual stream (h)."""
    num_attention_heads: Size
    """Query heads (a)."""
    num_key_value_heads: Size | None = None
    """Key and value heads (GQA); None: as many as query heads."""
    head_dim: Size | None = None
    """Width of a head; None: hidden_size / num_attention_heads."""
    intermediate_size: Size | None = None
    """Width of the dense MLP; None: 4 x hidden_size."""
    vocab_size: Size
    """Rows of the embedding (V), as stored, padding included."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the embedding's weights."""
    gated_mlp: bool = False
    """SwiGLU-like MLP with three matrices instead of two."""
    normalization: Normalization = "layernorm"
    """layernorm has weight and bias, rmsnorm a weight, unless norm_vectors says otherwise."""
    norm_vectors: Vectors | None = None
    """Trained vectors of a norm: Cohere's layernorm has only a weight, OLMo's none; None: as
    normalization implies.
    """
    norms_per_layer: Size = 2
    """Norms of a layer, excluding cross-attention's: 1 if attention and MLP run in parallel behind
    one norm (GPT-J, Cohere), 4 if their outputs are normalized too (Gemma 2). They are counted as
    parameters; time and activations are those of two.
    """
    query_key_norm: QueryKeyNorm | None = None
    """Norms of queries and keys: one vector for all heads (head: Qwen3), or one as wide as all
    heads (all_heads: OLMo 2); None: none.
    """
    embedding_norm: bool = False
    """Whether a norm follows the embedding (BLOOM, BERT), on each side of an encoder-decoder
    model.
    """
    final_norm: bool = True
    """Whether a norm follows the last layer, on each side of an encoder-decoder model; post-norm
    models (BERT, BART) have none.
    """
    position_embedding: PositionEmbedding | None = None
    """Kind of position embedding; None: learned for layernorm models without gates (GPT), else
    rotary.
    """
    max_position_embeddings: Size | None = None
    """Rows of a learned position embedding; None: the workload's sequence length."""
    position_embedding_offset: ZeroOrMore = 0
    """Rows of the position embedding in addition to max_position_embeddings (OPT, BART: 2)."""
    position_tables: Size = 1
    """Learned position embeddings: 2 if encoder and decoder have separate ones (BART)."""
    relative_attention_num_buckets: Size = 32
    """Number of distances that relative positions distinguish (arXiv 1910.10683 section 2.1)."""
    relative_attention_every_layer: bool = False
    """Whether each layer has a table of relative positions (UMT5), instead of only the first layer
    of each side (T5).
    """
    sliding_window: Size | None = None
    """Keys that a query of a windowed layer attends to, including its own; None: all. Training
    computes, and serving caches, only these.
    """
    sliding_window_layers: Layers | None = None
    """Layers with a sliding window; the others attend to all keys. None: every layer."""
    attention_bias: bool | None = None
    """Whether the attention projections have biases; None: only in layernorm models without gates
    (GPT).
    """
    attention_output_bias: bool | None = None
    """Whether attention's output projection has a bias (Qwen2 has biases only on the other three);
    None: like attention_bias.
    """
    attention_sinks: bool = False
    """Whether each head has a learned logit without a key (gpt-oss)."""
    mlp_bias: bool | None = None
    """Whether the MLP's matrices have biases; None: like attention_bias."""
    expert_bias: bool = False
    """Whether the routed experts' matrices have biases (gpt-oss)."""
    router_bias: bool = False
    """Whether the router has a trained number per expert: a bias (gpt-oss) or a scale (Gemma 4)."""
    num_experts: Size | None = None
    """Routed experts per MoE layer; None: a dense model."""
    num_experts_per_tok: Size | None = None
    """Routed experts that each token is sent to (top-k)."""
    moe_intermediate_size: Size | None = None
    """Width of one routed expert; None: intermediate_size."""
    num_shared_experts: ZeroOrMore = 0
    """Experts that process every token, each moe_intermediate_size wide."""
    shared_expert_intermediate_size: Size | None = None
    """Total width of the shared experts (Qwen2-MoE); None: num_shared_experts x
    moe_intermediate_size.
    """
    shared_expert_gate: bool = False
    """Whether a gate weighs the shared experts' output (Qwen2-MoE)."""
    n_group: Size | None = None
    """Groups of neighbouring experts in group-limited routing (DeepSeek); None: one group, so no
    limit.
    """
    topk_group: Size | None = None
    """Number of groups from which a token's experts may come; None: all."""
    moe_latent_size: Size | None = None
    """Width in which tokens are sent to the routed experts and back (Nemotron 3 Super); None:
    hidden_size.
    """
    moe_latent_norm: bool = False
    """Whether the routed experts' output in that width is normalized (Kimi K3)."""
    first_k_dense_replace: ZeroOrMore = 0
    """Number of leading layers with a dense MLP in a MoE model."""
    kv_lora_rank: Size | None = None
    """Multi-head latent attention: rank of the compressed key/value; None: no MLA."""
    q_lora_rank: Size | None = None
    """MLA: rank of the compressed query; None: queries are not compressed."""
    qk_nope_head_dim: Size | None = None
    """MLA: part of a head without rotary embedding."""
    qk_rope_head_dim: Size | None = None
    """MLA: part of a head with rotary embedding."""
    v_head_dim: Size | None = None
    """Width of a value head; None: of a key head (MLA: its part without rotary embedding)."""
    values_are_keys: bool = False
    """Whether values are the keys before their rotary embedding, without a separate matrix (Gemma
    4).
    """
    attention_output_gate: OutputGate | None = None
    """Gate of attention's output, computed from its input: one number per channel (Qwen3-Next) or
    per head (Step 3.7); None: no gate.
    """
    index_n_heads: Size | None = None
    """Sparse attention (DeepSeek-V3.2): heads of the indexer, which selects the keys for each
    query; None: no indexer.
    """
    index_head_dim: Size | None = None
    """Width of the indexer's heads, and of the key that it caches."""
    index_topk: Size | None = None
    """Keys selected for each query; if whole blocks of keys are selected (MiniMax M3), the keys of
    all selected blocks.
    """
    shares_index: bool = False
    """Whether some layers use the keys that an earlier layer's indexer selected; `blocks` lists
    them.
    """
    num_nextn_predict_layers: Annotated[int, Interval(ge=0, le=10_000)] = 0
    """Layers for multi-token prediction."""
    num_decoder_layers: Layers | None = None
    """encoder_decoder only: decoder layers; None: num_hidden_layers."""
    output_bias: bool | None = None
    """Whether the output layer has a bias (GPT-J, BERT); None: only in encoders."""
    head_dense: Vectors | None = None
    """The dense layer with its norm between the layers and the output layer (of masked language
    models): none, without bias or with bias; None: encoders have it with a bias.
    """
    sentence_head: bool | None = None
    """Whether the model has BERT's pooler and next-sentence classifier; None: only encoders."""
    type_vocab_size: ZeroOrMore | None = None
    """Rows of a token-type embedding; None: an encoder's 2, first and second sentence (arXiv
    1810.04805).
    """
    mixer: Mixer = "attention"
    """Token mixer of the layers, unless `blocks` sets it."""
    feed_forward: FeedForward | None = None
    """Feed-forward of the layers, unless `blocks` sets it; None: experts if the model has them,
    else a dense MLP.
    """
    blocks: tuple[Block, ...] | None = None
    """Blocks of identical layers, in order: a pattern that fills num_hidden_layers. None: all
    layers are identical except for `first_k_dense_replace` and `sliding_window_layers`.
    """
    linear_num_key_heads: Size | None = None
    """Delta rules: query and key heads."""
    linear_num_value_heads: Size | None = None
    """Delta rules: value heads, each with a state of key width x value width; None:
    linear_num_key_heads.
    """
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    """Delta rules: width of a value head; None: linear_key_head_dim."""
    linear_conv_kernel_dim: Size = 4
    """Window of the short convolution, in tokens."""
    linear_full_rank_gate: bool = False
    """Whether kimi_delta's output gate is one matrix instead of two with the width of a head
    between them.
    """
    mamba_num_heads: Size | None = None
    """Mamba 2: heads; with `mamba_head_dim`, they determine its inner width."""
    mamba_head_dim: Size | None = None
    mamba_inner_size: Size | None = None
    """Mamba: inner width."""
    mamba_dt_rank: Size | None = None
    """Mamba: rank of the time steps."""
    ssm_state_size: Size | None = None
    """State numbers per inner channel."""
    mamba_n_groups: Size = 1
    """Mamba 2: groups of heads that share input and output matrices of the state."""
    mamba_conv_kernel: Size = 4
    """Window of the short convolution, in tokens."""
    mamba_conv_bias: bool = True
    mamba_norms: bool = False
    """Mamba: whether the time steps and the state's inputs and outputs are normalized (Jamba)."""
    left_out: str | None = None
    """Parts that the file describes in addition to this language model, such as a vision tower.
    Estimates name them but do not time them.
    """
    tower_parameters: Annotated[int, Interval(ge=0, le=1 << 44)] = 0
    """Approximate number of weights of its towers. Serving stores them in 16 bits together with the
    language model; training excludes them.
    """
    tower_replicated: bool = False
    """Whether every rank stores all tower weights, as in engines that run the towers of Hugging
    Face transformers; False: tensor-parallel ranks divide them.
    """
    tower_working_bytes: Annotated[int, Interval(ge=0, le=1 << 44)] = 0
    """Working set in bytes of its towers for the largest image or video, which vLLM profiles before
    it sizes the cache.
    """
    bidirectional_item_tokens: Annotated[int, Interval(ge=0, le=1 << 24)] = 0
    """Tokens of the largest image or video of a model whose vision tokens attend to each other in
    both directions; an engine processes all of them in one pass. 0: vision tokens are causal.
    """
    assistant_parameters: Annotated[int, Interval(ge=0, le=1 << 44)] = 0
    """Number of weights of the separate model that drafts tokens for this one and reads its cache
    (Gemma 4's assistants). Serving stores them in 16 bits if the query drafts without another
    draft model.
    """

    decoder_layers = _optional_or(
        lambda model: model.num_decoder_layers, lambda model: model.num_hidden_layers
    )
    """encoder_decoder only: number of decoder layers."""
    kv_heads = _optional_or(
        lambda model: model.num_key_value_heads, lambda model: model.num_attention_heads
    )
    head_size = _optional_or(
        lambda model: model.head_dim, lambda model: model.hidden_size // model.num_attention_heads
    )
    qk_nope_size = _optional_or(lambda model: model.qk_nope_head_dim, lambda model: model.head_size)
    """MLA: width of the part of a query or key head that has no rotary embedding."""
    ffn_size = _optional_or(
        lambda model: model.intermediate_size, lambda model: 4 * model.hidden_size
    )
    expert_size = _optional_or(
        lambda model: model.moe_intermediate_size, lambda model: model.ffn_size
    )
    """Width of one routed expert."""
    has_attention_bias = _optional_or(
        lambda model: model.attention_bias, lambda model: model.is_gpt_like
    )
    has_attention_output_bias = _optional_or(
        lambda model: model.attention_output_bias, lambda model: model.has_attention_bias
    )
    has_mlp_bias = _optional_or(
        lambda model: model.mlp_bias, lambda model: model.has_attention_bias
    )
    has_output_bias = _optional_or(
        lambda model: model.output_bias, lambda model: model.architecture == "encoder"
    )
    has_sentence_head = _optional_or(
        lambda model: model.sentence_head, lambda model: model.architecture == "encoder"
    )
    token_types = _optional_or(
        lambda model: model.type_vocab_size,
        lambda model: 2 if model.architecture == "encoder" else 0,
    )

    @cached_property
    def total_layers(self) -> int:
        """Total number of layers. For an encoder-decoder model, this includes both sides."""
        both = self.architecture == "encoder_decoder"
        return self.num_hidden_layers + self.decoder_layers if both else self.num_hidden_layers

    @cached_property
    def kinds(self) -> tuple[tuple[int, ModelSpec], ...]:
        """(number of layers, model with only these layers) for each kind of layer, in order of
        first appearance.

        The kinds are those of `blocks`. Without `blocks`, they are the leading dense layers and the
        layers with experts, or a single kind with the model itself, and each layer is windowed on
        average.
        """
        if self.blocks is None:
            sparse = self.moe_layers
            dense = self.num_hidden_layers - sparse
            of_dense = self.without_experts
            if not sparse or not dense:
                return ((self.num_hidden_layers, self if sparse else of_dense),)
            of_sparse = replace(self, first_k_dense_replace=0)
            return ((dense, of_dense._repeated(dense)), (sparse, of_sparse._repeated(sparse)))
        counts: dict[Block, int] = {}
        for block in self.blocks:
            alike = replace(block, count=1)
            counts[alike] = counts.get(alike, 0) + block.count
        patterns = self.num_hidden_layers // sum(counts.values())
        return tuple(
            (patterns * count, self._alone(block, patterns * count))
            for block, count in counts.items()
        )

    @cached_property
    def pattern(self) -> tuple[int, ...]:
        """Index into `kinds` for each layer, in order."""
        if self.blocks is None:
            counts = (count for count, _ in self.kinds)
            return tuple(place for place, count in enumerate(counts) for _ in range(count))
        places: dict[Block, int] = {}
        one = [
            places.setdefault(replace(block, count=1), len(places))
            for block in self.blocks
            for _ in range(block.count)
        ]
        return tuple(one * (self.num_hidden_layers // len(one)))

    @cached_property
    def mtp_kinds(self) -> tuple[int, ...]:
        """Layer counts by kind within one multi-token-prediction (MTP) layer.

        The MTP layer has the same kind as the model's last layer. If mixers and FFNs are separate
        layers, the MTP layer consists of an attention layer and an FFN layer (Nemotron 3: `*E`).
        """
        own = self.pattern[-1]
        both = [
            place
            for place, (_, kind) in enumerate(self.kinds)
            if kind.mixer != "none" and kind.feed_forward != "none"
        ]
        if both:
            chosen = {own if own in both else both[-1]}
        else:
            kinds = [kind for _, kind in self.kinds]
            with_attention = [
                place for place, kind in enumerate(kinds) if kind.mixer == "attention"
            ]
            following = [place for place in self.pattern if kinds[place].feed_forward != "none"]
            chosen = {*with_attention[-1:], *following[-1:]}
        return tuple(int(place in chosen) for place in range(len(self.kinds)))

    def _repeated(self, layers: int) -> ModelSpec:
        """Return a model with this many layers, of which the same fraction is windowed."""
        windowed = self.sliding_window_layers
        sizes: dict[str, Any] = {"num_hidden_layers": layers}
        if windowed is not None:
            sizes["sliding_window_layers"] = windowed * layers / self.num_hidden_layers
        return replace(self, **sizes)

    def _alone(self, block: Block, count: int) -> ModelSpec:
        """Return a model with only `count` layers like those of the block."""
        own = {
            field.name: value
            for field in fields(block)
            if (value := getattr(block, field.name)) is not None
        }
        feed_forward = own.pop("feed_forward", "experts" if self.num_experts else "dense")
        windowed, indexed = own.pop("windowed"), own.pop("indexed")
        if feed_forward != "experts":
            own |= {"num_experts": None, "num_experts_per_tok": None, "num_shared_experts": 0}
        if not windowed:
            own["sliding_window"] = None
        if not indexed:
            own["index_topk"] = own["index_n_heads"] = own["index_head_dim"] = None
        own |= {
            "feed_forward": feed_forward,
            "num_hidden_layers": count,
            "blocks": None,
            "first_k_dense_replace": 0,
        }
        del own["count"]
        return replace(self, **own)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every layer has attention and an MLP. Layers may still differ by
        `sliding_window_layers` and `first_k_dense_replace`.
        """
        return self.blocks is None and self.mixer == "attention" and self.feed_forward != "none"

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether the layers, which are all identical, store a recurrent state instead of keys and
        values.
        """
        return self.mixer in RECURRENT_MIXERS

    @cached_property
    def attention(self) -> AttentionKind:
        return "grouped" if self.kv_lora_rank is None else "latent"

    @cached_property
    def layer_kind(self) -> LayerKind:
        """Kind of the model's layers; for a MoE model, the kind of the layers with experts."""
        return LayerKind(attention=self.attention, mlp="experts" if self.num_experts else "dense")

    @cached_property
    def without_experts(self) -> ModelSpec:
        """The model with only its dense layers, or the model itself if it has no experts."""
        if not self.num_experts:
            return self
        return replace(
            self,
            num_experts=None,
            num_experts_per_tok=None,
            num_shared_experts=0,
            first_k_dense_replace=0,
        )

    @cached_property
    def moe_layers(self) -> int:
        """Number of layers with experts: all except the leading dense layers; 0 for a dense
        model.
        """
        if self.blocks is not None:
            return sum(kind.moe_layers for _, kind in self.kinds)
        return (
            max(self.num_hidden_layers - self.first_k_dense_replace, 0) if self.num_experts else 0
        )

    @cached_property
    def begins_dense(self) -> bool:
        """Whether the model starts with dense layers, followed by layers with experts."""
        first_is_dense = self.blocks is None or self.kinds[0][1].feed_forward == "dense"
        return first_is_dense and 0 < self.moe_layers < self.num_hidden_layers

    @cached_property
    def qk_head_size(self) -> int:
        """Width of a query or key head; for latent attention, including the rotary part."""
        return (
            self.head_size
            if self.attention == "grouped"
            else self.qk_nope_size + (self.qk_rope_head_dim or 0)
        )

    @cached_property
    def v_head_size(self) -> int:
        """Width of a value head. For MLA, the default is the non-rotary part of a key head, as in
        DeepSeek's models.
        """
        if self.v_head_dim is not None:
            return self.v_head_dim
        return self.head_size if self.attention == "grouped" else self.qk_nope_size

    @cached_property
    def mlp_inputs(self) -> int:
        """Number of matrices that read an MLP's input: up, and gate if there is one."""
        return 2 if self.gated_mlp else 1

    @cached_property
    def shared_expert_size(self) -> int:
        """Total width of a layer's shared experts; 0 if there are none."""
        if self.shared_expert_intermediate_size is not None and self.num_shared_experts:
            return self.shared_expert_intermediate_size
        return self.num_shared_experts * self.expert_size

    @cached_property
    def is_gpt_like(self) -> bool:
        """Whether the model has layernorm and no gated MLP. Such models have biases and learned
        position embeddings by default.
        """
        return self.normalization == "layernorm" and not self.gated_mlp

    @cached_property
    def vectors_per_norm(self) -> int:
        """Number of trained vectors per norm: two (weight and bias), one (weight), or none."""
        of_normalization: Vectors = "weight_bias" if self.normalization == "layernorm" else "weight"
        return _VECTORS[self.norm_vectors or of_normalization]

    @cached_property
    def head_dense_vectors(self) -> int:
        """Number of trained vectors in the norm of the head's dense layer: two (weight and bias),
        one (weight), or none.
        """
        of_architecture: Vectors = "weight_bias" if self.architecture == "encoder" else "none"
        return _VECTORS[self.head_dense or of_architecture]

    @cached_property
    def positions(self) -> PositionEmbedding:
        if self.position_embedding is not None:
            return self.position_embedding
        return "learned" if self.is_gpt_like else "rotary"
