"""State-space models (Mamba), with or without attention."""

import math
from typing import Any

from hp_tool.catalog.huggingface.decoders import LLAMA, PLAIN, TIED, UNTIED
from hp_tool.catalog.huggingface.experts import LOCAL
from hp_tool.catalog.huggingface.family import Config, Family, same
from hp_tool.catalog.huggingface.hybrids import linear_layers
from hp_tool.catalog.huggingface.layers import (
    layer_count,
    layer_fields,
    layer_list,
    parse_integer,
    parse_layer_numbers,
)
from hp_tool.domain.blocks import Block

_BIAS = "biases of a state space's projections are not modelled"
_ALONE = {
    "gated_mlp": False,
    "normalization": "rmsnorm",
    "position_embedding": "none",
    "feed_forward": "none",
    "num_attention_heads": 1,
}
"""Fields for layers without attention, in which head sizes have no meaning."""
_ALONE_KEYS = {
    "ssm_state_size": "state_size",
    "mamba_conv_kernel": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "head_dim": "",
    "intermediate_size": "",
    "max_position_embeddings": "",
    "num_key_value_heads": "",
}
_BESIDE_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "ssm_state_size": "mamba_d_state",
    "mamba_conv_kernel": "mamba_d_conv",
    **same("mamba_n_groups mamba_conv_bias"),
}
_REQUIRED = {"mamba_proj_bias": (False, _BIAS)}


def _inner_width(config: Config, *, expand: str) -> int:
    return parse_integer(config, expand, 2) * parse_integer(config, "hidden_size")


def _time_step_rank(config: Config, key: str) -> int:
    """Return the rank of the time-step projection; `auto` is hidden_size / 16."""
    return (
        parse_integer(config, key)
        if config.get(key, "auto") != "auto"
        else math.ceil(parse_integer(config, "hidden_size") / 16)
    )


def _mamba(config: Config) -> dict[str, Any]:
    inner = config.get("intermediate_size", _inner_width(config, expand="expand"))
    return {"mamba_inner_size": inner, "mamba_dt_rank": _time_step_rank(config, "time_step_rank")}


def _mamba2(config: Config) -> dict[str, Any]:
    return {
        "mamba_num_heads": config.get("num_heads", 128),
        "mamba_head_dim": config.get("head_dim", 64),
    }


def _mamba2_head_width(config: Config) -> dict[str, Any]:
    """Return Mamba 2's head size; `auto` is the inner width / number of heads."""
    if (width := config.get("mamba_d_head", "auto")) == "auto":
        width = _inner_width(config, expand="mamba_expand") // max(
            parse_integer(config, "mamba_n_heads", 128), 1
        )
    return {"mamba_head_dim": width}


def _bamba(config: Config) -> dict[str, Any]:
    layers, full = layer_count(config), parse_layer_numbers(config, "attn_layer_indices")
    return _mamba2_head_width(config) | layer_fields(
        [Block() if layer in full else Block(mixer="mamba2") for layer in range(layers)]
    )


def _granite(config: Config) -> dict[str, Any]:
    layers = layer_count(config)
    state = Block(mixer="mamba2")
    meanings = {
        "mamba": state,
        "linear_attention": state,
        "attention": Block(),
        "full_attention": Block(),
    }
    blocks = layer_list(config, "layer_types", meanings, layers=layers) or [state] * layers
    fields = _mamba2_head_width(config) | layer_fields(blocks)
    width = config.get("shared_intermediate_size", 1024)
    if parse_integer(config, "num_local_experts", 8):
        return fields | {
            "num_shared_experts": 1 if width else 0,
            "shared_expert_intermediate_size": width or None,
        }
    return fields | {"intermediate_size": width, "num_experts": None, "num_experts_per_tok": None}


def _jamba(config: Config) -> dict[str, Any]:
    layers, experts = layer_count(config), parse_integer(config, "num_experts", 16)

    def every(kind: str, period: int, offset: int) -> set[int]:
        period = max(parse_integer(config, f"{kind}_layer_period", period), 1)
        return {
            layer
            for layer in range(layers)
            if layer % period == parse_integer(config, f"{kind}_layer_offset", offset)
        }

    full, sparse = every("attn", 8, 4), every("expert", 2, 1) if experts > 1 else set()
    blocks = [
        Block(
            mixer="attention" if layer in full else "mamba",
            feed_forward=None if layer in sparse or experts < 2 else "dense",
        )
        for layer in range(layers)
    ]
    sizes = {
        "mamba_inner_size": _inner_width(config, expand="mamba_expand"),
        "mamba_dt_rank": _time_step_rank(config, "mamba_dt_rank"),
    }
    alone = {"num_experts": None, "num_experts_per_tok": None} if experts < 2 else {}
    return sizes | alone | layer_fields(blocks)


def _olmo_hybrid(config: Config) -> dict[str, Any]:
    return layer_fields(linear_layers(config, "gated_delta"))


FAMILIES: dict[str, Family] = {
    "mamba": Family(
        keys=_ALONE_KEYS,
        fixed={**_ALONE, "mixer": "mamba"},
        defaults={**TIED, "ssm_state_size": 16},
        required={"use_bias": (False, _BIAS)},
        derive=_mamba,
    ),
    "falcon_mamba": Family(
        keys=_ALONE_KEYS,
        fixed={**_ALONE, "mixer": "mamba"},
        defaults={**TIED, "ssm_state_size": 16},
        required={"use_bias": (False, _BIAS)},
        derive=_mamba,
    ),
    "mamba2": Family(
        keys={**_ALONE_KEYS, "mamba_n_groups": "n_groups"},
        fixed={**_ALONE, "mixer": "mamba2"},
        defaults={**UNTIED, "ssm_state_size": 128, "mamba_n_groups": 8},
        required={"use_bias": (False, _BIAS)},
        derive=_mamba2,
    ),
    "bamba": LLAMA.but(
        keys=_BESIDE_KEYS,
        defaults={"mamba_num_heads": 128, "ssm_state_size": 256},
        required=_REQUIRED,
        derive=_bamba,
        describes_layers=True,
    ),
    "granitemoehybrid": LLAMA.but(
        keys={**LOCAL, **_BESIDE_KEYS},
        fixed={"mlp_bias": False},
        defaults={"mamba_num_heads": 128, "ssm_state_size": 256},
        required=_REQUIRED,
        derive=_granite,
        describes_layers=True,
    ),
    "jamba": PLAIN.but(
        keys={
            **LOCAL,
            "ssm_state_size": "mamba_d_state",
            "mamba_conv_kernel": "mamba_d_conv",
            **same("mamba_conv_bias"),
        },
        defaults={"ssm_state_size": 16},
        fixed={"mamba_norms": True, "position_embedding": "none"},
        required=_REQUIRED,
        derive=_jamba,
        describes_layers=True,
    ),
    "olmo_hybrid": LLAMA.but(
        keys=same(
            "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
            "linear_conv_kernel_dim"
        ),
        fixed={"query_key_norm": "all_heads", "mlp_bias": False},
        derive=_olmo_hybrid,
        describes_layers=True,
    ),
}
