"""Models whose layers differ: what a pattern of blocks must hold, and what refuses to time them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hp_tool import api, catalog
from hp_tool.cost.matrices import cached_width
from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.recurrent import state_numbers
from hp_tool.domain.profiling import unsupported_model_fields
from hp_tool.errors import InputError, UnsupportedError

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
STATE = {"mamba_num_heads": 8, "mamba_head_dim": 20, "ssm_state_size": 12}
INDEXER = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 8}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {"blocks": [{"count": 3}]},
            "blocks",
            "3 layers in total, which does not divide num_hidden_layers 4",
        ),
        ({"blocks": []}, "blocks", "0 layers in total"),
        (
            {"blocks": [{"count": 2}], "first_k_dense_replace": 1},
            "first_k_dense_replace",
            "remove first_k_dense_replace",
        ),
        (
            {"blocks": [{}], "sliding_window": 8, "sliding_window_layers": 2},
            "sliding_window_layers",
            "remove sliding_window_layers",
        ),
        (
            {"blocks": [{"head_dim": n} for n in range(1, 301)], "num_hidden_layers": 300},
            "blocks",
            "300 kinds of layers",
        ),
        ({"blocks": [{}], "architecture": "encoder"}, "blocks", "blocks describe decoder layers"),
        (
            {"blocks": [{}, {"windowed": True}]},
            "sliding_window",
            "blocks with windowed: true require sliding_window",
        ),
        (
            {"blocks": [{}, {"shares_index": True}]},
            "index_topk",
            "blocks with shares_index: true require index_topk",
        ),
        ({"blocks": [{}, {"feed_forward": "experts"}]}, "num_experts", "set it"),
        (
            {"blocks": [{"num_key_value_heads": 4}]},
            "num_key_value_heads",
            "does not divide num_attention_heads 6",
        ),
        (
            {"blocks": [{"mixer": "mamba2"}], "mamba_num_heads": 8},
            "mamba_head_dim",
            "mamba_head_dim, ssm_state_size",
        ),
        ({"blocks": [{"mixer": "mamba"}]}, "mamba_inner_size", "set all of them"),
        (
            {"mixer": "gated_delta"},
            "linear_num_key_heads",
            "linear_num_key_heads, linear_key_head_dim",
        ),
        (
            {"mixer": "kimi_delta", "linear_num_key_heads": 4},
            "linear_key_head_dim",
            "layers of kimi_delta require",
        ),
        (
            {"linear_num_key_heads": 4, "linear_num_value_heads": 6},
            "linear_num_key_heads",
            "does not divide",
        ),
        (
            {"mamba_num_heads": 8, "mamba_n_groups": 3},
            "mamba_n_groups",
            "does not divide mamba_num_heads 8",
        ),
        ({"index_topk": 16}, "index_n_heads", "also set index_n_heads, index_head_dim"),
        ({"feed_forward": "experts"}, "num_experts", "set it"),
        (
            {"feed_forward": "dense", "num_experts": 4, "num_experts_per_tok": 1},
            "feed_forward",
            "remove one of them",
        ),
    ],
)
def test_a_pattern_that_is_no_model_is_refused(
    fields: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as refused:
        catalog.model_from_mapping(SHAPE | fields)
    assert refused.value.field == f"model.{field}"


def test_a_config_s_own_layers_of_prediction_are_those_that_are_modelled() -> None:
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*-",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "vocab_size": 1000,
        "num_nextn_predict_layers": 1,
        "intermediate_size": 200,
        **STATE,
    }
    silent = catalog.model_from_mapping(config)
    for same in (
        {"mtp_hybrid_override_pattern": "*-"},
        {"mtp_layers_block_type": ["attention", "mlp"]},
    ):
        assert catalog.model_from_mapping(config | same) == silent
    for other in ("M-", "**-"):
        with pytest.raises(
            UnsupportedError, match="multi-token prediction is modelled as"
        ) as refused:
            catalog.model_from_mapping(config | {"mtp_hybrid_override_pattern": other})
        assert refused.value.field == "model.mtp_hybrid_override_pattern"
    unused = config | {"num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": "M-"}
    assert not catalog.model_from_mapping(unused).num_nextn_predict_layers


def test_blocks_of_a_kind_are_counted_together() -> None:
    blocks = [
        {"count": 2, "mixer": "mamba2", "feed_forward": "none"},
        {"windowed": True, "head_dim": 8},
    ]
    fields = {
        "num_hidden_layers": 12,
        "sliding_window": 64,
        **STATE,
        "blocks": [*blocks, {"mixer": "mamba2", "feed_forward": "none"}],
    }
    model = catalog.model_from_mapping(SHAPE | fields)
    (states, mamba), (layers, attention) = model.kinds
    assert (states, layers) == (9, 3)
    assert (mamba.mixer, mamba.feed_forward, mamba.sliding_window) == ("mamba2", "none", None)
    assert (attention.head_size, attention.sliding_window, attention.num_hidden_layers) == (
        8,
        64,
        3,
    )
    assert not model.is_uniform


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks": [{}, {"mixer": "mamba2"}], **STATE},
        {"mixer": "mamba2", "feed_forward": "none", **STATE},
        {"feed_forward": "none"},
        INDEXER,
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_latent_size": 32},
        {"values_are_keys": True},
        {"attention_output_gate": "head"},
    ],
)
@pytest.mark.parametrize("kind", ["training", "size"])
def test_all_layers_are_trained(fields: dict[str, Any], kind: str) -> None:
    query: dict[str, Any] = {
        "model": SHAPE | fields,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    }
    if kind == "size":
        assert api.size(query | {"days": 1.0}).sizing
    else:
        answer = api.estimate(query | {"training": {"sequence_length": 64, "global_batch_size": 8}})
        assert answer.estimate.feasible


def test_a_model_that_keeps_no_cache_is_not_served() -> None:
    query = {
        "model": SHAPE | {"mixer": "mamba2", "feed_forward": "none", **STATE},
        "cluster": "h100-80gb-8",
    }
    with pytest.raises(
        UnsupportedError, match="custom: serving a model without attention layers is not supported"
    ) as refused:
        api.recommend(
            query | {"kind": "inference", "inference": {"input_length": 64, "output_length": 8}}
        )
    assert refused.value.field == "model.mixer"


def test_the_cache_and_the_states_of_qwen3_6_27b() -> None:
    """A published run of another engine: 262,144 tokens of four sequences in bf16, states in
    fp32.
    """
    model = catalog.model("qwen3.6-27b")
    cached = sum(layers * float(cached_width(kind, 1)) for layers, kind in model.kinds)
    states = sum(layers * float(state_numbers(kind, 1)) for layers, kind in model.kinds)
    assert cached * 262_144 * 2 == 16_384 * 2**20
    assert states * 4 * 4 == 598.5 * 2**20
    shared = sum(layers * float(state_numbers(kind, 4)) for layers, kind in model.kinds)
    assert shared * 4 == states, "heads of states are divided by tensor parallelism"


def test_an_indexer_keeps_a_key_of_its_own_unless_it_is_shared() -> None:
    latent = {
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        **INDEXER,
    }
    fields = {
        "blocks": [{}, {"shares_index": True}, {"indexed": False}],
        "num_hidden_layers": 3,
        "num_key_value_heads": 6,
    }
    model = catalog.model_from_mapping(SHAPE | latent | fields)
    assert [float(cached_width(kind, 1)) for _, kind in model.kinds] == [24 + 8 + 8, 24 + 8, 24 + 8]
    assert [kind.index_topk for _, kind in model.kinds] == [16, 16, None]


def test_a_printed_pattern_is_read_again() -> None:
    model = catalog.model("qwen3.6-27b")
    assert catalog.model_from_mapping(json.loads(json.dumps(dataclasses.asdict(model)))) == model


def searched(mult: float, group: int | None) -> dict[str, Any]:
    return {
        "attention": {"no_op": group is None, "n_heads_in_group": group},
        "ffn": {"ffn_mult": mult, "no_op": False},
    }


def test_a_searched_architecture_has_the_parameters_of_its_published_weights() -> None:
    """Llama 3.3 Nemotron Super 49B, whose weights are 49,867,145,216 numbers; its layers in another
    order.
    """
    alone = {1.3125: 10, 1.0: 8, 0.5: 6, 2.625: 5, 3.28125: 1, 5.25: 1}
    layers = [searched(5.25, 8)] * 48 + [searched(2.625, 8)]
    layers += [searched(mult, None) for mult, count in alone.items() for _ in range(count)]
    config = {
        "model_type": "nemotron-nas",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "vocab_size": 128256,
        "block_configs": layers,
    }
    model = catalog.model_from_mapping(config)
    assert total_parameters(model) == 49_867_145_216
    assert [(layers, kind.mixer) for layers, kind in model.kinds][:3] == [
        (48, "attention"),
        (1, "attention"),
        (10, "none"),
    ]
    linear = [{**searched(1.0, 8), "ffn": {"ffn_mult": 1.0, "replace_with_linear": True}}] * 80
    with pytest.raises(UnsupportedError, match="replace_with_linear"):
        catalog.model_from_mapping(config | {"block_configs": linear})
    mixture = [
        *layers[:-1],
        {**layers[-1], "ffn": {**layers[-1]["ffn"], "moe": {"num_local_experts": 8}}},
    ]
    with pytest.raises(UnsupportedError, match="block_configs moe: such layers"):
        catalog.model_from_mapping(config | {"block_configs": mixture})


def test_layers_of_a_search_may_say_their_sizes() -> None:
    """The later form of block_configs: heads and widths themselves, not heads of a group and a
    multiple.
    """
    sized = {
        "attention": {"num_key_value_heads": 2, "no_op": False},
        "ffn": {"intermediate_size": 160, "no_op": False},
    }
    without = {"attention": {"no_op": True}, "ffn": {"intermediate_size": 64}}
    config = {
        **SHAPE,
        "model_type": "nemotron-nas",
        "block_configs": [sized, sized, sized, without],
    }
    read = catalog.model_from_mapping(config)
    assert [
        (str(block.mixer), block.num_key_value_heads, block.intermediate_size, block.count)
        for block in read.blocks or ()
    ] == [
        ("attention", 2, 160, 3),
        ("none", None, 64, 1),
    ]


def test_what_kimi_k3_adds_to_kimi_linear() -> None:
    plain: dict[str, Any] = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "intermediate_size": 160,
        "vocab_size": 1000,
        "num_attention_heads": 6,
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 56,
        "first_k_dense_replace": 1,
    }
    linear = {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
        "head_dim": 10,
        "num_heads": 5,
        "short_conv_kernel_size": 4,
    }
    before = total_parameters(catalog.model_from_mapping(plain | {"linear_attn_config": linear}))

    def added(fields: dict[str, Any], gate: dict[str, Any]) -> float:
        return (
            total_parameters(
                catalog.model_from_mapping(plain | fields | {"linear_attn_config": linear | gate})
            )
            - before
        )

    h, delta, latent, sparse = 96, 3, 1, 3  # layers of each kind
    assert added({"mla_use_output_gate": True}, {}) == latent * h * 6 * 20
    assert added({}, {"use_full_rank_gate": True}) == delta * (h * 50 - h * 10 - 10 * 50)
    assert added({"attn_res_block_size": 2}, {}) == 4 * 4 * h, (
        "a norm and a vector before attention and MLP of four layers"
    )
    projections, narrower = 2 * h * 48, 8 * 3 * 56 * (h - 48)
    assert added({"routed_expert_hidden_size": 48}, {}) == sparse * (projections - narrower)
    assert added({"routed_expert_hidden_size": 48, "latent_moe_use_norm": True}, {}) == sparse * (
        projections - narrower + 48
    )


@pytest.mark.parametrize(
    "name", ["qwen3.6-27b", "deepseek-v3.2", "nemotron-3-super-120b-a12b", "gemma-4-31b"]
)
def test_no_run_builds_layers_that_are_only_counted(name: str) -> None:
    model = catalog.model(name)
    fields = [
        field
        for field, _ in unsupported_model_fields(
            model, sequence_length=64, of="training.sequence_length"
        )
    ]
    assert {"model.blocks", "model.index_topk"} & {*fields}


NOT_READ = ("deepseek_v4", "deepseek_ref")


def test_models_of_2026_are_read_or_refused_with_the_reason() -> None:
    named = os.environ.get("HP_REFERENCE_DATA")
    if not named:
        pytest.skip("HP_REFERENCE_DATA names no folder of configurations")
    lines = (Path(named) / "model_configs_2026.jsonl").read_text(encoding="utf-8").splitlines()
    configs = {line["name"]: line["config"] for line in map(json.loads, lines)}
    read = 0
    for name, config in configs.items():
        if config["model_type"] in NOT_READ:
            with pytest.raises(UnsupportedError, match="compressed attention keys"):
                catalog.model_from_mapping(config)
            continue
        assert total_parameters(catalog.model_from_mapping(config)) > 5e8, name
        read += 1
    assert read >= 69
