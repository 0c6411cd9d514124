"""Dense decoders: models like Llama (rotary positions, mostly RMSNorm, gated MLPs) and models like
GPT.
"""

from typing import Any

from hp_tool.catalog.huggingface.family import Config, Family, reject, same

NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QKV_BIAS = {"attention_output_bias": False, "mlp_bias": False}
NARROW = "embeddings narrower than the layers are not modelled"
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
LLAMA_BLOCK = {"gated_mlp": True, "normalization": "rmsnorm", "position_embedding": "rotary"}
PLAIN = Family(fixed={**LLAMA_BLOCK, **NO_BIAS}, defaults=UNTIED)
"""Llama without biases, regardless of what the file sets."""
LLAMA = Family(
    fixed=LLAMA_BLOCK, defaults={**UNTIED, **NO_BIAS}, keys=same("attention_bias mlp_bias")
)
QWEN2 = PLAIN.but(fixed={**QKV_BIAS, "attention_bias": True})
QWEN3 = LLAMA.but(fixed={"query_key_norm": "head", "mlp_bias": False}, defaults={"head_dim": 128})
GEMMA = LLAMA.but(defaults={**TIED, "head_dim": 256}, fixed={"mlp_bias": False})
LATENT = PLAIN.but(
    keys={
        **same("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
        "head_dim": "",
    },
    required={
        "attention_bias": (
            False,
            "biases of latent attention, which are on the latents, are not modelled",
        )
    },
)
"""Multi-head latent attention. In some of these files, head_dim is not the head size."""
D_MODEL = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}


def _phi(config: Config) -> dict[str, Any]:
    return {"query_key_norm": "head"} if config.get("qk_layernorm") else {}


_COHERE = LLAMA.but(
    fixed={
        "normalization": "layernorm",
        "norm_vectors": "weight",
        "norms_per_layer": 1,
        "mlp_bias": False,
    },
    defaults=TIED,
    derive=lambda config: {"query_key_norm": "all_heads"} if config.get("use_qk_norm") else {},
)
_GLM = LLAMA.but(fixed=QKV_BIAS, defaults={"attention_bias": True})
_BLOCK = {"gated_mlp": False, "normalization": "layernorm"}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_PHI_BLOCK = {**_BLOCK, **_BIASES, "position_embedding": "rotary"}
_NAMES = {
    "num_hidden_layers": "n_layer num_layers num_hidden_layers",
    "hidden_size": "n_embd hidden_size",
    "num_attention_heads": "n_head num_heads num_attention_heads",
    "intermediate_size": "n_inner intermediate_size",
    "max_position_embeddings": "n_positions n_ctx max_position_embeddings",
}
_GPT2 = Family(
    keys=_NAMES, fixed={**_BLOCK, **_BIASES, "position_embedding": "learned"}, defaults=TIED
)
_GPTJ = Family(
    keys=_NAMES,
    fixed={
        **_BLOCK,
        "position_embedding": "rotary",
        "attention_bias": False,
        "mlp_bias": True,
        "norms_per_layer": 1,
        "output_bias": True,
    },
    defaults=UNTIED,
)


def _gpt_neo(config: Config) -> dict[str, Any]:
    kinds = [
        kind for pattern, times in config.get("attention_types", []) for kind in pattern * times
    ]
    local = kinds.count("local")
    return (
        {"sliding_window": config.get("window_size", 256), "sliding_window_layers": local}
        if local
        else {}
    )


def _opt(config: Config) -> dict[str, Any]:
    reject(config, "word_embed_proj_dim", unless=config.get("hidden_size"), why=NARROW)
    bias = config.get("enable_bias", True)
    final = config.get("do_layer_norm_before", True) and not config.get(
        "_remove_final_layer_norm", False
    )
    norms = {} if config.get("layer_norm_elementwise_affine", True) else {"norm_vectors": "none"}
    return {"attention_bias": bias, "mlp_bias": bias, "final_norm": final, **norms}


def _falcon(config: Config) -> dict[str, Any]:
    heads = config.get("num_attention_heads", config.get("n_head"))
    new = config.get("new_decoder_architecture", False)
    kv_heads = (
        config.get("num_kv_heads", heads)
        if new
        else 1
        if config.get("multi_query", True)
        else heads
    )
    two = (
        config.get("num_ln_in_parallel_attn", 2) == 2
        if new
        else not config.get("parallel_attn", True)
    )
    bias = config.get("bias", False)
    return {
        "num_key_value_heads": kv_heads,
        "attention_bias": bias,
        "mlp_bias": bias,
        "norms_per_layer": 2 if two else 1,
        "position_embedding": "none" if config.get("alibi", False) else "rotary",
    }


def _mpt(config: Config) -> dict[str, Any]:
    attention = config.get("attn_config", {})
    reject(
        attention,
        "qk_ln",
        unless=False,
        why="norms of queries and keys before the heads are split are not modelled",
    )
    # The class supports only ALiBi, whatever attn_config says about learned or rotary positions.
    fields: dict[str, Any] = {
        "intermediate_size": config.get("expansion_ratio", 4) * config["d_model"]
    }
    if attention.get("kv_n_heads"):
        fields["num_key_value_heads"] = attention["kv_n_heads"]
    return fields


_ERNIE = LLAMA.but(defaults=TIED, keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"})
_HUNYUAN = LLAMA.but(fixed={"query_key_norm": "head", "mlp_bias": False})
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": PLAIN,
    "ministral": PLAIN,
    "ministral3": PLAIN,
    "phi3": PLAIN,
    "arcee": LLAMA.but(fixed={"gated_mlp": False}),
    "cohere": _COHERE,
    "cohere2": _COHERE.but(full_attention_every=4),
    "cosmos3_edge_text": LLAMA.but(fixed={"gated_mlp": False}),
    "emu3_text_model": LLAMA,
    "exaone": LLAMA,
    "internlm3": LLAMA.but(
        keys={"attention_bias": "bias attention_bias", "mlp_bias": "bias mlp_bias"},
        required={"qkv_bias": (False, "biases of queries, keys and values alone are not modelled")},
    ),
    "iquestcoder": LLAMA,
    "cwm": PLAIN.but(full_attention_every=4),
    "ernie4_5": _ERNIE,
    "paddleocr_vl_text": _ERNIE,
    "exaone4": PLAIN.but(fixed={"query_key_norm": "head"}, full_attention_every=4),
    "gemma": GEMMA,
    "gemma2": GEMMA.but(fixed={"norms_per_layer": 4}, full_attention_every=2),
    "gemma3_text": GEMMA.but(
        fixed={"norms_per_layer": 4, "query_key_norm": "head"},
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262_208,
        },  # Multimodal files omit these keys.
        full_attention_every=6,
    ),
    "vaultgemma": GEMMA.but(full_attention_every=2),
    "glm": _GLM,
    "glm4": _GLM.but(fixed={"norms_per_layer": 4}),
    "glm4v_text": _GLM.but(fixed={"norms_per_layer": 4}),
    "glm_ocr_text": LLAMA.but(fixed={"norms_per_layer": 4}),
    "granite": LLAMA,
    "granite4_vision_text": LLAMA,
    "granite_docling_text": LLAMA,
    "helium": LLAMA.but(fixed={"attention_output_bias": False}),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hyperclovax": LLAMA.but(
        derive=lambda config: {"norms_per_layer": 4 if config.get("use_post_norm", True) else 2}
    ),
    "jais2": LLAMA.but(fixed=_BLOCK, defaults=_BIASES),
    "minicpm3": LATENT.but(defaults=TIED),
    "nanochat": LLAMA.but(fixed={"gated_mlp": False, "norm_vectors": "none", "mlp_bias": False}),
    "nemotron": LLAMA.but(fixed=_BLOCK),
    "olmo": LLAMA.but(
        fixed={"normalization": "layernorm", "norm_vectors": "none", "mlp_bias": False}
    ),
    "olmo2": LLAMA.but(fixed={"query_key_norm": "all_heads", "mlp_bias": False}),
    "olmo3": LLAMA.but(
        fixed={"query_key_norm": "all_heads", "mlp_bias": False}, full_attention_every=4
    ),
    "persimmon": Family(
        fixed=_PHI_BLOCK, defaults={**UNTIED, "query_key_norm": "head"}, derive=_phi
    ),
    "phi": Family(
        fixed={**_PHI_BLOCK, "norms_per_layer": 1, "output_bias": True},
        defaults=UNTIED,
        derive=_phi,
    ),
    "qwen2": QWEN2,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_omni_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3,
    "seed_oss": LLAMA.but(
        keys={"attention_output_bias": "attention_out_bias"}, defaults={"attention_bias": True}
    ),
    "smollm3": LLAMA.but(defaults=TIED),
    "stablelm": LLAMA.but(
        keys={"attention_bias": "use_qkv_bias"},
        fixed={**QKV_BIAS, "normalization": "layernorm"},
        required={
            "qk_layernorm": (
                False,
                "norms of queries and keys with a weight for each head are not modelled",
            )
        },
        derive=lambda config: {"norms_per_layer": 1} if config.get("use_parallel_residual") else {},
    ),
    "starcoder2": LLAMA.but(
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        fixed=_BLOCK,
        defaults={**TIED, **_BIASES},
    ),
    "youtu": LATENT.but(defaults=TIED),
    "gpt2": _GPT2,
    "gpt-sw3": _GPT2,
    "gpt_bigcode": _GPT2.but(
        derive=lambda config: {"num_key_value_heads": 1} if config.get("multi_query", True) else {}
    ),
    "gpt_neo": _GPT2.but(
        fixed={"attention_bias": False, "attention_output_bias": True}, derive=_gpt_neo
    ),
    "openai-gpt": _GPT2.but(fixed={"final_norm": False}),
    "ctrl": _GPT2.but(
        keys={"intermediate_size": "dff"}, fixed={"position_embedding": "none", "output_bias": True}
    ),
    "biogpt": _GPT2.but(fixed={"position_embedding_offset": 2}),
    "xglm": _GPT2.but(
        keys={
            "hidden_size": "d_model",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
        },
        fixed={"position_embedding": "none"},
    ),
    "gptj": _GPTJ,
    "codegen": _GPTJ,
    "gpt_neox": Family(
        keys=same("attention_bias"),
        fixed={**_BLOCK, "position_embedding": "rotary", "mlp_bias": True},
        defaults={**UNTIED, "attention_bias": True},
    ),
    "bloom": Family(
        keys={**_NAMES, "hidden_size": "hidden_size n_embed"},
        fixed={**_BLOCK, **_BIASES, "position_embedding": "none", "embedding_norm": True},
        defaults=TIED,
    ),
    "opt": Family(
        keys={"intermediate_size": "ffn_dim"},
        fixed={**_BLOCK, "position_embedding": "learned", "position_embedding_offset": 2},
        defaults=TIED,
        derive=_opt,
    ),
    "mpt": Family(
        keys=D_MODEL,
        required={"no_bias": (True, "the transformers class has no biases")},
        fixed={
            **_BLOCK,
            "norm_vectors": "weight",
            "position_embedding": "none",
            "attention_bias": False,
            "mlp_bias": False,
        },
        defaults=TIED,
        derive=_mpt,
    ),
    "falcon": Family(
        keys={**_NAMES, "intermediate_size": "ffn_hidden_size"},
        fixed=_BLOCK,
        defaults=TIED,
        derive=_falcon,
    ),
}
