"""config.json files of released models give the shapes of the catalogue, architecture by
architecture.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import hp_tool
from hp_tool import catalog
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError, UnsupportedError

RELEASED: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_inner": None,
        "n_layer": 48,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary_dim": 64,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox",
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "tie_word_embeddings": False,
        "vocab_size": 50432,
    },
    "mpt-7b": {
        "model_type": "mpt",
        "attn_config": {"alibi": True},
        "d_model": 4096,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "vocab_size": 50432,
    },
    "falcon-180b": {
        "model_type": "falcon",
        "alibi": False,
        "bias": False,
        "hidden_size": 14848,
        "multi_query": True,
        "new_decoder_architecture": True,
        "num_attention_heads": 232,
        "num_hidden_layers": 80,
        "num_kv_heads": 8,
        "vocab_size": 65024,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "t5-base": {
        "model_type": "t5",
        "d_ff": 3072,
        "d_kv": 64,
        "d_model": 768,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "num_layers": 12,
        "vocab_size": 32128,
    },
    "t5-v1.1-xxl": {
        "model_type": "t5",
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "feed_forward_proj": "gated-gelu",
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    },
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "type_vocab_size": 2,
        "vocab_size": 30522,
    },
}


def shape(model: ModelSpec) -> dict[str, object]:
    """What a model's size and work depend on, derived values filled in."""
    return {
        "architecture": model.architecture,
        "layers": (model.num_hidden_layers, model.num_decoder_layers or model.num_hidden_layers),
        "width": model.hidden_size,
        "heads": (
            model.num_attention_heads,
            model.kv_heads,
            model.kv_lora_rank is None and model.head_size,
        ),
        "mlp": (model.ffn_size, model.gated_mlp, model.has_mlp_bias),
        "embedding": (model.tie_word_embeddings, model.positions),
        "norm": model.normalization,
        "attention": (
            model.has_attention_bias,
            model.kv_lora_rank,
            model.q_lora_rank,
            model.v_head_dim,
            model.qk_rope_head_dim,
        ),
        "experts": (
            model.num_experts,
            model.num_experts_per_tok,
            model.num_shared_experts,
            model.first_k_dense_replace,
        ),
        "expert": model.num_experts and (model.moe_intermediate_size or model.ffn_size),
        "next_tokens": model.num_nextn_predict_layers,
    }


def test_a_released_config_reads_as_the_catalogue_has_it(subtests: pytest.Subtests) -> None:
    for name in RELEASED:
        with subtests.test(name=str(name)):
            config = RELEASED[name]
            read = catalog.model_from_mapping(config)
            assert shape(read) == shape(catalog.model(name))
            assert read.vocab_size == config["vocab_size"]
            if (
                name != "mpt-7b"
            ):  # in the catalogue as llm-foundry trained it: another vocabulary, norms with biases
                assert total_parameters(read) == total_parameters(catalog.model(name))
            assert (read.sliding_window_layers or 0) == (
                catalog.model(name).sliding_window_layers or 0
            )


def test_architectures_stand_in_for_a_missing_model_type() -> None:
    for class_name, name in (
        ("Qwen3MoeForCausalLM", "qwen3-30b-a3b"),
        ("GPT2LMHeadModel", "gpt2-xl"),
        ("BertModel", "bert-large"),
    ):
        config = {**RELEASED[name], "architectures": [class_name]}
        del config["model_type"]
        assert shape(catalog.model_from_mapping(config)) == shape(catalog.model(name))


def test_defaults_of_the_configuration_classes() -> None:
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    }
    gemma = catalog.model_from_mapping({"model_type": "gemma2", **small})
    assert (gemma.tie_word_embeddings, gemma.head_size, gemma.gated_mlp, gemma.normalization) == (
        True,
        256,
        True,
        "rmsnorm",
    )
    opt = catalog.model_from_mapping({"model_type": "opt", "ffn_dim": 96, **small})
    assert (opt.tie_word_embeddings, opt.positions, opt.has_attention_bias, opt.ffn_size) == (
        True,
        "learned",
        True,
        96,
    )
    phi = catalog.model_from_mapping({"model_type": "phi3", **small})
    assert (phi.tie_word_embeddings, phi.gated_mlp, phi.positions) == (False, True, "rotary")
    old_falcon = catalog.model_from_mapping({"model_type": "falcon", "multi_query": True, **small})
    assert old_falcon.kv_heads == 1


WRAPPED: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "num_hidden_layers": 27,
    },
}


def test_a_wrapper_is_its_language_model_and_estimates_say_what_is_left_out() -> None:
    model = catalog.model_from_mapping(WRAPPED)
    assert total_parameters(model) == 3_880_263_168  # the language model of Gemma 3 4B
    assert model.name == "gemma3"
    assert (model.num_attention_heads, model.kv_heads, model.sliding_window_layers) == (8, 4, 29)
    assert model.left_out == (
        "vision_config (siglip_vision_model, 27 layers of 1152), all else of gemma3 but its "
        "text_config"
    )
    answer = hp_tool.estimate(
        model=WRAPPED,
        gpu="h100-sxm-80gb",
        num_gpus=8,
        sequence_length=2048,
        global_batch_size=8,
        parallel={"data_parallel_size": 8},
    )
    simplified = answer.estimate.provenance["simplified"]
    assert isinstance(simplified, list) and f"left out: {model.left_out}" in simplified
    assert "towers: about 0.43B weights count where served, untimed" in simplified


def test_a_wrapped_model_that_cannot_be_read_is_refused_by_its_own_type() -> None:
    with pytest.raises(
        UnsupportedError,
        match="'mllama_text_model' is not supported: cross-attention to images",
    ):
        catalog.model_from_mapping(
            {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model"}}
        )
    with pytest.raises(UnsupportedError, match="no text_config with the language model"):
        catalog.model_from_mapping({"model_type": "llava"})
    with pytest.raises(
        UnsupportedError, match="hidden_size_per_layer_input 256: separate inputs for each layer"
    ):
        inner = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}
        catalog.model_from_mapping({"model_type": "gemma4", "text_config": inner})


@pytest.mark.parametrize(
    ("unknown", "near"),
    [("llama3", "llama"), ("qwen4", "qwen3"), ("qwen3_vl_next", "qwen3_vl_text")],
)
def test_an_unknown_type_names_the_nearest(unknown: str, near: str) -> None:
    with pytest.raises(UnsupportedError, match=f"did you mean .*'{near}'"):
        catalog.model_from_mapping({"model_type": unknown})


def test_what_is_printed_with_a_model_is_checked_where_it_is_given() -> None:
    spec = catalog.model("qwen3-30b-a3b")
    counts = catalog.parameter_counts(spec)
    assert {name: round(value / 1e9, 2) for name, value in counts.items()} == {
        "num_parameters": 30.53,
        "num_active_parameters": 3.35,
    }
    assert catalog.model_from_mapping(dataclasses.asdict(spec) | counts) == spec
    fewer = catalog.model_from_mapping(
        dataclasses.asdict(spec) | counts | {"num_hidden_layers": 24}
    )
    assert catalog.parameter_counts(fewer)["num_parameters"] < counts["num_parameters"], (
        "counted anew"
    )


def test_an_unknown_type_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="model_type 'mambo' is not supported") as caught:
        catalog.model_from_mapping({"model_type": "mambo", "hidden_size": 64})
    assert caught.value.field == "model.model_type"


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        (
            "qwen3-30b-a3b",
            {"decoder_sparse_step": 2, "use_sliding_window": True},
            "model.use_sliding_window",
        ),
        ("deepseek-v3", {"moe_layer_freq": 2}, "model.moe_layer_freq"),
    ],
)
def test_layouts_that_cannot_be_held_are_refused(
    name: str, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        catalog.model_from_mapping(RELEASED[name] | change)
    assert caught.value.field == field


def test_a_missing_value_is_an_error_and_never_a_guess() -> None:
    config = {key: value for key, value in RELEASED["llama-3.1-8b"].items() if key != "hidden_size"}
    with pytest.raises(InputError, match="missing hidden_size"):
        catalog.model_from_mapping(config)


SIZES = {
    "num_hidden_layers": 8,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
}
DELTAS = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}
JAMBA = {"num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 4, "mamba_d_state": 12}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        # transformers' own defaults: every fourth layer has attention
        ({"model_type": "olmo_hybrid", **DELTAS}, "d d d a d d d a"),
        ({"model_type": "qwen3_5_text", "head_dim": 16, **DELTAS}, "d d d a d d d a"),
        (
            {"model_type": "qwen3_5_text", "head_dim": 16, "full_attention_interval": 2, **DELTAS},
            "d a d a d a d a",
        ),
        # JambaConfig: attention where layer % 4 == 1, experts (+) where layer % 2 == 1
        ({"model_type": "jamba", **JAMBA, "attn_layer_offset": 1}, "m a+ m m+ m a+ m m+"),
        (
            {"model_type": "jamba", **JAMBA, "attn_layer_offset": 2, "expert_layer_offset": 0},
            "m+ m a+ m m+ m a+ m",
        ),
    ],
)
def test_the_order_of_unlike_layers_is_that_of_the_class(
    config: dict[str, Any], layers: str
) -> None:
    read = catalog.model_from_mapping({**SIZES, **config})
    pattern = [
        {"attention": "a", "gated_delta": "d", "mamba": "m"}[block.mixer]
        + ("+" if read.num_experts and block.feed_forward != "dense" else "")
        for block in read.blocks or ()
        for _ in range(block.count)
    ]
    assert pattern * (8 // len(pattern)) == layers.split()


@pytest.mark.parametrize(
    ("given", "experts"),
    [
        ({}, [False, True, True, True]),  # MiMoV2FlashConfig: all but the first layer
        ({"moe_layer_freq": [0, 0, 1, 1]}, [False, False, True, True]),
        ({"mlp_layer_types": ["sparse", "sparse", "dense", "sparse"]}, [True, True, False, True]),
    ],
)
def test_layers_of_mimo_have_experts_as_its_lists_say_or_all_but_the_first(
    given: dict[str, Any], experts: list[bool]
) -> None:
    config = {
        **SIZES,
        "model_type": "mimo_v2_flash",
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 56,
    }
    read = catalog.model_from_mapping({**config, **given})
    kinds = [kind for _, kind in read.kinds]
    assert [kinds[place].num_experts == 8 for place in read.pattern] == experts
