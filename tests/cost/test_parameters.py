"""Parameter counts: published totals, and slices that sum to the whole."""

from __future__ import annotations

import dataclasses

import pytest

from hp_tool.catalog import cluster
from hp_tool.catalog import model as catalogue_model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.model_states import stage_parameters, state_costs
from hp_tool.cost.parameters import (
    active_parameters,
    embedding_parameters,
    layer_parameters,
    norm_weights,
    output_parameters,
    total_parameters,
)
from hp_tool.cost.pipeline_stages import complete_pipeline
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import case_of


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("t5-small", 60_506_624),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("t5-v1.1-xxl", 11_135_332_352),
        ("bert-base", 110_106_428),
        ("bert-large", 336_226_108),
    ],
)
def test_released_checkpoints_to_the_parameter(name: str, published: int) -> None:
    assert total_parameters(catalogue_model(name)) == published


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-22b", 22.0), ("gpt3-175b", 174.6), ("mt-nlg-530b", 529.6), ("gpt-1t", 1008.0)],
)
def test_gpt_models_as_their_papers_round_them(name: str, billions: float) -> None:
    """P = 12 L h^2 (1 + 13/12h + (V+s)/12hL), arXiv 2104.04473 equation 2, with the final norm
    beside.
    """
    shape = catalogue_model(name)
    h, layers = shape.hidden_size, shape.num_hidden_layers
    formula = (
        12 * layers * h**2 * (1 + 13 / (12 * h) + (shape.vocab_size + 2048) / (12 * h * layers))
    )
    assert total_parameters(shape, sequence_length=2048) == pytest.approx(
        formula + 2 * h, rel=1e-12
    )
    assert total_parameters(shape, sequence_length=2048) == pytest.approx(billions * 1e9, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.0), ("deepseek-v3", 37.0)]
)
def test_a_token_meets_the_experts_it_is_sent_to(name: str, billions: float) -> None:
    """Active parameters as their authors round them; DeepSeek leaves the embedding out (0.9
    billion).
    """
    shape = catalogue_model(name)
    assert active_parameters(shape) == pytest.approx(billions * 1e9, rel=0.02)
    assert active_parameters(
        dataclasses.replace(shape, num_experts_per_tok=shape.num_experts)
    ) == total_parameters(shape)


SHAPES = [
    ModelSpec(num_hidden_layers=8, hidden_size=512, num_attention_heads=8, vocab_size=1024),
    ModelSpec(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=1024,
        tie_word_embeddings=False,
    ),
    ModelSpec(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        gated_mlp=True,
        normalization="rmsnorm",
        intermediate_size=1536,
        tie_word_embeddings=False,
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", (2, 4))
def test_tensor_parallel_slices_sum_to_the_layer(shape: ModelSpec, t: int) -> None:
    """All slices together hold each matrix once; norms and row-parallel biases are on every
    rank.
    """
    repeated = 2 * norm_weights(shape) + shape.hidden_size * (
        int(shape.has_attention_bias) + int(shape.has_mlp_bias)
    )
    slices = t * float(layer_parameters(shape, tensor_parallel_size=t))
    assert slices - (t - 1) * repeated == float(layer_parameters(shape))


def test_ranks_beyond_the_key_value_heads_keep_whole_copies() -> None:
    shape = dataclasses.replace(SHAPES[2], num_key_value_heads=2)
    heads_each = {1: 2, 2: 1, 4: 1, 8: 1}
    for t, heads in heads_each.items():
        matrices = 512 * (2 * 512 / t + 2 * 64 * heads + 3 * 1536 / t)
        assert float(layer_parameters(shape, tensor_parallel_size=t)) == matrices + 2 * 512


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", (1, 2, 4))
def test_stages_sum_to_the_model(shape: ModelSpec, p: int) -> None:
    """Ends, and p - 2 middles of L/p layers. Tied weights count once more where the ends are
    different stages.
    """
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8)
    candidates = Candidates.from_configs([ParallelConfig(pipeline_parallel_size=p)])
    case = case_of(model=shape, workload=workload)
    first, last = (
        float(end[0])
        for end in stage_parameters(case, candidates, complete_pipeline(case, candidates))
    )
    copies = float(output_parameters(shape)) if shape.tie_word_embeddings and p > 1 else 0.0
    middles = max(p - 2, 0) * shape.num_hidden_layers / p * float(layer_parameters(shape))
    total = first if p == 1 else first + last + middles
    assert total == total_parameters(shape, sequence_length=128) + copies


def test_learned_positions_are_rows_of_their_table_or_of_the_sequence() -> None:
    shape = SHAPES[0]
    longer = dataclasses.replace(shape, max_position_embeddings=4096)
    assert float(embedding_parameters(shape, sequence_length=128)) == (1024 + 128) * 512
    assert float(embedding_parameters(longer, sequence_length=128)) == (1024 + 4096) * 512


@pytest.mark.parametrize(
    ("framework", "zero", "bytes_each"),
    [
        *(
            ("megatron-core", zero, each)
            for zero, each in enumerate([(2, 4, 12), (2, 4, 3), (2, 1, 3), (0.5, 1, 3)])
        ),
        ("torch-fsdp", 2, (4 / 4 + 2, 1, 2)),  # fp32 shards, and weights gathered in 16 bits
        ("torch-fsdp", 3, (4 / 4, 1, 2)),
    ],
)
def test_eighteen_bytes_a_parameter_sharded_by_stage(
    framework: str, zero: int, bytes_each: tuple[float, float, float]
) -> None:
    shape, machine = SHAPES[0], cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=4))
    workload = TrainingWorkload(sequence_length=128, global_batch_size=8, framework=framework)
    candidates = Candidates.from_configs([ParallelConfig(data_parallel_size=4, zero_stage=zero)])
    case = case_of(model=shape, workload=workload, cluster=machine)
    states = state_costs(
        case=case,
        candidates=candidates,
        pipeline=complete_pipeline(case, candidates),
        micro_batches=2.0,
    )
    parameters = total_parameters(shape, sequence_length=128)
    for stage in states.stages:
        found = [size[0] / parameters for size in (stage.weights, stage.gradients, stage.optimizer)]
        assert found == pytest.approx(bytes_each, rel=1e-14)
