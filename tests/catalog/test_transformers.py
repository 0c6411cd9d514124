"""Parameter counts of models read from config.json are those that transformers builds, class by
class, to the parameter.

Each configuration class writes its config.json as save_pretrained does; the model is built on the
meta device, without memory.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_tool import catalog
from hp_tool.catalog.huggingface.read import FAMILIES, REFUSED
from hp_tool.cost.parameters import total_parameters
from hp_tool.errors import UnsupportedError
from hp_tool.formats.exchange import read_query
from tests.catalog.published import PUBLISHED
from tests.catalog.test_huggingface import RELEASED
from tests.conftest import skip_or_fail

# Sizes that tell every part of a layer apart: no two of them are the same, and heads are wider than
# hidden / heads.
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "max_position_embeddings": 72,
    "pad_token_id": 1,
}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
ROUTED = {
    **LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 56,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 6,
}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
SIDES = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "d_model": 96,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 160,
    "decoder_ffn_dim": 160,
    "vocab_size": 1000,
    "max_position_embeddings": 72,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_model": 96,
    "num_heads": 6,
    "d_kv": 24,
    "d_ff": 160,
}
DBRX = {
    "d_model": 96,
    "n_heads": 6,
    "n_layers": 3,
    "max_seq_len": 72,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 160, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 96},
}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
SHARED = {**EXPERTS, "moe_intermediate_size": 56, "shared_expert_intermediate_size": 104}
STATE = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 24,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
}
ALONE = {"state_size": 12, "conv_kernel": 3}
INDEXER = {"index_head_dim": 28, "index_n_heads": 5, "index_topk": 16}
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 56,
    "moe_shared_expert_intermediate_size": 104,
    "num_experts_per_tok": 2,
}
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
GEMMA4 |= {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
}
KIMI = {
    **LATENT,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 10,
        "num_heads": 5,
        "short_conv_kernel_size": 3,
    },
}
M3 = {
    **LOCAL,
    "head_dim": 32,
    "dense_intermediate_size": 200,
    "shared_intermediate_size": 104,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_num_index_heads": 3,
        "sparse_index_dim": 28,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 8,
    },
}
MIMO = {
    "num_key_value_heads": 3,
    "head_dim": 32,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 56,
}
MAVERICK = {
    **LOCAL,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 200,
}

DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    ("mistral", {"head_dim": 32}),
    ("ministral", {"head_dim": 32}),
    ("ministral3", {"head_dim": 32}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("vaultgemma", {"head_dim": 32}),
    ("phi", {}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"pad_token_id": 0}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("granite", {"attention_bias": True}),
    ("cohere", {}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {}),
    ("stablelm", {"use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("starcoder2", {}),
    ("smollm3", {}),
    ("glm", {"head_dim": 16}),
    ("glm4", {"head_dim": 16}),
    ("helium", {"head_dim": 16, "attention_bias": True}),
    ("exaone4", {}),
    ("exaone", {"head_dim": 32}),
    ("exaone", {"attention_bias": True, "mlp_bias": True}),
    ("internlm3", {"head_dim": 32}),
    ("iquestcoder", {"head_dim": 32, "attention_bias": True}),
    ("seed_oss", {"head_dim": 32}),
    ("nemotron", {"head_dim": 16}),
    ("arcee", {"head_dim": 16}),
    ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    ("hunyuan_v1_dense", {"head_dim": 32}),
    ("hyperclovax", {"head_dim": 32}),
    ("jais2", {"head_dim": 16}),
    ("cwm", {"head_dim": 16}),
    ("persimmon", {}),
    ("nanochat", {}),
    ("minicpm3", {**LATENT, "num_key_value_heads": 6}),
    ("youtu", {**LATENT, "num_key_value_heads": 6}),
    ("gpt2", {}),
    ("gpt_bigcode", {}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1], [["global"], 1]]}),
    ("openai-gpt", {}),
    ("ctrl", {"dff": 160}),
    ("biogpt", {}),
    ("xglm", {"ffn_dim": 160}),
    ("gptj", {"rotary_dim": 8}),
    ("codegen", {"rotary_dim": 8, "num_attention_heads": 8}),
    ("gpt_neox", {}),
    ("bloom", {}),
    ("opt", {"ffn_dim": 160, "word_embed_proj_dim": 96}),
    (
        "opt",
        {
            "ffn_dim": 160,
            "word_embed_proj_dim": 96,
            "enable_bias": False,
            "do_layer_norm_before": False,
        },
    ),
    ("mpt", {"d_model": 96, "n_heads": 6, "n_layers": 3, "max_seq_len": 72}),
    ("falcon", {}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"parallel_attn": False, "multi_query": False, "alibi": True, "num_kv_heads": 6}),
    ("mixtral", LOCAL),
    ("minimax_m2", {**LOCAL, "head_dim": 32}),
    (
        "qwen2_moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 56,
            "shared_expert_intermediate_size": 104,
            "mlp_only_layers": [0],
        },
    ),
    ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 56, "head_dim": 32}),
    ("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 56, "decoder_sparse_step": 2}),
    ("qwen2_moe", {**SHARED, "num_hidden_layers": 4, "mlp_only_layers": [0, 2]}),
    ("gpt_oss", {**LOCAL, "head_dim": 32}),
    ("deepseek_v2", ROUTED),
    ("deepseek_v3", ROUTED),
    ("dots1", {**ROUTED, "head_dim": 32}),
    ("mellum", {**LOCAL, "moe_intermediate_size": 56, "head_dim": 32}),
    (
        "mellum",
        {**LOCAL, "moe_intermediate_size": 56, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    ("solar_open", {**ROUTED, "first_k_dense_replace": 0, "head_dim": 32, "attention_bias": True}),
    ("sarvam_moe", {**ROUTED, "head_dim": 32}),
    ("sarvam_moe", {**ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    ("sarvam_mla", {**ROUTED}),
    ("hy_v3", {**EXPERTS, "moe_intermediate_size": 56, "head_dim": 32, "num_shared_experts": 1}),
    (
        "hy_v3",
        {
            **EXPERTS,
            "moe_intermediate_size": 56,
            "head_dim": 32,
            "num_shared_experts": 2,
            "attention_bias": True,
        },
    ),
    ("glm4_moe", {**ROUTED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 56, "moe_layer_end_index": 2},
    ),
    (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 56, "moe_layer_interval": 2},
    ),
    (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 56, "moe_layer_end_index": 1},
    ),
    ("olmoe", EXPERTS),
    ("flex_olmo", EXPERTS),
    ("phimoe", {**LOCAL, "lm_head_bias": True, "attention_bias": True}),
    ("granitemoe", LOCAL),
    ("granitemoeshared", {**LOCAL, "shared_intermediate_size": 104}),
    ("dbrx", DBRX),
    ("glm4_moe_lite", {**ROUTED, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    ("glm4_moe_lite", {**ROUTED, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("deepseek_v32", {**ROUTED, **INDEXER}),
    ("glm_moe_dsa", {**ROUTED, **INDEXER}),
    ("glm_moe_dsa", {**ROUTED, **INDEXER, "indexer_types": ["full", "shared", "shared"]}),
    ("qwen3_next", {**DELTA, **SHARED, "head_dim": 32}),
    (
        "qwen3_next",
        {**DELTA, **SHARED, "head_dim": 32, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    ("qwen3_5_text", {**DELTA, "head_dim": 32}),
    (
        "qwen3_5_text",
        {
            **DELTA,
            "layer_types": ["full_attention"] + 3 * ["linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
    ("qwen3_5_moe_text", {**DELTA, **SHARED, "head_dim": 32}),
    ("nemotron_h", NEMOTRON),
    (
        "nemotron_h",
        {**NEMOTRON, "moe_latent_size": 48, "use_conv_bias": False, "attention_bias": True},
    ),
    (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention"], "mlp_bias": True},
    ),
    ("gemma4_text", {**GEMMA4, "num_global_key_value_heads": 1}),
    ("gemma4_unified_text", {**GEMMA4, "num_global_key_value_heads": 1}),
    ("gemma4_text", {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    (
        "gemma4_text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 56,
        },
    ),
    ("kimi_linear", KIMI),
    (
        "kimi_linear",
        {**KIMI, "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    ("minimax_m3_vl_text", M3),
    ("mimo_v2_flash", MIMO),
    (
        "mimo_v2_flash",
        {**MIMO, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    ("llama4_text", MAVERICK),
    ("mamba", ALONE),
    ("mamba", {**ALONE, "expand": 3, "use_conv_bias": False, "time_step_rank": 7}),
    ("falcon_mamba", ALONE),
    ("mamba2", {**ALONE, "num_heads": 8, "head_dim": 24, "n_groups": 2}),
    ("bamba", {**STATE, "attn_layer_indices": [1]}),
    (
        "bamba",
        {
            **STATE,
            "attn_layer_indices": [3],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    (
        "jamba",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "mamba_d_state": 12,
        },
    ),
    (
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 7,
        },
    ),
    (
        "granitemoehybrid",
        {
            **STATE,
            **LOCAL,
            "layer_types": 2 * ["mamba"] + ["attention", "mamba"],
            "shared_intermediate_size": 104,
        },
    ),
    (
        "granitemoehybrid",
        {
            **STATE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 104,
            "layer_types": ["attention"] + 3 * ["mamba"],
        },
    ),
    ("olmo_hybrid", DELTA),
]
ENCODERS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"architectures": ["BertForMaskedLM"]}),
    ("roberta", {}),
    ("xlm-roberta", {}),
    ("camembert", {}),
    ("data2vec-text", {}),
    ("electra", {"embedding_size": 96}),
    ("ernie", {}),
    ("distilbert", {"dim": 96, "hidden_dim": 160, "n_heads": 6, "n_layers": 3}),
    ("megatron-bert", {"architectures": ["MegatronBertForMaskedLM"]}),
    ("roberta-prelayernorm", {}),
    ("xlm-roberta-xl", {"type_vocab_size": 3}),
    ("nomic_bert", {"head_dim": 16}),
    ("eurobert", {"head_dim": 16}),
    (
        "modernbert",
        {"num_hidden_layers": 4, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
]
TWO_SIDED: list[tuple[str, dict[str, Any]]] = [
    ("t5", T5),
    ("t5", {**T5, "feed_forward_proj": "gated-gelu"}),
    ("mt5", T5),
    ("umt5", T5),
    ("bart", SIDES),
    ("plbart", SIDES),
    ("mvp", SIDES),
    ("mbart", SIDES),
    ("pegasus", SIDES),
    ("blenderbot", SIDES),
    ("blenderbot-small", SIDES),
    ("m2m_100", SIDES),
    ("marian", {**SIDES, "decoder_vocab_size": 1000}),
]
CASES = [
    *(("AutoModelForCausalLM", *case) for case in DECODERS),
    *(("AutoModelForMaskedLM", *case) for case in ENCODERS),
    *(("AutoModelForSeq2SeqLM", *case) for case in TWO_SIDED),
]
HEADS = {model_type: head for head, model_type, _ in CASES}


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """The library, quiet and offline."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch
        import transformers as library
    except ImportError:
        skip_or_fail(component="TRANSFORMERS", reason="transformers is not installed")
    library.logging.set_verbosity_error()
    with torch.device("meta"):
        yield library


def configured(library: Any, model_type: str, changes: dict[str, Any]) -> Any:
    """The class's configuration with SMALL's sizes under the names the class has for them."""
    plain = library.AutoConfig.for_model(model_type)
    names = {name: plain.attribute_map.get(name, name) for name in SMALL}
    sizes = {names[name]: size for name, size in SMALL.items() if hasattr(plain, names[name])}
    return library.AutoConfig.for_model(model_type, **(sizes | changes))


@pytest.mark.parametrize(
    ("head", "model_type", "changes"), CASES, ids=[f"{case[1]}-{n}" for n, case in enumerate(CASES)]
)
def test_counts_are_those_of_transformers(
    transformers: Any, head: str, model_type: str, changes: dict[str, Any]
) -> None:
    config = configured(transformers, model_type, changes)
    built = getattr(transformers, head).from_config(config)
    read = catalog.model_from_mapping(config.to_diff_dict())
    assert total_parameters(read) == sum(parameter.numel() for parameter in built.parameters())
    assert read.num_hidden_layers in (2, 3, 4) and read.hidden_size == 96


@pytest.mark.parametrize(
    "name", sorted({*RELEASED, *PUBLISHED} - {"t5-v1.1-xxl"})
)  # which transformers 5 ties
def test_counts_of_released_models(transformers: Any, name: str) -> None:
    config = RELEASED[name] if name in RELEASED else PUBLISHED[name][0]
    model_type = config["model_type"]
    ours = {
        key: value
        for key, value in config.items()
        if key not in ("model_type", "architectures", "torch_dtype")
    }
    head = "AutoModelForPreTraining" if model_type == "bert" else HEADS[model_type]
    built = getattr(transformers, head).from_config(
        transformers.AutoConfig.for_model(model_type, **ours)
    )
    read = catalog.model_from_mapping(config)
    assert total_parameters(read) == sum(parameter.numel() for parameter in built.parameters())


def test_counts_are_the_published_ones(subtests: pytest.Subtests) -> None:
    for name in PUBLISHED:
        with subtests.test(name=str(name)):
            config, parameters = PUBLISHED[name]
            assert total_parameters(catalog.model_from_mapping(config)) == parameters


def test_bert_is_pretrained_with_both_heads(transformers: Any) -> None:
    config = configured(transformers, "bert", {})
    built = transformers.BertForPreTraining(config)
    read = catalog.model_from_mapping(config.to_diff_dict())
    assert total_parameters(read) == sum(parameter.numel() for parameter in built.parameters())


def test_counts_of_a_model_whose_class_has_no_output_layer(transformers: Any) -> None:
    config = configured(transformers, "mistral4", ROUTED)
    built = transformers.AutoModel.from_config(config)
    read = catalog.model_from_mapping(config.to_diff_dict())
    head = SMALL["vocab_size"] * SMALL["hidden_size"]
    assert (
        total_parameters(read) == sum(parameter.numel() for parameter in built.parameters()) + head
    )


def test_every_type_that_is_read_is_counted() -> None:
    """Types without a configuration class of their own in transformers aside."""
    counted = {model_type for _, model_type, _ in CASES}
    counted |= {inner for inner, _ in INNER.values()} | {"mistral4"} | set(TEXT_MODELS)
    assert set(FAMILIES) - counted == {
        "gpt-sw3",
        "kimi_k2",
        "mimo",
        "mimo_v2",
        "minimax_m3",
        "nemotron-nas",
        "step3p7",
        "step3p7_text",
    }
    assert not counted & set(REFUSED)
    assert len(counted) >= 80


def test_the_page_names_the_types_that_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"`([^`]+)`", "".join(table))) == sorted(FAMILIES)


TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosmos3_edge_text": ("cosmos3_edge.Cosmos3EdgeTextModel", {}),
    "emu3_text_model": ("emu3.Emu3TextModel", {}),
    "glm_ocr_text": ("glm_ocr.GlmOcrTextModel", {"head_dim": 32}),
    "hunyuan_vl_text": ("hunyuan_vl.HunYuanVLTextModel", {"head_dim": 32}),
    "granite4_vision_text": ("granite4_vision.Granite4VisionTextModel", {}),
    "granite_docling_text": ("granite_docling.GraniteDoclingTextModel", {}),
    "paddleocr_vl_text": ("paddleocr_vl.PaddleOCRTextModel", {"head_dim": 32}),
    "qwen2_5_omni_text": ("qwen2_5_omni.Qwen2_5OmniThinkerTextModel", {}),
    "qwen3_omni_moe_text": (
        "qwen3_omni_moe.Qwen3OmniMoeThinkerTextModel",
        {**EXPERTS, "moe_intermediate_size": 56, "head_dim": 32},
    ),
}
"""Language models that only wrapping types use: module and class, changes."""


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_counts_of_a_text_model(transformers: Any, model_type: str) -> None:
    place, changes = TEXT_MODELS[model_type]
    folder, name = place.split(".")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(module, name)
    settings = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    kinds = (each for each in vars(settings).values() if isinstance(each, type))
    configuration = next(each for each in kinds if getattr(each, "model_type", None) == model_type)
    config = configuration(**{**SMALL, **changes, "tie_word_embeddings": False})
    expected = sum(parameter.numel() for parameter in kind(config).parameters())
    read = catalog.model_from_mapping({**config.to_dict(), "model_type": model_type})
    assert total_parameters(read) == expected + SMALL["vocab_size"] * SMALL["hidden_size"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LiquidAI/LFM2.5-1.2B-Instruct", "recurrent or convolutional"),
        ("deepseek-ai/DeepSeek-V4-Flash", "compressed attention keys"),
        ("tiiuae/Falcon-H1-0.5B-Instruct", "in parallel"),
    ],
)
def test_a_checkpoint_of_a_refused_type_is_refused_by_its_mechanism(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        catalog.model(name)
    command = f"vllm serve {name}\n"
    given = {"inference.input_length": 10, "inference.output_length": 10}
    with pytest.raises(UnsupportedError, match=reason):
        read_query(command, overrides={"cluster.gpu": "h100-sxm-80gb"} | given)


INNER = {
    "mistral3": ("mistral", {"head_dim": 32}),
    "qwen2_vl": ("qwen2_vl_text", {}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 32}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {**EXPERTS, "moe_intermediate_size": 56, "head_dim": 32}),
    "gemma3": ("gemma3_text", {"head_dim": 32}),
    "glm4v": ("glm4v_text", {}),
    "glm4v_moe": ("glm4v_moe_text", {**ROUTED, "head_dim": 32, "attention_bias": True}),
    "llama4": (
        "llama4_text",
        {**LOCAL, "head_dim": 16, "interleave_moe_layer_step": 1, "intermediate_size": 160},
    ),
    "qwen3_5": ("qwen3_5_text", {**DELTA, "head_dim": 32}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **SHARED, "head_dim": 32}),
    "minimax_m3_vl": ("minimax_m3_vl_text", M3),
    "step3p7": (
        "step3p5",
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 56,
            "share_expert_dim": 104,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_sliding_attention_heads": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "sliding_window": 16,
        },
    ),
}
"""Types that wrap a language model, and that model's own."""


@pytest.mark.parametrize("model_type", INNER)
def test_counts_of_a_wrapped_language_model(transformers: Any, model_type: str) -> None:
    inner_type, changes = INNER[model_type]
    library = transformers
    whole = library.AutoConfig.for_model(
        model_type, text_config={"model_type": inner_type, **SMALL, **changes}
    )
    built = library.AutoModelForImageTextToText.from_config(whole)
    text = built.model.language_model if hasattr(built, "model") else built.language_model.model
    expected = sum(parameter.numel() for parameter in text.parameters())
    read = catalog.model_from_mapping(whole.to_dict())
    if not read.tie_word_embeddings:
        expected += SMALL["vocab_size"] * SMALL["hidden_size"]
    assert total_parameters(read) == expected
    assert read.left_out is not None and f"{model_type} but its text_config" in read.left_out
    assert "vision_config" in read.left_out
    both = [sum(parameter.numel() for parameter in each.parameters()) for each in (built, text)]
    beside = both[0] - both[1]
    beside -= 0 if read.tie_word_embeddings else SMALL["vocab_size"] * SMALL["hidden_size"]
    assert read.tower_parameters == pytest.approx(beside, rel=0.2)
