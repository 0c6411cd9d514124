"""A small decoder in plain torch with pre-norm attention and MLP blocks."""

import torch
from torch import nn
from torch.nn import functional

from hp_tool.domain.model import ModelSpec

_ROTARY_BASE = 10_000.0


class Decoder(nn.Module):
    """A range of the model's layers.

    The first stage also has the embedding, the last the output layer.
    """

    def __init__(self, model: ModelSpec, *, layers: range, sequence_length: int) -> None:
        super().__init__()
        self.model, self.length = model, sequence_length
        width = model.hidden_size
        is_first, is_last = layers.start == 0, layers.stop == model.num_hidden_layers
        self.embedding = nn.Embedding(model.vocab_size, width) if is_first else None
        rows = (model.max_position_embeddings or sequence_length) + model.position_embedding_offset
        self.positions = (
            nn.Embedding(rows, width) if is_first and model.positions == "learned" else None
        )
        self.layers = nn.ModuleDict({str(number): Block(model) for number in layers})
        self.norm = _norm(model, width) if is_last else None
        self.output = nn.Linear(width, model.vocab_size, bias=False) if is_last else None

    def tie(self) -> None:
        """Tie the output layer to the embedding if the model does so and both are on this stage."""
        if (
            self.model.tie_word_embeddings
            and self.embedding is not None
            and self.output is not None
        ):
            self.output.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers on [b, s] tokens or [b, s, h] activations.

        Return [b, s, h] activations, or [b, s, V] logits on the last stage.
        """
        if self.embedding is not None:
            x = self.embedding(x)
            if self.positions is not None:
                # Positions of the full sequence. With sequence parallelism, each rank keeps only
                # its shard.
                x = x + self.positions(torch.arange(self.length, device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None or self.norm is None else self.output(self.norm(x))


class Block(nn.Module):
    """A pre-norm block: attention, then MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            _norm(model, model.hidden_size),
            _norm(model, model.hidden_size),
        )
        self.attention, self.mlp = Attention(model), Mlp(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal fused attention with grouped-query keys and values.

    Tensor-parallel ranks split the heads.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.size, self.rotary = model.head_size, model.positions == "rotary"
        queries, keys = model.num_attention_heads * self.size, model.kv_heads * self.size
        self.q = nn.Linear(model.hidden_size, queries, bias=model.has_attention_bias)
        self.k, self.v = (
            nn.Linear(model.hidden_size, keys, bias=model.has_attention_bias) for _ in range(2)
        )
        self.out = nn.Linear(queries, model.hidden_size, bias=model.has_attention_output_bias)
        normed = model.query_key_norm is not None
        self.q_norm, self.k_norm = (
            _norm(model, self.size) if normed else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        grouped = q.shape[1] != k.shape[1]
        context = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )
        return self.out(context.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A plain or gated MLP."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        bias, width = model.has_mlp_bias, model.ffn_size
        self.up = nn.Linear(model.hidden_size, width, bias=bias)
        self.gate = nn.Linear(model.hidden_size, width, bias=bias) if model.gated_mlp else None
        self.down = nn.Linear(width, model.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (
            functional.gelu(self.up(x))
            if self.gate is None
            else functional.silu(self.gate(x)) * self.up(x)
        )
        return self.down(inner)


def _norm(model: ModelSpec, width: int) -> nn.Module:
    return (
        nn.RMSNorm(width, eps=1e-5)
        if model.normalization == "rmsnorm"
        else nn.LayerNorm(width, eps=1e-5)
    )


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Apply RoPE (arXiv 2104.09864) to [b, heads, s, d]. It pairs the two halves of each head."""
    half = x.shape[-1] // 2
    speeds = _ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
