"""Reads a Hugging Face config.json into a ModelSpec, by a table of what each architecture calls and fixes things.

What ModelSpec has no word for is read as its nearest plain form: sliding windows as full attention, query and key
norms (head_dim weights each) as none, Qwen2's query/key/value biases as biases on all four projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_tool.catalog.records import build, nearest
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import UnsupportedError

Config = Mapping[str, Any]

_SAME_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_MLA_NAMES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _nothing(config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """How one model_type's config.json is read."""

    keys: Mapping[str, str] = field(default_factory=dict)
    """ModelSpec field -> config key, beside the fields that have the same name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What the architecture's code decides."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What its configuration class assumes for keys the file leaves out."""
    derive: Callable[[Config], dict[str, Any]] = _nothing
    """What follows from several keys; raises UnsupportedError for layouts that ModelSpec cannot hold."""


def is_config(mapping: Config) -> bool:
    """Whether a mapping is a config.json's content: it names its model_type or architectures."""
    return "model_type" in mapping or "architectures" in mapping


def read_config(config: Config, *, name: str | None = None) -> ModelSpec:
    """The model that a config.json describes.

    UnsupportedError names a model_type or layout that cannot be read and lists the known types; InputError names a
    value that is missing or of the wrong type.
    """
    model_type = _model_type(config)
    family = _FAMILIES[model_type]
    given = {key: value for key, value in config.items() if value is not None}
    keys = {same: same for same in _SAME_NAMES} | dict(family.keys)
    fields = {ours: given[theirs] for ours, theirs in keys.items() if theirs in given}
    name = name or given.get("name") or str(given.get("_name_or_path", "")).rstrip("/").rsplit("/", 1)[-1] or model_type
    return build(ModelSpec, {"name": name, **family.defaults, **fields, **family.fixed, **family.derive(given)}, field="model")


def _model_type(config: Config) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        architectures = config.get("architectures")
        first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        stem = first.split("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower()
        model_type = next((known for known in _FAMILIES if known.replace("_", "") == stem), first)
    if model_type not in _FAMILIES:
        raise UnsupportedError(
            f"model_type {model_type!r} cannot be read{nearest(str(model_type), _FAMILIES)}; "
            f"known: {', '.join(sorted(_FAMILIES))}. Any other model can be given by its fields",
            field="model.model_type",
        )
    return str(model_type)


def _refuse(config: Config, key: str, *, unless: Any, why: str) -> None:
    if key in config and config[key] != unless:
        raise UnsupportedError(f"{key} {config[key]!r}: {why}", field=f"model.{key}")


def _derive_falcon(config: Config) -> dict[str, Any]:
    heads = config.get("num_attention_heads", config.get("n_head"))
    if config.get("new_decoder_architecture"):
        kv_heads = config.get("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.get("multi_query", True) else heads
    bias = config.get("bias", False)
    positions = "none" if config.get("alibi", False) else "rotary"
    return {"num_key_value_heads": kv_heads, "attention_bias": bias, "mlp_bias": bias, "position_embedding": positions}


def _derive_mpt(config: Config) -> dict[str, Any]:
    attention = config.get("attn_config", {})
    fields: dict[str, Any] = {"attention_bias": not config.get("no_bias", True)}
    if "expansion_ratio" in config:
        fields["intermediate_size"] = config["expansion_ratio"] * config["d_model"]
    if attention.get("kv_n_heads"):
        fields["num_key_value_heads"] = attention["kv_n_heads"]
    fields["position_embedding"] = "none" if attention.get("alibi", True) else "rotary" if attention.get("rope") else "learned"
    return fields


def _derive_opt(config: Config) -> dict[str, Any]:
    _refuse(
        config,
        "word_embed_proj_dim",
        unless=config.get("hidden_size"),
        why="embeddings narrower than the layers are not modelled",
    )
    return {"attention_bias": config.get("enable_bias", True)}


def _derive_t5(config: Config) -> dict[str, Any]:
    return {"gated_mlp": str(config.get("feed_forward_proj", "relu")).startswith("gated")}


def _derive_deepseek(config: Config) -> dict[str, Any]:
    _refuse(config, "moe_layer_freq", unless=1, why="dense layers between MoE layers are not modelled")
    return {}


def _derive_qwen_moe(config: Config) -> dict[str, Any]:
    _refuse(config, "decoder_sparse_step", unless=1, why="dense layers between MoE layers are not modelled")
    dense = config.get("mlp_only_layers", [])
    _refuse(config, "mlp_only_layers", unless=list(range(len(dense))), why="only leading layers may be dense")
    return {"first_k_dense_replace": len(dense)}


_UNTIED = {"tie_word_embeddings": False}
_LLAMA_BLOCK = {"gated_mlp": True, "normalization": "rmsnorm", "position_embedding": "rotary"}
_LLAMA = _Family(
    fixed=_LLAMA_BLOCK,
    defaults={**_UNTIED, "attention_bias": False, "mlp_bias": False},
    keys={"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
)
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_GEMMA = _Family(fixed={**_LLAMA_BLOCK, **_NO_BIAS}, defaults={"tie_word_embeddings": True, "head_dim": 256})
_GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_GPT_BLOCK = {"gated_mlp": False, "normalization": "layernorm"}
_DEEPSEEK = _Family(
    keys={
        **{key: key for key in _MLA_NAMES},
        "num_experts": "n_routed_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "num_shared_experts": "n_shared_experts",
        "n_group": "n_group",
        "topk_group": "topk_group",
        "first_k_dense_replace": "first_k_dense_replace",
        "num_nextn_predict_layers": "num_nextn_predict_layers",
        # The head_dim some files carry is not a head's width under MLA.
        "head_dim": "",
    },
    fixed={**_LLAMA_BLOCK, **_NO_BIAS},
    defaults=_UNTIED,
    derive=_derive_deepseek,
)
_T5 = _Family(
    keys={
        "num_hidden_layers": "num_layers",
        "num_decoder_layers": "num_decoder_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
    },
    fixed={"architecture": "encoder_decoder", "normalization": "rmsnorm", "position_embedding": "relative", **_NO_BIAS},
    defaults={"tie_word_embeddings": True},
    derive=_derive_t5,
)

_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _Family(fixed={**_LLAMA_BLOCK, **_NO_BIAS}, defaults=_UNTIED),
    "phi3": _Family(fixed={**_LLAMA_BLOCK, **_NO_BIAS}, defaults=_UNTIED),
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "qwen2": _Family(fixed={**_LLAMA_BLOCK, "attention_bias": True, "mlp_bias": False}, defaults=_UNTIED),
    "qwen3": _Family(
        fixed={**_LLAMA_BLOCK, "mlp_bias": False},
        defaults={**_UNTIED, "attention_bias": False, "head_dim": 128},
        keys={"attention_bias": "attention_bias"},
    ),
    "qwen3_moe": _Family(
        fixed={**_LLAMA_BLOCK, "mlp_bias": False},
        defaults={**_UNTIED, "attention_bias": False},
        keys={key: key for key in ("attention_bias", "num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        derive=_derive_qwen_moe,
    ),
    "mixtral": _Family(
        fixed={**_LLAMA_BLOCK, **_NO_BIAS},
        defaults=_UNTIED,
        keys={"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
    ),
    "gpt_oss": _Family(
        fixed={**_LLAMA_BLOCK, "mlp_bias": True},
        defaults={**_UNTIED, "attention_bias": True},
        keys={
            "attention_bias": "attention_bias",
            "num_experts": "num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok",
        },
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt2": _Family(
        keys=_GPT2_NAMES,
        fixed={**_GPT_BLOCK, "position_embedding": "learned", "attention_bias": True},
        defaults={"tie_word_embeddings": True},
    ),
    "gptj": _Family(
        keys=_GPT2_NAMES,
        fixed={**_GPT_BLOCK, "position_embedding": "rotary", "attention_bias": False, "mlp_bias": True},
        defaults=_UNTIED,
    ),
    "gpt_neox": _Family(
        keys={"attention_bias": "attention_bias"},
        fixed={**_GPT_BLOCK, "position_embedding": "rotary", "mlp_bias": True},
        defaults={**_UNTIED, "attention_bias": True},
    ),
    "opt": _Family(
        keys={"intermediate_size": "ffn_dim"},
        fixed={**_GPT_BLOCK, "position_embedding": "learned"},
        defaults={"tie_word_embeddings": True},
        derive=_derive_opt,
    ),
    "mpt": _Family(
        keys={
            "num_hidden_layers": "n_layers",
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        fixed=_GPT_BLOCK,
        defaults={"tie_word_embeddings": True},
        derive=_derive_mpt,
    ),
    "falcon": _Family(
        keys={"intermediate_size": "ffn_hidden_size"},
        fixed=_GPT_BLOCK,
        defaults={"tie_word_embeddings": True},
        derive=_derive_falcon,
    ),
    "t5": _T5,
    "mt5": _T5,
    "bert": _Family(
        fixed={"architecture": "encoder", **_GPT_BLOCK, "position_embedding": "learned", "attention_bias": True},
        defaults={"tie_word_embeddings": True},
    ),
}
