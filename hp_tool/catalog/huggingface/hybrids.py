"""Decoders whose layers differ: recurrent mixers, state spaces, sliding windows, sparse
attention.
"""

import math
from dataclasses import replace
from typing import Any

from hp_tool.catalog.huggingface.decoders import GEMMA, LATENT, LLAMA, PLAIN, QWEN2, UNTIED
from hp_tool.catalog.huggingface.experts import DEEPSEEK, LOCAL, ROUTED
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
from hp_tool.domain.blocks import Block, FeedForward, Mixer
from hp_tool.errors import InputError, UnsupportedError

_ATTENTION, _WINDOW = Block(), Block(windowed=True)
_WINDOWS = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}
_NO_BIAS = dict.fromkeys(
    ("attention_bias", "mlp_bias"), (False, "biases of this class are not modelled")
)
_MAMBA_BIAS = {"mamba_proj_bias": (False, "biases of a state space's projections are not modelled")}


def linear_layers(config: Config, mixer: Mixer) -> list[Block]:
    """Return the layers of a model with a recurrent mixer. Unless the file lists the layers, every
    fourth layer has attention.
    """
    layers = layer_count(config)
    every = max(parse_integer(config, "full_attention_interval", 4), 1)
    meanings = {"linear_attention": Block(mixer=mixer), "full_attention": _ATTENTION}
    usual = [
        _ATTENTION if (layer + 1) % every == 0 else Block(mixer=mixer) for layer in range(layers)
    ]
    return layer_list(config, "layer_types", meanings, layers=layers) or usual


def _qwen3_5(config: Config) -> dict[str, Any]:
    return layer_fields(linear_layers(config, "gated_delta"))


def _qwen3_next(config: Config) -> dict[str, Any]:
    blocks = linear_layers(config, "gated_delta")
    return layer_fields(with_dense_mlps(blocks, dense_layers_by_step(config, layers=len(blocks))))


_NEMOTRON_H: dict[str, Block] = {
    name: block
    for names, block in (
        ("M mamba linear_attention", Block(mixer="mamba2", feed_forward="none")),
        ("* attention full_attention", Block(feed_forward="none")),
        ("- mlp", Block(mixer="none", feed_forward="dense")),
        ("E moe", Block(mixer="none")),
    )
    for name in names.split()
}


def _nemotron_h(config: Config) -> dict[str, Any]:
    reject(config, "use_bias", unless=False, why=_MAMBA_BIAS["mamba_proj_bias"][1])
    key = next(
        (key for key in ("layers_block_type", "hybrid_override_pattern") if key in config), None
    )
    if key is None or not isinstance(config[key], list | str):
        raise InputError(
            "layers_block_type must list the type of each layer", field="model.layers_block_type"
        )
    layers = len(config[key])
    blocks = layer_list(config, key, _NEMOTRON_H, layers=layers) or []
    _check_prediction(config, blocks)
    fields = {"num_hidden_layers": layers, **layer_fields(blocks)}
    if _NEMOTRON_H["E"] not in blocks:  # The class defines experts although no layer has them.
        fields |= {
            "num_experts": None,
            "num_experts_per_tok": None,
            "n_group": None,
            "topk_group": None,
        }
        return fields | {"num_shared_experts": 0, "moe_latent_size": None}
    reject(
        config, "mlp_bias", unless=False, why="biases of latent and shared experts are not modelled"
    )
    return fields


def _check_prediction(config: Config, blocks: list[Block]) -> None:
    """Check that the multi-token-prediction layer is the one that `ModelSpec.mtp_kinds` assumes:
    attention, and the MLP or experts of the model's last layer.

    Raises:
        UnsupportedError: The layer differs.
    """
    key = next(
        (
            key
            for key in ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
            if config.get(key)
        ),
        None,
    )
    depths = parse_integer(config, "num_nextn_predict_layers", 0)
    if key is None or not depths or not isinstance(config[key], list | str):
        return
    written = layer_list(config, key, _NEMOTRON_H, layers=len(config[key]))
    with_attention = [block for block in blocks if block.mixer == "attention"]
    usual = with_attention[-1:] + [block for block in blocks if block.feed_forward != "none"][-1:]
    if written not in (usual, usual * depths):
        why = "multi-token prediction is modelled as one attention layer and one MLP like the last"
        raise UnsupportedError(f"{key} {str(config[key])[:80]}: {why}", field=f"model.{key}")


def _sparse_attention(config: Config) -> dict[str, Any]:
    """Return the layers of GLM-5 and DeepSeek-V3.2, with sparse attention.

    Either each layer has an indexer, or only every few layers have one; the layers in between then
    reuse its selected keys.
    """
    layers = layer_count(config)
    with_indexer, reuses_indexer = Block(), Block(shares_index=True)
    meanings = {
        "full": with_indexer,
        "shared": reuses_indexer,
        "F": with_indexer,
        "S": reuses_indexer,
    }
    blocks = None
    for key in ("indexer_types", "index_topk_pattern"):
        blocks = blocks or layer_list(config, key, meanings, layers=layers)
    if blocks is None:
        every, offset = (
            max(parse_integer(config, "index_topk_freq", 1), 1),
            parse_integer(config, "index_skip_topk_offset", 2),
        )
        blocks = [
            reuses_indexer if max(layer - offset + 1, 0) % every else with_indexer
            for layer in range(layers)
        ]
    return layer_fields(with_dense_mlps(blocks, dense_layers(config, layers=layers)))


def _gemma4(config: Config) -> dict[str, Any]:
    for key, why in (
        ("hidden_size_per_layer_input", "separate inputs for each layer are not modelled"),
        ("num_kv_shared_layers", "layers that share keys and values are not modelled"),
    ):
        if parse_integer(config, key, 0):
            raise UnsupportedError(f"{key} {config[key]}: {why}", field=f"model.{key}")
    reject(
        config,
        "use_double_wide_mlp",
        unless=False,
        why="MLPs wider than the others are not modelled",
    )
    reject(
        config,
        "use_bidirectional_attention",
        unless="vision",
        why="attention to later tokens is not modelled",
    )
    layers, own = layer_count(config), _sizes_by_layer(config)
    keys = bool(config.get("attention_k_eq_v"))
    head = {"head_dim": config.get("global_head_dim", 512)}
    if keys and config.get("num_global_key_value_heads"):
        head["num_key_value_heads"] = config["num_global_key_value_heads"]
    usual = [(layer + 1) % 6 != 0 and layer + 1 < layers for layer in range(layers)]
    windowed = layer_list(config, "layer_types", _WINDOWS, layers=layers) or usual
    blocks = [
        _WINDOW if narrow else Block(values_are_keys=keys or None, **own.get(layer, head))
        for layer, narrow in enumerate(windowed)
    ]
    fields: dict[str, Any] = {
        "norms_per_layer": 4,
        **_window_field(config, blocks, 512),
        **layer_fields(blocks),
    }
    if not config.get("enable_moe_block"):
        return fields | {
            "num_experts": None,
            "num_experts_per_tok": None,
            "moe_intermediate_size": None,
        }
    # A dense MLP in parallel to the experts, with its own norms. The router's norm is the eighth,
    # and each expert has a scale.
    width = config.get("intermediate_size")
    return fields | {
        "norms_per_layer": 8,
        "router_bias": True,
        "num_shared_experts": 1,
        "shared_expert_intermediate_size": width,
    }


def _sizes_by_layer(config: Config) -> dict[int, dict[str, Any]]:
    """Return the sizes of each layer by number, from the `per_layer_config` that transformers
    writes.
    """
    written = config.get("per_layer_config") or {}
    names = ("head_dim", "num_attention_heads", "num_key_value_heads")
    try:
        return {
            int(layer): {name: sizes[name] for name in names if name in sizes}
            for layer, sizes in written.items()
        }
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise InputError(
            "per_layer_config must map layers to sizes", field="model.per_layer_config"
        ) from None


def _kimi_linear(config: Config) -> dict[str, Any]:
    layers, linear = layer_count(config), config.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        raise InputError("linear_attn_config must be a mapping", field="model.linear_attn_config")
    delta = Block(mixer="kimi_delta")
    blocks = layer_list(
        config,
        "layer_types",
        {"linear_attention": delta, "full_attention": _ATTENTION},
        layers=layers,
    )
    if blocks is None:
        full = parse_layer_numbers(linear, "full_attn_layers")  # Layer numbers start at 1.
        blocks = [_ATTENTION if layer + 1 in full else delta for layer in range(layers)]
    heads = {
        "linear_num_key_heads": linear.get("num_heads", config.get("linear_num_heads", 32)),
        "linear_key_head_dim": linear.get("head_dim", config.get("linear_head_dim", 128)),
        "linear_conv_kernel_dim": linear.get(
            "short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)
        ),
        "linear_full_rank_gate": linear.get("use_full_rank_gate", False),
    }
    # Attention and MLP each have a norm and a vector before them.
    norms = {"norms_per_layer": 6} if config.get("attn_res_block_size") else {}
    gate = {"attention_output_gate": "channel"} if config.get("mla_use_output_gate") else {}
    return (
        heads
        | norms
        | gate
        | layer_fields(with_dense_mlps(blocks, dense_layers(config, layers=layers)))
    )


def _minimax_m3(config: Config) -> dict[str, Any]:
    """Return the layers, with attention over blocks of keys that an indexer selects."""
    layers, sparse = layer_count(config), config.get("sparse_attention_config") or {}
    if not isinstance(sparse, dict):
        raise InputError(
            "sparse_attention_config must be a mapping", field="model.sparse_attention_config"
        )
    sizes = {field: config.get(field, sparse.get(key)) for field, key in _M3_INDEXER.items()}
    everywhere = Block(indexed=False)
    kinds = {"full_attention": everywhere, "minimax_m3_sparse": Block()}
    blocks = layer_list(config, "layer_types", kinds, layers=layers)
    blocks = blocks or layer_list(
        sparse, "sparse_attention_freq", {0: everywhere, 1: Block()}, layers=layers
    )
    blocks = blocks or [everywhere] * layers
    valued = (
        layer_list(sparse, "sparse_disable_index_value", {0: True, 1: False}, layers=layers)
        or [False] * layers
    )
    if any(block == Block() and value for block, value in zip(blocks, valued, strict=True)):
        why = "indexers with values are not modelled"
        raise UnsupportedError(
            f"sparse_disable_index_value: {why}", field="model.sparse_disable_index_value"
        )
    fields = layer_fields(with_dense_mlps(blocks, dense_layers(config, layers=layers)))
    width = config.get("moe_intermediate_size", config.get("intermediate_size"))
    fields |= {
        "moe_intermediate_size": width,
        "intermediate_size": config.get("dense_intermediate_size", 12288),
    }
    if Block() in [replace(block, feed_forward=None) for block in blocks]:
        heads, head = sizes["index_n_heads"], sizes["index_head_dim"]
        chosen = parse_integer(sizes, "index_topk_blocks", 16) * parse_integer(
            sizes, "index_block_size", 128
        )
        fields |= {"index_n_heads": heads, "index_head_dim": head, "index_topk": chosen}
    return fields


_M3_INDEXER = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}


def _mimo_v2(config: Config) -> dict[str, Any]:
    layers = layer_count(config)
    usual = [layer > 0 and (layer + 1) % 6 != 0 for layer in range(layers)]
    windowed = layer_list(config, "hybrid_layer_pattern", {0: False, 1: True}, layers=layers)
    windowed = windowed or layer_list(config, "layer_types", _WINDOWS, layers=layers) or usual
    kv_heads = parse_integer(config, "num_key_value_heads", 4)
    windowed_block = Block(
        windowed=True,
        num_attention_heads=config.get("swa_num_attention_heads"),
        num_key_value_heads=config.get("swa_num_key_value_heads", 2 * kv_heads),
        head_dim=config.get("swa_head_dim"),
        v_head_dim=config.get("swa_v_head_dim"),
        attention_sinks=config.get("add_swa_attention_sink_bias", True),
    )
    full_block = Block(attention_sinks=config.get("add_full_attention_sink_bias", False))
    dense = dense_layers(config, layers=layers)
    if not {"mlp_layer_types", "moe_layer_freq"} & config.keys():
        dense = [layer == 0 for layer in range(layers)]
    fields = layer_fields(
        with_dense_mlps([windowed_block if each else full_block for each in windowed], dense)
    )
    window = parse_integer(config, "sliding_window_size", 0)
    return fields | {"sliding_window": window + 1 if window else config.get("sliding_window", 129)}


def _window_field(config: Config, blocks: list[Block], usual: int) -> dict[str, Any]:
    return (
        {"sliding_window": config.get("sliding_window", usual)}
        if any(block.windowed for block in blocks)
        else {}
    )


def _step(config: Config) -> dict[str, Any]:
    layers = layer_count(config)
    windowed = layer_list(config, "layer_types", _WINDOWS, layers=layers) or [False] * layers
    other = config.get("attention_other_setting") or {}
    heads = config.get(
        "num_sliding_attention_heads",
        other.get("num_attention_heads") if isinstance(other, dict) else None,
    )
    usual = parse_integer(config, "num_attention_heads", 64)
    windowed_block = Block(windowed=True, num_attention_heads=None if heads == usual else heads)
    lists = {
        "mlp_layer_types",
        "moe_layer_freq",
        "moe_layers_enum",
        "first_k_dense_replace",
    } & config.keys()
    dense = dense_layers(config, layers=layers) if lists else [layer < 3 for layer in range(layers)]
    blocks = with_dense_mlps([windowed_block if each else _ATTENTION for each in windowed], dense)
    return _window_field(config, blocks, 512) | layer_fields(blocks)


def _nemotron_nas(config: Config) -> dict[str, Any]:
    layers, blocks = layer_count(config), config.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) < layers:
        raise InputError(
            f"block_configs must describe each of {layers} layers", field="model.block_configs"
        )
    try:
        return layer_fields(
            [
                _searched_blocks(block["attention"], block["ffn"], config)
                for block in blocks[:layers]
            ]
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError(
            "block_configs must contain attention and ffn for each layer",
            field="model.block_configs",
        ) from None


_OTHER_BLOCKS = (
    "replace_with_linear",
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "unshifted_sink",
    "moe",
    "mamba",
    "llama4",
)
"""Keys of blocks that are neither attention nor a dense MLP of another width."""


def _searched_blocks(attention: Config, mlp: Config, config: Config) -> Block:
    """Return the block of one layer found by neural architecture search (DeciLM): it may have no
    attention or another MLP width.
    """
    for part in (attention, mlp):
        for key in _OTHER_BLOCKS:
            if part.get(key):
                raise UnsupportedError(
                    f"block_configs {key}: such layers are not supported",
                    field="model.block_configs",
                )
    none: FeedForward = "none"
    if mlp.get("no_op"):
        ffn: dict[str, Any] = {"feed_forward": none}
    else:
        written = mlp.get("intermediate_size")
        ffn = {
            "intermediate_size": _mlp_width(mlp["ffn_mult"], config)
            if written is None
            else parse_integer(mlp, "intermediate_size")
        }
    if attention.get("no_op"):
        return Block(mixer="none", **ffn)
    if attention.get("num_key_value_heads") is not None:
        return Block(num_key_value_heads=parse_integer(attention, "num_key_value_heads"), **ffn)
    heads, group = (
        parse_integer(config, "num_attention_heads"),
        parse_integer(attention, "n_heads_in_group"),
    )
    return Block(num_key_value_heads=heads // max(group, 1), **ffn)


def _mlp_width(multiple: float, config: Config) -> int:
    """Return `multiple` x hidden_size x 2/3, rounded up to a multiple of 256 as in Llama."""
    return math.ceil(int(2 * multiple * parse_integer(config, "hidden_size") / 3) / 256) * 256


_DELTA = (
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "linear_conv_kernel_dim"
)
_QWEN3_5 = PLAIN.but(
    keys={**same(_DELTA), "num_nextn_predict_layers": "mtp_num_hidden_layers"},
    defaults={
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    fixed={"query_key_norm": "head", "attention_output_gate": "channel"},
    required={
        "attention_bias": (
            False,
            "biases in addition to a gate of attention's output are not modelled",
        ),
        "attn_output_gate": (True, "the class has a gate of attention's output"),
    },
    derive=_qwen3_5,
    describes_layers=True,
)
_QWEN3_NEXT = _QWEN3_5.but(
    keys={**LOCAL, **same("moe_intermediate_size shared_expert_intermediate_size")},
    defaults={
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fixed={"num_shared_experts": 1, "shared_expert_gate": True},
    derive=_qwen3_next,
)
_INDEXED = DEEPSEEK.but(
    keys=same("index_topk index_n_heads index_head_dim"),
    derive=_sparse_attention,
    describes_layers=True,
)
_MIMO_V2 = LLAMA.but(
    keys={**ROUTED, **same("v_head_dim num_nextn_predict_layers"), "first_k_dense_replace": ""},
    defaults={"head_dim": 192, "v_head_dim": 128},
    fixed={"mlp_bias": False, "attention_output_bias": False},
    derive=_mimo_v2,
    describes_layers=True,
)
_STEP = PLAIN.but(
    keys={
        "num_key_value_heads": "num_key_value_heads num_attention_groups",
        "num_experts": "n_routed_experts moe_num_experts num_experts",
        "num_experts_per_tok": "num_experts_per_tok moe_top_k",
        "shared_expert_intermediate_size": "share_expert_dim share_expert_dims",
        "num_nextn_predict_layers": "num_nextn_predict_layers num_mtp_layers",
        **same("moe_intermediate_size"),
    },
    defaults={
        "num_experts": 288,
        "num_experts_per_tok": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 1280,
    },
    fixed={"query_key_norm": "head", "attention_output_gate": "head", "num_shared_experts": 1},
    required=_NO_BIAS,
    derive=_step,
    describes_layers=True,
)
_MINIMAX_M3 = PLAIN.but(
    keys={
        **LOCAL,
        "shared_expert_intermediate_size": "shared_intermediate_size",
        "num_nextn_predict_layers": "num_nextn_predict_layers num_mtp_modules",
    },
    defaults={
        "shared_expert_intermediate_size": 3072,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "head_dim": 128,
    },
    fixed={"query_key_norm": "head", "num_shared_experts": 1},
    derive=_minimax_m3,
    describes_layers=True,
)
_GEMMA4 = GEMMA.but(
    keys={
        **same("num_experts moe_intermediate_size attention_bias"),
        "num_experts_per_tok": "top_k_experts",
    },
    fixed={"query_key_norm": "head"},
    derive=_gemma4,
    describes_layers=True,
)

FAMILIES: dict[str, Family] = {
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "nemotron_h": Family(
        keys={
            **{ours: theirs for ours, theirs in ROUTED.items() if ours != "first_k_dense_replace"},
            "head_dim": "head_dim attention_head_dim",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            "mamba_n_groups": "n_groups mamba_n_groups",
            "mamba_conv_kernel": "conv_kernel mamba_d_conv",
            "mamba_conv_bias": "use_conv_bias mamba_conv_bias",
            **same(
                "ssm_state_size mamba_num_heads mamba_head_dim moe_latent_size "
                "num_nextn_predict_layers"
            ),
            **same("mlp_bias"),
        },
        fixed={
            "normalization": "rmsnorm",
            "gated_mlp": False,
            "position_embedding": "none",
            "attention_bias": False,
        },
        defaults={**UNTIED, "mlp_bias": False, "head_dim": 128, "mamba_n_groups": 8},
        required=_MAMBA_BIAS,
        derive=_nemotron_h,
        describes_layers=True,
    ),
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "kimi_linear": LATENT.but(
        keys={
            "num_experts": "num_experts num_local_experts",
            "num_experts_per_tok": "num_experts_per_token num_experts_per_tok",
            "num_shared_experts": "num_shared_experts n_shared_experts",
            "n_group": "num_expert_group n_group",
            "moe_latent_size": "routed_expert_hidden_size",
            "moe_latent_norm": "latent_moe_use_norm",
            **same("topk_group moe_intermediate_size num_nextn_predict_layers"),
        },
        fixed={"position_embedding": "none"},
        derive=_kimi_linear,
        describes_layers=True,
    ),
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "mimo": QWEN2.but(keys=same("num_nextn_predict_layers")),
    "mimo_v2": _MIMO_V2,
    "mimo_v2_flash": _MIMO_V2,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "step3p7_text": _STEP,
    "nemotron-nas": LLAMA.but(derive=_nemotron_nas, describes_layers=True),
}
