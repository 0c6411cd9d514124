"""Encoders, with the head of masked language models; BERT's also with its pooler and next-sentence classifier."""

from __future__ import annotations

from typing import Any

from hp_tool.catalog.huggingface.family import Config, Family, refuse, same
from hp_tool.catalog.huggingface.llamas import LLAMA, TIED

_ENCODER = {"architecture": "encoder", "gated_mlp": False, "normalization": "layernorm", "position_embedding": "learned"}
_MASKED = Family(
    keys=same("type_vocab_size"),
    fixed={
        **_ENCODER, "attention_bias": True, "mlp_bias": True, "embedding_norm": True, "final_norm": False,
        "sentence_head": False,
    },
    defaults=TIED,
)  # fmt: skip
"""Post-norm layers (RoBERTa)."""


def _heads(config: Config) -> dict[str, Any]:
    """BERT is trained with both heads; a checkpoint of the masked language model alone says so."""
    architectures = config.get("architectures") or []
    return {"sentence_head": not any("ForMaskedLM" in str(name) for name in architectures)}


def _electra(config: Config) -> dict[str, Any]:
    refuse(
        config, "embedding_size", unless=config.get("hidden_size"), why="embeddings narrower than the layers are not modelled"
    )
    return {}


def _ernie(config: Config) -> dict[str, Any]:
    refuse(config, "use_task_id", unless=False, why="task-type embeddings are not modelled")
    return {}


def _modernbert(config: Config) -> dict[str, Any]:
    refuse(config, "norm_bias", unless=False, why="norms with biases in its head alone are not modelled")
    refuse(config, "attention_bias", unless=False, why="biases of this class are not modelled")
    refuse(config, "mlp_bias", unless=False, why="biases of this class are not modelled")
    layers, every = config.get("num_hidden_layers", 0), config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    windowed = kinds.count("sliding_attention") if kinds else layers - (layers + every - 1) // every
    window = {"sliding_window": config.get("local_attention", 128) + 1, "sliding_window_layers": windowed}
    return {
        # The norm behind the embedding is the first layer's: that layer has none before its attention.
        "embedding_norm": False,
        "head_dense": "weight_bias" if config.get("classifier_bias") else "weight",
        "output_bias": config.get("decoder_bias", True),
        **(window if windowed else {}),
    }


FAMILIES: dict[str, Family] = {
    "bert": _MASKED.but(derive=_heads),
    "roberta": _MASKED,
    "xlm-roberta": _MASKED,
    "camembert": _MASKED,
    "data2vec-text": _MASKED,
    "electra": _MASKED.but(derive=_electra),
    "ernie": _MASKED.but(derive=_ernie),
    "distilbert": _MASKED.but(
        keys={"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "dim",
              "intermediate_size": "hidden_dim"},
        fixed={"type_vocab_size": 0},
    ),
    "megatron-bert": _MASKED.but(fixed={"embedding_norm": False, "final_norm": True}, derive=_heads),
    "roberta-prelayernorm": _MASKED.but(fixed={"final_norm": True}),
    "xlm-roberta-xl": _MASKED.but(fixed={"embedding_norm": False, "final_norm": True}),
    "nomic_bert": _MASKED.but(
        fixed={"gated_mlp": True, "attention_bias": False, "mlp_bias": False, "position_embedding": "rotary"},
    ),
    "eurobert": LLAMA.but(
        fixed={"architecture": "encoder", "head_dense": "none", "output_bias": False, "sentence_head": False,
               "type_vocab_size": 0},
    ),
    "modernbert": Family(
        fixed={
            **_ENCODER, "gated_mlp": True, "norm_vectors": "weight", "position_embedding": "rotary", "attention_bias": False,
            "mlp_bias": False, "final_norm": True, "sentence_head": False, "type_vocab_size": 0,
        },
        defaults=TIED,
        derive=_modernbert,
    ),
}  # fmt: skip
