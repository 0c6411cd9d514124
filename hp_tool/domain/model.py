"""What is trained or served: the shape of a transformer, in Hugging Face's config.json names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Literal, TypeVar

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
"""Far above any model's."""
ZeroOrMore = Annotated[int, Interval(ge=0, le=1 << 26)]

AttentionKind = Literal["grouped", "latent"]
MlpKind = Literal["dense", "experts"]

_VECTORS: dict[Vectors, int] = {"none": 0, "weight": 1, "weight_bias": 2}
T = TypeVar("T")


def _optional_or(
    field: Callable[[ModelSpec], T | None], otherwise: Callable[[ModelSpec], T]
) -> cached_property[T]:
    """What a field says or, where it is None, what follows from others."""

    def value(model: ModelSpec) -> T:
        return otherwise(model) if (written := field(model)) is None else written

    return cached_property(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What one layer is made of; layers of one kind have the same matrices."""

    attention: AttentionKind = "grouped"
    """grouped: query heads that share key/value heads (MHA, GQA, MQA); latent: multi-head latent
    attention (DeepSeek).
    """
    mlp: MlpKind = "dense"


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Strict):
    """A transformer's shape. A value of None means "derived": read the property of that meaning
    below the fields, which is worked out once.
    """

    name: str = "custom"
    """What results call this model."""
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
    """What a norm has: Cohere's layernorm a weight alone, OLMo's nothing; None: as normalization
    says.
    """
    norms_per_layer: Size = 2
    """Norms of a layer without cross attention's: 1 where attention and MLP stand side by side
    behind one (GPT-J, Cohere), 4 where their outputs are normalized too (Gemma 2). Counted as
    parameters; time and activations are those of two.
    """
    query_key_norm: QueryKeyNorm | None = None
    """Norms of queries and keys: one vector for all heads (head: Qwen3), or one as wide as all
    heads (all_heads: OLMo 2); None: none.
    """
    embedding_norm: bool = False
    """A norm behind the embedding (BLOOM, BERT), on each side of an encoder-decoder model."""
    final_norm: bool = True
    """A norm behind the last layer, on each side of an encoder-decoder model; post-norm models
    (BERT, BART) have none.
    """
    position_embedding: PositionEmbedding | None = None
    """None: learned for layernorm models without gates (GPT), rotary otherwise."""
    max_position_embeddings: Size | None = None
    """Rows of a learned position embedding; None: the workload's sequence length."""
    position_embedding_offset: ZeroOrMore = 0
    """Rows beside max_position_embeddings (OPT, BART: 2)."""
    position_tables: Size = 1
    """Learned position embeddings: 2 where encoder and decoder have their own (BART)."""
    relative_attention_num_buckets: Size = 32
    """Distances that relative positions tell apart (arXiv 1910.10683 section 2.1)."""
    relative_attention_every_layer: bool = False
    """Whether each layer has its own table of relative positions (UMT5), not the first of each side
    alone (T5).
    """
    sliding_window: Size | None = None
    """Keys that a query of a windowed layer sees, its own included; None: all. Training computes no
    others, serving caches no others.
    """
    sliding_window_layers: Layers | None = None
    """Layers with a sliding window, the others see all keys; None: every layer."""
    attention_bias: bool | None = None
    """Biases on the attention projections; None: as layernorm models without gates (GPT) have them,
    others not.
    """
    attention_output_bias: bool | None = None
    """A bias on attention's output projection (Qwen2 has one on the other three alone); None: like
    attention_bias.
    """
    attention_sinks: bool = False
    """A learned logit for each head that no key belongs to (gpt-oss)."""
    mlp_bias: bool | None = None
    """Biases on the MLP's matrices; None: like attention_bias."""
    expert_bias: bool = False
    """Biases on the routed experts' matrices (gpt-oss)."""
    router_bias: bool = False
    """A trained number for each expert on the router: a bias (gpt-oss) or a scale (Gemma 4)."""
    num_experts: Size | None = None
    """Routed experts per MoE layer; None: a dense model."""
    num_experts_per_tok: Size | None = None
    """Experts each token is sent to (top-k)."""
    moe_intermediate_size: Size | None = None
    """Width of one routed expert; None: intermediate_size."""
    num_shared_experts: ZeroOrMore = 0
    """Experts every token passes, each moe_intermediate_size wide."""
    shared_expert_intermediate_size: Size | None = None
    """Width of the shared experts together (Qwen2-MoE); None: num_shared_experts x
    moe_intermediate_size.
    """
    shared_expert_gate: bool = False
    """A gate that weighs the shared experts' output (Qwen2-MoE)."""
    n_group: Size | None = None
    """Group-limited routing (DeepSeek): groups of neighbouring experts; None: one, so no limit."""
    topk_group: Size | None = None
    """Groups from which a token's experts may come; None: all."""
    moe_latent_size: Size | None = None
    """Width in which tokens travel to the routed experts and back (Nemotron 3 Super); None:
    hidden_size.
    """
    moe_latent_norm: bool = False
    """A norm of the routed experts' output in that width (Kimi K3)."""
    first_k_dense_replace: ZeroOrMore = 0
    """Leading layers that keep a dense MLP in a MoE model."""
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
    """Whether values are keys before their rotary embedding, without a matrix of their own (Gemma
    4).
    """
    attention_output_gate: OutputGate | None = None
    """A gate of attention's output, from its input: a number for each channel (Qwen3-Next) or head
    (Step 3.7); None: none.
    """
    index_n_heads: Size | None = None
    """Sparse attention (DeepSeek-V3.2): heads of the indexer, which chooses the keys that a query
    sees; None: it sees all.
    """
    index_head_dim: Size | None = None
    """Width of the indexer's heads, and of the key that it caches."""
    index_topk: Size | None = None
    """Keys that a query sees; where whole blocks of keys are chosen (MiniMax M3), those of all
    chosen blocks.
    """
    shares_index: bool = False
    """Whether layers see the keys that an indexer before them chose, without one of their own;
    `blocks` says which.
    """
    num_nextn_predict_layers: Annotated[int, Interval(ge=0, le=10_000)] = 0
    """Extra multi-token-prediction layers."""
    num_decoder_layers: Layers | None = None
    """encoder_decoder only: decoder layers; None: num_hidden_layers."""
    output_bias: bool | None = None
    """A bias on the output layer (GPT-J, BERT); None: an encoder's has one."""
    head_dense: Vectors | None = None
    """The dense layer, and its norm, between layers and output layer (a masked language model's):
    none, without or with a bias; None: an encoder has it with one.
    """
    sentence_head: bool | None = None
    """BERT's pooler and next-sentence classifier; None: an encoder has them."""
    type_vocab_size: ZeroOrMore | None = None
    """Rows of a token-type embedding; None: an encoder's 2, first and second sentence (arXiv
    1810.04805).
    """
    mixer: Mixer = "attention"
    """What mixes tokens in a layer, unless `blocks` says it."""
    feed_forward: FeedForward | None = None
    """What follows it, unless `blocks` says it; None: experts where the model has them, else a
    dense MLP.
    """
    blocks: tuple[Block, ...] | None = None
    """Layers that differ, in order: a pattern that fills num_hidden_layers; None: all are alike but
    for `first_k_dense_replace` and `sliding_window_layers`.
    """
    linear_num_key_heads: Size | None = None
    """Delta rules: heads of queries and keys."""
    linear_num_value_heads: Size | None = None
    """Delta rules: heads of values, each with a state of key width times value width; None:
    linear_num_key_heads.
    """
    linear_key_head_dim: Size | None = None
    linear_value_head_dim: Size | None = None
    """None: linear_key_head_dim."""
    linear_conv_kernel_dim: Size = 4
    """Tokens that the short convolution sees."""
    linear_full_rank_gate: bool = False
    """Whether kimi_delta's output gate is one matrix, not two through the width of a head."""
    mamba_num_heads: Size | None = None
    """Mamba 2: heads; with `mamba_head_dim` its inner width."""
    mamba_head_dim: Size | None = None
    mamba_inner_size: Size | None = None
    """Mamba: inner width."""
    mamba_dt_rank: Size | None = None
    """Mamba: rank of the time steps."""
    ssm_state_size: Size | None = None
    """Numbers of a state for each inner channel."""
    mamba_n_groups: Size = 1
    """Mamba 2: groups of heads that share input and output matrices of the state."""
    mamba_conv_kernel: Size = 4
    """Tokens that the short convolution sees."""
    mamba_conv_bias: bool = True
    mamba_norms: bool = False
    """Mamba: norms of the time steps and of the state's inputs and outputs (Jamba)."""
    left_out: str | None = None
    """What the file describes beside this language model, such as a vision tower; estimates name it
    and time none of it.
    """
    tower_parameters: Annotated[int, Interval(ge=0, le=1 << 44)] = 0
    """Weights of its towers, about; serving keeps them in 16 bits beside the language model's,
    training has none of them.
    """
    tower_replicated: bool = False
    """Whether every rank holds all of them, as engines do that run the towers of transformers;
    False: ranks of tensor parallelism divide them.
    """
    tower_working_bytes: Annotated[int, Interval(ge=0, le=1 << 44)] = 0
    """Working set of its towers for the largest image or video, which vLLM profiles before it sizes
    the cache.
    """

    decoder_layers = _optional_or(
        lambda model: model.num_decoder_layers, lambda model: model.num_hidden_layers
    )
    """encoder_decoder: layers of the decoder."""
    kv_heads = _optional_or(
        lambda model: model.num_key_value_heads, lambda model: model.num_attention_heads
    )
    head_size = _optional_or(
        lambda model: model.head_dim, lambda model: model.hidden_size // model.num_attention_heads
    )
    qk_nope_size = _optional_or(lambda model: model.qk_nope_head_dim, lambda model: model.head_size)
    """MLA: width of the part of a query or key head without rotary embedding."""
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
        """Layers in all: of an encoder-decoder model both sides'."""
        both = self.architecture == "encoder_decoder"
        return self.num_hidden_layers + self.decoder_layers if both else self.num_hidden_layers

    @cached_property
    def kinds(self) -> tuple[tuple[int, ModelSpec], ...]:
        """(layers, a model of these layers alone) for each kind of layer in `blocks`, in order of
        first appearance; of a model without `blocks` all layers and itself. The layers of one such
        model differ by `first_k_dense_replace` at most.
        """
        if self.blocks is None:
            return ((self.num_hidden_layers, self),)
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
        """The place in `kinds` of each layer, in order."""
        if self.blocks is None:
            return (0,) * self.num_hidden_layers
        places: dict[Block, int] = {}
        one = [
            places.setdefault(replace(block, count=1), len(places))
            for block in self.blocks
            for _ in range(block.count)
        ]
        return tuple(one * (self.num_hidden_layers // len(one)))

    @cached_property
    def mtp_kinds(self) -> tuple[int, ...]:
        """Layers of each kind in one layer of multi-token prediction: like the last one or, where
        mixers and feed-forwards are layers of their own, one with attention and the last
        feed-forward (Nemotron 3: `*E`).
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

    def _alone(self, block: Block, count: int) -> ModelSpec:
        """A model of `count` such layers alone."""
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
        """Whether all layers are attention and MLP: `sliding_window_layers` and
        `first_k_dense_replace` tell them apart.
        """
        return self.blocks is None and self.mixer == "attention" and self.feed_forward != "none"

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether its layers, all alike, keep a state instead of keys and values."""
        return self.mixer in RECURRENT_MIXERS

    @cached_property
    def attention(self) -> AttentionKind:
        return "grouped" if self.kv_lora_rank is None else "latent"

    @cached_property
    def layer_kind(self) -> LayerKind:
        """The kind of its layers, with experts where it has any; `without_experts` has the
        others.
        """
        return LayerKind(attention=self.attention, mlp="experts" if self.num_experts else "dense")

    @cached_property
    def without_experts(self) -> ModelSpec:
        """A model of its dense layers; itself where it has no experts."""
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
        """Layers with experts: all but the leading dense ones; none in a dense model."""
        if self.blocks is not None:
            return sum(kind.moe_layers for _, kind in self.kinds)
        return (
            max(self.num_hidden_layers - self.first_k_dense_replace, 0) if self.num_experts else 0
        )

    @cached_property
    def begins_dense(self) -> bool:
        """Whether layers with experts follow dense ones."""
        first_is_dense = self.blocks is None or self.kinds[0][1].feed_forward == "dense"
        return first_is_dense and 0 < self.moe_layers < self.num_hidden_layers

    @cached_property
    def qk_head_size(self) -> int:
        """Width of a query or key head; of latent attention with its rotary part."""
        return (
            self.head_size
            if self.attention == "grouped"
            else self.qk_nope_size + (self.qk_rope_head_dim or 0)
        )

    @cached_property
    def v_head_size(self) -> int:
        """Width of a value head; MLA's default is the part of a key head without rotary embedding,
        as DeepSeek has it.
        """
        if self.v_head_dim is not None:
            return self.v_head_dim
        return self.head_size if self.attention == "grouped" else self.qk_nope_size

    @cached_property
    def mlp_inputs(self) -> int:
        """Matrices that read an MLP's input: up, and its gate where it has one."""
        return 2 if self.gated_mlp else 1

    @cached_property
    def shared_expert_size(self) -> int:
        """Width of the shared experts of a layer together; 0 where there are none."""
        if self.shared_expert_intermediate_size is not None and self.num_shared_experts:
            return self.shared_expert_intermediate_size
        return self.num_shared_experts * self.expert_size

    @cached_property
    def is_gpt_like(self) -> bool:
        """layernorm without gates: the family that has biases and learned positions unless told
        otherwise.
        """
        return self.normalization == "layernorm" and not self.gated_mlp

    @cached_property
    def vectors_per_norm(self) -> int:
        """Weight and bias, a weight, or nothing."""
        of_normalization: Vectors = "weight_bias" if self.normalization == "layernorm" else "weight"
        return _VECTORS[self.norm_vectors or of_normalization]

    @cached_property
    def head_dense_vectors(self) -> int:
        """Weight and bias, a weight, or nothing of the dense layer in the head."""
        of_architecture: Vectors = "weight_bias" if self.architecture == "encoder" else "none"
        return _VECTORS[self.head_dense or of_architecture]

    @cached_property
    def positions(self) -> PositionEmbedding:
        if self.position_embedding is not None:
            return self.position_embedding
        return "learned" if self.is_gpt_like else "rotary"
