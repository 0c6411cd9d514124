"""MoE models."""

from typing import Any

from hp_tool.catalog.huggingface.decoders import (
    D_MODEL,
    LATENT,
    LLAMA,
    LLAMA_BLOCK,
    PLAIN,
    QKV_BIAS,
    QWEN3,
    TIED,
    UNTIED,
)
from hp_tool.catalog.huggingface.family import Config, Family, reject, same
from hp_tool.catalog.huggingface.layers import (
    dense_layers,
    dense_layers_by_step,
    layer_count,
    layer_fields,
    layer_list,
    parse_integer,
    parse_layer_numbers,
    with_dense_mlps,
)
from hp_tool.domain.blocks import Block

_DENSE_BETWEEN = "dense layers between MoE layers are not modelled"
LOCAL = {
    "num_experts": "num_local_experts num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}
ROUTED = {
    "num_experts": "n_routed_experts num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    **same("moe_intermediate_size n_group topk_group first_k_dense_replace"),
}


def _by_sparse_step(config: Config) -> dict[str, Any]:
    layers = layer_count(config)
    return _layers_with_dense_mlps(config, dense_layers_by_step(config, layers=layers))


def _layers_with_dense_mlps(config: Config, dense: list[bool]) -> dict[str, Any]:
    fields = layer_fields(with_dense_mlps([Block()] * len(dense), dense))
    if "blocks" in fields:
        reject(
            config,
            "use_sliding_window",
            unless=False,
            why="windows in models that mix dense and MoE layers are not modelled",
        )
    return fields


def _dense_or_sparse(config: Config) -> dict[str, Any]:
    """Return the layers, from the file's list of dense or sparse layers. By default, the first
    layers are dense.
    """
    return _layers_with_dense_mlps(config, dense_layers(config, layers=layer_count(config)))


def _qwen2(config: Config) -> dict[str, Any]:
    return {
        "num_shared_experts": 1 if config.get("shared_expert_intermediate_size") else 0,
        **_by_sparse_step(config),
    }


def _granite_shared(config: Config) -> dict[str, Any]:
    width = config.get("shared_intermediate_size", 0)
    return {"num_shared_experts": 1, "shared_expert_intermediate_size": width} if width else {}


def _ernie(config: Config) -> dict[str, Any]:
    layers, step = layer_count(config), max(parse_integer(config, "moe_layer_interval", 1), 1)
    first, last = (
        parse_integer(config, "moe_layer_start_index", 1),
        config.get("moe_layer_end_index", -1),
    )
    last = layers - 1 if last == -1 else parse_integer(config, "moe_layer_end_index")
    return _layers_with_dense_mlps(
        config, [(layer + 1) % step != 0 or not first <= layer <= last for layer in range(layers)]
    )


def _dbrx(config: Config) -> dict[str, Any]:
    attention, mlp = config.get("attn_config", {}), config.get("ffn_config", {})
    return {
        "num_key_value_heads": attention.get("kv_n_heads", 1),
        "intermediate_size": mlp.get("ffn_hidden_size", 3584),
        "num_experts": mlp.get("moe_num_experts", 4),
        "num_experts_per_tok": mlp.get("moe_top_k", 1),
    }


def _llama4(config: Config) -> dict[str, Any]:
    """Return Llama 4 Maverick's layers: experts in every second layer, and dense MLPs of another
    width in the others.
    """
    layers, step = (
        layer_count(config),
        max(parse_integer(config, "interleave_moe_layer_step", 1), 1),
    )
    sparse = (
        parse_layer_numbers(config, "moe_layers")
        if "moe_layers" in config
        else set(range(step - 1, layers, step))
    )
    if len(sparse) >= layers:
        return {}
    windows = {"full_attention": False, "chunked_attention": True}
    usual = [(layer + 1) % 4 != 0 for layer in range(layers)]
    chunked = layer_list(config, "layer_types", windows, layers=layers) or usual
    blocks = [
        Block(windowed=each, feed_forward=None if layer in sparse else "dense")
        for layer, each in enumerate(chunked)
    ]
    width = config.get("intermediate_size_mlp", 16384)
    return {
        "intermediate_size": width,
        "sliding_window": config.get("attention_chunk_size", 8192),
        **layer_fields(blocks),
    }


DEEPSEEK = LATENT.but(
    keys={**ROUTED, **same("num_nextn_predict_layers")},
    required={"moe_layer_freq": (1, _DENSE_BETWEEN)},
)
_GLM = LLAMA.but(
    keys={**ROUTED, **same("num_nextn_predict_layers")},
    fixed=QKV_BIAS,
    defaults=UNTIED,
    derive=lambda config: {"query_key_norm": "head"} if config.get("use_qk_norm") else {},
)
_QWEN3 = QWEN3.but(
    keys={**LOCAL, **same("moe_intermediate_size")},
    defaults={"head_dim": None},
    derive=_by_sparse_step,
)
_GRANITE = LLAMA.but(keys=LOCAL, fixed={"mlp_bias": False})
_OLMOE = LLAMA.but(keys=LOCAL, fixed={"query_key_norm": "all_heads", "mlp_bias": False})

FAMILIES: dict[str, Family] = {
    "mixtral": PLAIN.but(keys=LOCAL),
    "minimax_m2": PLAIN.but(keys=LOCAL, fixed={"query_key_norm": "all_heads"}),
    "qwen2_moe": LLAMA.but(
        keys={
            **LOCAL,
            **same("moe_intermediate_size shared_expert_intermediate_size"),
            "attention_bias": "qkv_bias",
        },
        defaults={"attention_bias": True},
        fixed={**QKV_BIAS, "shared_expert_gate": True},
        derive=_qwen2,
    ),
    "qwen3_moe": _QWEN3,
    "qwen3_omni_moe_text": _QWEN3,
    "qwen3_vl_moe_text": _QWEN3,
    "mellum": _QWEN3.but(derive=_dense_or_sparse),
    "solar_open": _GLM.but(
        required={"first_k_dense_replace": (0, "its class has experts in every layer")}
    ),
    "sarvam_moe": _GLM.but(defaults={"attention_bias": False}),
    "sarvam_mla": DEEPSEEK,
    "hy_v3": QWEN3.but(
        keys={**LOCAL, **same("moe_intermediate_size num_shared_experts")},
        derive=_dense_or_sparse,
    ),
    "llama4_text": PLAIN.but(
        keys={**LOCAL, "moe_intermediate_size": "intermediate_size"},
        fixed={"num_shared_experts": 1},
        defaults={"num_experts": 16, "num_experts_per_tok": 1},
        derive=_llama4,
        full_attention_every=4,
    ),
    "gpt_oss": Family(
        keys={**LOCAL, **same("attention_bias")},
        fixed={
            **LLAMA_BLOCK,
            "mlp_bias": True,
            "expert_bias": True,
            "router_bias": True,
            "attention_sinks": True,
        },
        defaults={**UNTIED, "attention_bias": True},
        full_attention_every=2,
    ),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK.but(derive=_dense_or_sparse),
    "dots1": QWEN3.but(keys=ROUTED, defaults={"head_dim": None}),
    "mistral4": DEEPSEEK,
    "glm4_moe": _GLM,
    "glm4v_moe_text": _GLM,
    "ernie4_5_moe": LLAMA.but(
        keys={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "num_shared_experts": "moe_num_shared_experts",
            "attention_bias": "use_bias",
            **same("moe_intermediate_size"),
        },
        fixed={"mlp_bias": False, "router_bias": True},
        defaults=TIED,
        derive=_ernie,
    ),
    "olmoe": _OLMOE,
    "flex_olmo": _OLMOE,
    "phimoe": LLAMA.but(
        keys={**LOCAL, "output_bias": "lm_head_bias"},
        fixed={"normalization": "layernorm", "mlp_bias": False},
    ),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE.but(derive=_granite_shared),
    "dbrx": Family(
        keys=D_MODEL,
        fixed={
            **LLAMA_BLOCK,
            "normalization": "layernorm",
            "norm_vectors": "weight",
            "attention_bias": False,
            "mlp_bias": False,
        },
        defaults=UNTIED,
        derive=_dbrx,
    ),
}
