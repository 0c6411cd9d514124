"""Encoder-decoder models of T5's and BART's kinds."""

from __future__ import annotations

from typing import Any

from hp_tool.catalog.huggingface.family import Config, Family, equal_sides, refuse, same
from hp_tool.catalog.huggingface.llamas import NO_BIAS, TIED

_BOTH = {"architecture": "encoder_decoder"}


def _t5(config: Config) -> dict[str, Any]:
    return {"gated_mlp": str(config.get("feed_forward_proj", "relu")).startswith("gated")}


def _bart(config: Config) -> dict[str, Any]:
    equal_sides(config, ("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"))
    refuse(config, "share_encoder_decoder_embeddings", unless=True, why="two vocabularies are not modelled")
    refuse(config, "use_prompt", unless=False, why="trained prompts are not modelled")
    return {}


_T5 = Family(
    keys={
        "num_hidden_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        **same("relative_attention_num_buckets"),
    },
    fixed={**_BOTH, "normalization": "rmsnorm", "position_embedding": "relative", **NO_BIAS},
    defaults=TIED,
    derive=_t5,
)
_MARIAN = Family(
    keys={
        "num_hidden_layers": "encoder_layers",
        "num_decoder_layers": "decoder_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
    },
    fixed={
        **_BOTH, "gated_mlp": False, "normalization": "layernorm", "attention_bias": True, "mlp_bias": True,
        "position_embedding": "learned", "position_tables": 2, "final_norm": False,
    },
    defaults=TIED,
    derive=_bart,
)  # fmt: skip
"""Post-norm, no norm behind the embeddings; its sinusoidal positions are kept as a table like learned ones."""
_BART = _MARIAN.but(fixed={"position_embedding_offset": 2, "embedding_norm": True})
_PEGASUS = _MARIAN.but(fixed={"final_norm": True})

FAMILIES: dict[str, Family] = {
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5.but(fixed={"relative_attention_every_layer": True}),
    "marian": _MARIAN,
    "bart": _BART,
    "plbart": _BART,
    "mvp": _BART,
    "mbart": _BART.but(fixed={"final_norm": True}),
    "pegasus": _PEGASUS,
    "blenderbot": _PEGASUS,
    "blenderbot-small": _MARIAN.but(fixed={"embedding_norm": True}),
    "m2m_100": _PEGASUS.but(fixed={"position_embedding": "none"}),
}
