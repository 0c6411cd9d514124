"""Dense decoders of Llama's kind: rotary positions, mostly RMSNorm and gated MLPs."""

from __future__ import annotations

from typing import Any

from hp_tool.catalog.huggingface.family import Config, Family, refuse, same

NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QKV_BIAS = {"attention_output_bias": False, "mlp_bias": False}
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
LLAMA_BLOCK = {"gated_mlp": True, "normalization": "rmsnorm", "position_embedding": "rotary"}
PLAIN = Family(fixed={**LLAMA_BLOCK, **NO_BIAS}, defaults=UNTIED)
"""No biases, whatever the file says."""
LLAMA = Family(fixed=LLAMA_BLOCK, defaults={**UNTIED, **NO_BIAS}, keys=same("attention_bias", "mlp_bias"))
QWEN3 = LLAMA.but(fixed={"query_key_norm": "head", "mlp_bias": False}, defaults={"head_dim": 128})
GEMMA = LLAMA.but(defaults={**TIED, "head_dim": 256}, fixed={"mlp_bias": False})
MLA_NAMES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT = PLAIN.but(keys={**same(*MLA_NAMES), "head_dim": ""})
"""Latent attention. The head_dim that some files carry is not a head's width there."""


def latent_biases(config: Config) -> dict[str, Any]:
    """Biases of latent attention would stand on the latents, which ModelSpec cannot say."""
    refuse(config, "attention_bias", unless=False, why="biases of latent attention are not modelled")
    return {}


def _cohere(config: Config) -> dict[str, Any]:
    return {"query_key_norm": "all_heads"} if config.get("use_qk_norm") else {}


def _phi(config: Config) -> dict[str, Any]:
    return {"query_key_norm": "head"} if config.get("qk_layernorm") else {}


def _stablelm(config: Config) -> dict[str, Any]:
    refuse(config, "qk_layernorm", unless=False, why="norms of queries and keys with a weight for each head are not modelled")
    return {"norms_per_layer": 1} if config.get("use_parallel_residual") else {}


def _hyperclovax(config: Config) -> dict[str, Any]:
    return {"norms_per_layer": 4 if config.get("use_post_norm", True) else 2}


_COHERE = LLAMA.but(
    fixed={"normalization": "layernorm", "norm_vectors": "weight", "norms_per_layer": 1, "mlp_bias": False},
    defaults=TIED,
    derive=_cohere,
)
_GLM = LLAMA.but(fixed=QKV_BIAS, defaults={"attention_bias": True})
_PHI_BLOCK = {"gated_mlp": False, "normalization": "layernorm", "attention_bias": True, "mlp_bias": True}

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": PLAIN,
    "ministral": PLAIN,
    "ministral3": PLAIN,
    "phi3": PLAIN,
    "arcee": LLAMA.but(fixed={"gated_mlp": False}),
    "cohere": _COHERE,
    "cohere2": _COHERE.but(full_attention_every=4),
    "cwm": PLAIN.but(full_attention_every=4),
    "ernie4_5": LLAMA.but(defaults=TIED, keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"}),
    "exaone4": PLAIN.but(fixed={"query_key_norm": "head"}, full_attention_every=4),
    "gemma": GEMMA,
    "gemma2": GEMMA.but(fixed={"norms_per_layer": 4}, full_attention_every=2),
    "gemma3_text": GEMMA.but(fixed={"norms_per_layer": 4, "query_key_norm": "head"}, full_attention_every=6),
    "vaultgemma": GEMMA.but(full_attention_every=2),
    "glm": _GLM,
    "glm4": _GLM.but(fixed={"norms_per_layer": 4}),
    "granite": LLAMA,
    "helium": LLAMA.but(fixed={"attention_output_bias": False}),
    "hunyuan_v1_dense": LLAMA.but(fixed={"query_key_norm": "head", "mlp_bias": False}),
    "hyperclovax": LLAMA.but(derive=_hyperclovax),
    "jais2": LLAMA.but(
        fixed={"gated_mlp": False, "normalization": "layernorm"}, defaults={"attention_bias": True, "mlp_bias": True}
    ),
    "minicpm3": LATENT.but(defaults=TIED, derive=latent_biases),
    "nanochat": LLAMA.but(fixed={"gated_mlp": False, "norm_vectors": "none", "mlp_bias": False}),
    "nemotron": LLAMA.but(fixed={"gated_mlp": False, "normalization": "layernorm"}),
    "olmo": LLAMA.but(fixed={"normalization": "layernorm", "norm_vectors": "none", "mlp_bias": False}),
    "olmo2": LLAMA.but(fixed={"query_key_norm": "all_heads", "mlp_bias": False}),
    "olmo3": LLAMA.but(fixed={"query_key_norm": "all_heads", "mlp_bias": False}, full_attention_every=4),
    "persimmon": Family(
        fixed={**_PHI_BLOCK, "position_embedding": "rotary"}, defaults={**UNTIED, "query_key_norm": "head"}, derive=_phi
    ),
    "phi": Family(
        fixed={**_PHI_BLOCK, "position_embedding": "rotary", "norms_per_layer": 1, "output_bias": True},
        defaults=UNTIED,
        derive=_phi,
    ),
    "qwen2": PLAIN.but(fixed={**QKV_BIAS, "attention_bias": True}),
    "qwen3": QWEN3,
    "seed_oss": LLAMA.but(keys={"attention_output_bias": "attention_out_bias"}, defaults={"attention_bias": True}),
    "smollm3": LLAMA.but(defaults=TIED),
    "stablelm": LLAMA.but(
        keys={"attention_bias": "use_qkv_bias"}, fixed={**QKV_BIAS, "normalization": "layernorm"}, derive=_stablelm
    ),
    "starcoder2": LLAMA.but(
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        fixed={"gated_mlp": False, "normalization": "layernorm"},
        defaults={**TIED, "attention_bias": True, "mlp_bias": True},
    ),
    "youtu": LATENT.but(defaults=TIED, derive=latent_biases),
}
