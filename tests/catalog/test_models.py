"""Every model of the catalogue: it loads, says where it comes from, and has its published number of
parameters.
"""

from __future__ import annotations

import pytest

from hp_tool import catalog
from hp_tool.catalog import library, models
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError, NotFoundError

STABLE_NAMES = (
    "gpt3-175b",
    "gpt-22b",
    "mt-nlg-530b",
    "gpt-1t",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3.1-405b",
    "mixtral-8x7b",
    "qwen3-32b",
)
PRINTED_TO_TWO_DIGITS = {"gpt-1.7b": 0.03, "megatron-bert-1.3b": 0.03}
"""Published figures too coarse for the common tolerance."""


def attention_weights(model: ModelSpec) -> float:
    h, a = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank is None:
        return h * model.head_size * (2 * a + 2 * model.kv_heads)
    assert model.qk_nope_head_dim and model.qk_rope_head_dim and model.v_head_dim
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    query = model.q_lora_rank * (h + a * qk) if model.q_lora_rank else h * a * qk
    key_value = h * (model.kv_lora_rank + model.qk_rope_head_dim)
    expanded = model.kv_lora_rank * a * (model.qk_nope_head_dim + model.v_head_dim)
    return query + key_value + expanded + a * model.v_head_dim * h


def published_count(model: ModelSpec) -> float:
    """Weights of all matrices and embeddings; biases and norms are below the tolerance of every
    model here.
    """
    h, layers = model.hidden_size, model.num_hidden_layers
    matrices = 3 if model.gated_mlp else 2
    dense = matrices * h * model.ffn_size
    attention = attention_weights(model)
    if model.num_experts:
        expert = matrices * h * (model.moe_intermediate_size or model.ffn_size)
        shared = matrices * h * (model.shared_expert_intermediate_size or 0)
        shared = shared or model.num_shared_experts * expert
        moe = model.num_experts * expert + shared + h * model.num_experts
        first = model.first_k_dense_replace
        body = layers * attention + first * dense + (layers - first) * moe
    else:
        body = layers * (attention + dense)
    if model.architecture == "encoder_decoder":
        # A decoder layer has cross-attention beside what an encoder layer has.
        body += (model.num_decoder_layers or layers) * (2 * attention + dense)
    positions = model.max_position_embeddings or 0 if model.positions == "learned" else 0
    return body + h * (model.vocab_size * (1 if model.tie_word_embeddings else 2) + positions)


def test_each_model_has_its_published_size_and_a_source(subtests: pytest.Subtests) -> None:
    for entry in library.entries("models"):
        with subtests.test(entry=str(entry)):
            model = catalog.model(entry.name)
            assert model.name == entry.name
            assert entry.source
            if entry.parameters is not None:
                count = published_count(model) if model.is_uniform else total_parameters(model)
                assert count == pytest.approx(
                    entry.parameters, rel=PRINTED_TO_TWO_DIGITS.get(entry.name, 0.02)
                )


def test_most_models_carry_a_published_size() -> None:
    entries = library.entries("models")
    assert sum(entry.parameters is not None for entry in entries) > 0.75 * len(entries)


@pytest.mark.parametrize("name", STABLE_NAMES)
def test_stable_names_exist(name: str) -> None:
    assert catalog.model(name).name == name


def test_names_and_aliases_are_unique() -> None:
    names = [
        name.casefold()
        for entry in library.entries("models")
        for name in (entry.name, *entry.aliases)
    ]
    assert len(names) == len(set(names))


def test_the_four_models_of_2205_05198() -> None:
    shapes = {
        name: (m.num_hidden_layers, m.hidden_size, m.num_attention_heads, m.vocab_size)
        for name in ("gpt-22b", "gpt3-175b", "mt-nlg-530b", "gpt-1t")
        for m in [catalog.model(name)]
    }
    assert shapes == {
        "gpt-22b": (48, 6144, 64, 51200),
        "gpt3-175b": (96, 12288, 96, 51200),
        "mt-nlg-530b": (105, 20480, 128, 51200),
        "gpt-1t": (128, 25600, 160, 51200),
    }


def test_hugging_face_ids_are_aliases_in_any_case() -> None:
    assert catalog.model("meta-llama/Llama-3.1-8B") == catalog.model("llama-3.1-8b")
    assert catalog.model("qwen/qwen3-32b") == catalog.model("Qwen3-32B")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(NotFoundError, match=r"'lama-3-8b'; did you mean 'llama-3-8b'") as caught:
        catalog.model("lama-3-8b")
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"hiden_size": 64}, "model.hiden_size", "did you mean 'hidden_size'"),
        ({"num_hidden_layers": "2"}, "model.num_hidden_layers", "'2' is not a whole number"),
        ({"gated_mlp": 1}, "model.gated_mlp", "not true or false"),
        ({"normalization": "batchnorm"}, "model.normalization", "one of layernorm, rmsnorm"),
        (
            {"num_attention_heads": 3},
            "model.num_attention_heads",
            "64 is not a multiple of num_attention_heads 3",
        ),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads", "3 does not divide"),
        ({"vocab_size": 0}, "model.vocab_size", "from 1 to 67,108,864, got 0"),
        ({"num_experts": 8}, "model.num_experts_per_tok", "must be set together"),
        (
            {"num_experts": 8, "num_experts_per_tok": 9},
            "model.num_experts_per_tok",
            "9 is more than num_experts 8",
        ),
    ],
)
def test_a_wrong_mapping_names_field_value_and_mend(
    change: dict[str, object], field: str, message: str
) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    assert catalog.model_from_mapping(shape).hidden_size == 64
    with pytest.raises(InputError, match=message) as caught:
        catalog.model_from_mapping(shape | change)
    assert caught.value.field == field


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InputError, match="missing vocab_size"):
        catalog.model_from_mapping(
            {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        )


def test_a_name_near_to_nothing_says_where_to_look() -> None:
    with pytest.raises(NotFoundError, match=r"`hp-tool models` lists the \d+ known ones"):
        catalog.model("zzzzzzzz")


@pytest.mark.parametrize(
    ("name", "billions", "precision"),
    [
        ("moonshotai/Moonlight-16B-A3B-Instruct", 15.96, "bf16"),
        ("zai-org/GLM-4.5-Air-FP8", 106.85, "fp8"),
        ("zai-org/GLM-4.7-FP8", 352.8, "fp8"),
        ("ZhipuAI/GLM-4.5", 352.8, "bf16"),
        ("MiniMaxAI/MiniMax-M2", 228.7, "fp8"),
        ("moonshotai/Kimi-K2.7-Code", 1026.4, "int4"),
        ("Qwen/Qwen3.5-4B", 4.206, "bf16"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", 36.15, "bf16"),
        ("microsoft/Phi-4-mini-instruct", 3.836, "bf16"),
        ("tencent/Hy3-FP8", 295.03, "fp8"),
        ("stepfun-ai/Step-3.5-Flash", 195.84, "bf16"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 7.616, "bf16"),
        ("google/gemma-3-27b-it", 27.01, "bf16"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1, "bf16"),
        ("mistralai/Ministral-3-14B-Instruct-2512", 13.51, "fp8"),
        ("zai-org/GLM-4.7-Flash", 29.94, "bf16"),
        ("facebook/opt-1.3b", 1.316, "bf16"),
        ("EleutherAI/pythia-6.9b", 6.857, "bf16"),
        ("Qwen/Qwen3-Coder-Next", 79.67, "bf16"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.777, "bf16"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.55, "bf16"),
        ("Qwen/Qwen3Guard-Gen-0.6B", 0.596, "bf16"),
        ("AI-ModelScope/Nemotron-Mini-4B-Instruct", 4.19, "bf16"),
    ],
)
def test_published_checkpoints_have_their_shape(name: str, billions: float, precision: str) -> None:
    assert total_parameters(catalog.model(name)) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert models.published_precision(name) == precision
