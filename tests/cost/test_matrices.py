"""The table of weight matrices, and that training and serving read the same one."""

import numpy as np
import pytest

from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import engine_profiles
from hp_tool.cost.matrices import attention_matrices, cached_width, layer_matrices
from hp_tool.cost.matrix import entries, shapes_by_source
from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.memory import weight_bytes
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.serving.problem import serving_case

SIZES = {
    "num_hidden_layers": 3,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "vocab_size": 1000,
    "normalization": "rmsnorm",
}
LATENT = {"kv_lora_rank": 160, "qk_nope_head_dim": 48, "qk_rope_head_dim": 24}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 200}
ODD_SHAPES = {
    "one wide head": {"num_attention_heads": 1, "head_dim": 96},
    "heads wider than the model": {
        "num_key_value_heads": 3,
        "head_dim": 160,
        "gated_mlp": True,
        "intermediate_size": 1001,
    },
    "one key head": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "latent, no value width": {**LATENT, "head_dim": 72},
    "latent, no value width, queries compressed": {**LATENT, "head_dim": 192, "q_lora_rank": 100},
    "latent, all widths": {**LATENT, "v_head_dim": 40, "gated_mlp": True},
    "latent, no width without rotation": {"kv_lora_rank": 160, "head_dim": 40},
    "experts as wide as the MLP": {**EXPERTS, "moe_intermediate_size": None},
    "experts behind a dense layer": {**EXPERTS, "first_k_dense_replace": 1, "gated_mlp": True},
    "shared experts, their own width": {
        **EXPERTS,
        "num_shared_experts": 2,
        "shared_expert_intermediate_size": 333,
    },
    "latent experts": {
        **EXPERTS,
        **LATENT,
        "num_shared_experts": 1,
        "gated_mlp": True,
        "first_k_dense_replace": 2,
    },
}


@pytest.fixture(params=ODD_SHAPES, name="model")
def odd_model(request: pytest.FixtureRequest) -> ModelSpec:
    return ModelSpec(**{**SIZES, **ODD_SHAPES[request.param]})


def by_hand(model: ModelSpec) -> tuple[float, float]:
    """(weights of all layers' matrices without routers, those of the routers), from the shape's own
    numbers.
    """
    h, a = model.hidden_size, model.num_attention_heads
    d = model.head_dim or h // a
    if model.kv_lora_rank:
        nope = d if model.qk_nope_head_dim is None else model.qk_nope_head_dim
        rope, value = model.qk_rope_head_dim or 0, model.v_head_dim or nope
        queries = a * (nope + rope) * (model.q_lora_rank or h) + (model.q_lora_rank or 0) * h
        attention = (
            queries
            + h * (model.kv_lora_rank + rope)
            + model.kv_lora_rank * a * (nope + value)
            + a * value * h
        )
    else:
        attention = 2 * h * a * d + 2 * h * (model.num_key_value_heads or a) * d
    per_width = (3 if model.gated_mlp else 2) * h
    ffn = model.intermediate_size or 4 * h
    layers, dense = model.num_hidden_layers, model.num_hidden_layers
    experts = 0
    if model.num_experts:
        dense = model.first_k_dense_replace
        expert = model.moe_intermediate_size or ffn
        shared = (
            (model.shared_expert_intermediate_size or model.num_shared_experts * expert)
            if model.num_shared_experts
            else 0
        )
        experts = per_width * (model.num_experts * expert + shared)
    routers = (layers - dense) * h * (model.num_experts or 0)
    return layers * attention + dense * per_width * ffn + (layers - dense) * experts, routers


def layer_counts(model: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """Layers without and with experts, as models of these alone."""
    counts = (
        (model.without_experts, model.num_hidden_layers - model.moe_layers),
        (model, model.moe_layers),
    )
    return [(kind, count) for kind, count in counts if count]


def test_training_and_serving_weigh_the_same_matrices(model: ModelSpec) -> None:
    matrices, routers = by_hand(model)
    weights = sum(count * entries(layer_matrices(kind)) for kind, count in layer_counts(model))
    assert weights == matrices + routers

    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    latent_norms = model.num_hidden_layers * ((model.kv_lora_rank or 0) + (model.q_lora_rank or 0))
    norms = (2 * model.num_hidden_layers + 1) * model.hidden_size
    assert total_parameters(model) == matrices + routers + embeddings + norms + latent_norms

    case = serving_case(
        model=model,
        cluster=cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=1)),
        workload=InferenceWorkload(input_length=128, output_length=16, precision="bf16"),
        engine=engine_profiles()[0],
    )
    alone = ServingCandidates.from_configs([ServingConfig()], concurrency=[1])
    assert weight_bytes(case, alone) == pytest.approx(2.0 * (matrices + embeddings), rel=1e-15)


def test_divided_matrices_lie_whole_on_all_ranks_together(model: ModelSpec) -> None:
    for kind, _ in layer_counts(model):
        whole = layer_matrices(kind)
        divided = layer_matrices(
            kind, tensor=np.array([1, 2, 4]), expert=2, expert_tensor=np.array([1, 5, 2])
        )
        assert [matrix.module for matrix in divided] == [matrix.module for matrix in whole]
        for one, part in zip(whole, divided, strict=True):
            if one.module == "linear_qkv" and model.kv_heads % 4:  # keys and values are copied
                continue
            copies = np.ones(3) if part.division == "replicated" else part.ranks
            assert part.entries * copies * (2 if part.routed else 1) == pytest.approx(
                one.entries * np.ones(3)
            )


def test_a_rank_keeps_one_key_value_head_where_there_are_fewer_heads_than_ranks() -> None:
    model = ModelSpec(**SIZES, num_key_value_heads=2)
    (fused, _) = attention_matrices(model, tensor=np.array([1, 2, 4]))
    queries, keys, values = fused.outputs
    assert queries.tolist() == [768, 384, 192]
    assert keys.tolist() == values.tolist() == [128, 64, 64]
    assert cached_width(model, np.array([1, 2, 4])).tolist() == [256, 128, 128]


def test_engines_read_the_projections_of_one_input_at_once() -> None:
    model = ModelSpec(**SIZES, **LATENT, q_lora_rank=100)
    down, *_ = shapes_by_source(attention_matrices(model))
    assert down == (100 + 160 + 24, 768)
