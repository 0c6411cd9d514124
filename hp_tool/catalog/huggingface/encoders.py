"""Encoders with a masked-language-model head, and encoder-decoder models."""

from typing import Any

from hp_tool.catalog.huggingface.decoders import LLAMA, NARROW, NO_BIAS, TIED
from hp_tool.catalog.huggingface.family import Config, Family, reject, same

_ENCODER = {
    "architecture": "encoder",
    "gated_mlp": False,
    "normalization": "layernorm",
    "position_embedding": "learned",
}
_MASKED = Family(
    keys=same("type_vocab_size"),
    fixed={
        **_ENCODER,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_norm": True,
        "final_norm": False,
        "sentence_head": False,
    },
    defaults=TIED,
)
"""Encoders with post-norm layers, such as RoBERTa."""


def _bert_heads(config: Config) -> dict[str, Any]:
    architectures = config.get("architectures") or []
    return {"sentence_head": not any("ForMaskedLM" in str(name) for name in architectures)}


def _electra(config: Config) -> dict[str, Any]:
    reject(config, "embedding_size", unless=config.get("hidden_size"), why=NARROW)
    return {}


def _modernbert(config: Config) -> dict[str, Any]:
    layers, every = config.get("num_hidden_layers", 0), config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    windowed = kinds.count("sliding_attention") if kinds else layers - (layers + every - 1) // every
    window = {
        "sliding_window": config.get("local_attention", 128) + 1,
        "sliding_window_layers": windowed,
    }
    return {
        # The norm after the embedding replaces the norm before the first layer's attention, so it
        # is not counted separately.
        "embedding_norm": False,
        "head_dense": "weight_bias" if config.get("classifier_bias") else "weight",
        "output_bias": config.get("decoder_bias", True),
        **(window if windowed else {}),
    }


def _bart(config: Config) -> dict[str, Any]:
    for key in ("encoder_ffn_dim", "encoder_attention_heads"):
        why = f"another size than {key} {config.get(key)!r} is not modelled"
        reject(config, key.replace("encoder", "decoder"), unless=config.get(key), why=why)
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
    fixed={
        "architecture": "encoder_decoder",
        "normalization": "rmsnorm",
        "position_embedding": "relative",
        **NO_BIAS,
    },
    defaults=TIED,
    derive=lambda config: {
        "gated_mlp": str(config.get("feed_forward_proj", "relu")).startswith("gated")
    },
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
        "architecture": "encoder_decoder",
        "gated_mlp": False,
        "normalization": "layernorm",
        "attention_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "position_tables": 2,
        "final_norm": False,
    },
    defaults=TIED,
    required={
        "share_encoder_decoder_embeddings": (True, "two vocabularies are not modelled"),
        "use_prompt": (False, "trained prompts are not modelled"),
    },
    derive=_bart,
)
"""Post-norm layers without a norm after the embeddings. Sinusoidal positions are stored as a table,
like learned positions.
"""
_BART = _MARIAN.but(fixed={"position_embedding_offset": 2, "embedding_norm": True})
_PEGASUS = _MARIAN.but(fixed={"final_norm": True})

FAMILIES: dict[str, Family] = {
    "bert": _MASKED.but(derive=_bert_heads),
    "roberta": _MASKED,
    "xlm-roberta": _MASKED,
    "camembert": _MASKED,
    "data2vec-text": _MASKED,
    "electra": _MASKED.but(derive=_electra),
    "ernie": _MASKED.but(
        required={"use_task_id": (False, "task-type embeddings are not modelled")}
    ),
    "distilbert": _MASKED.but(
        keys={
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
        },
        fixed={"type_vocab_size": 0},
    ),
    "megatron-bert": _MASKED.but(
        fixed={"embedding_norm": False, "final_norm": True}, derive=_bert_heads
    ),
    "roberta-prelayernorm": _MASKED.but(fixed={"final_norm": True}),
    "xlm-roberta-xl": _MASKED.but(fixed={"embedding_norm": False, "final_norm": True}),
    "nomic_bert": _MASKED.but(
        fixed={
            "gated_mlp": True,
            "attention_bias": False,
            "mlp_bias": False,
            "position_embedding": "rotary",
        },
    ),
    "eurobert": LLAMA.but(
        fixed={
            "architecture": "encoder",
            "head_dense": "none",
            "output_bias": False,
            "sentence_head": False,
            "type_vocab_size": 0,
        },
    ),
    "modernbert": Family(
        fixed={
            **_ENCODER,
            "gated_mlp": True,
            "norm_vectors": "weight",
            "position_embedding": "rotary",
            "attention_bias": False,
            "mlp_bias": False,
            "final_norm": True,
            "sentence_head": False,
            "type_vocab_size": 0,
        },
        defaults=TIED,
        required={
            "norm_bias": (False, "norms with biases in its head alone are not modelled"),
            "attention_bias": (False, "biases of this class are not modelled"),
            "mlp_bias": (False, "biases of this class are not modelled"),
        },
        derive=_modernbert,
    ),
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
