"""Starting hyperparameters against those that their sources used."""

from __future__ import annotations

import pytest

from hp_tool.domain.model import ModelSpec
from hp_tool.questions.sizing.laws import (
    batch_sequences,
    hyperparameter_flops,
    interpolate_gpt3,
    starting_hyperparameters,
)

LLAMA_LIKE = {
    "normalization": "rmsnorm",
    "gated_mlp": True,
    "tie_word_embeddings": False,
    "vocab_size": 102_400,
}
DEEPSEEK = {
    "7b": ModelSpec(
        num_hidden_layers=30,
        hidden_size=4096,
        num_attention_heads=32,
        intermediate_size=11008,
        **LLAMA_LIKE,
    ),
    "67b": ModelSpec(
        num_hidden_layers=95,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=22016,
        **LLAMA_LIKE,
    ),
}


@pytest.mark.parametrize(("name", "rate", "batch"), [("7b", 4.2e-4, 2304), ("67b", 3.2e-4, 4608)])
def test_deepseeks_own_models(name: str, rate: float, batch: int) -> None:
    # arXiv 2401.02954, table 2: 2e12 tokens in sequences of 4,096.
    model = DEEPSEEK[name]
    flops = hyperparameter_flops(model=model, sequence_length=4096, tokens=2e12)
    found = batch_sequences(flops=flops, sequence_length=4096, num_gpus=512)
    assert found == pytest.approx(batch, rel=0.15)
    choices = starting_hyperparameters(
        model=model, parameters=7e9, tokens=2e12, sequence_length=4096, global_batch_size=found
    )
    by_name = {choice.name: choice for choice in choices}
    assert by_name["learning_rate"].value == pytest.approx(rate, rel=0.03)
    assert by_name["learning_rate"].extrapolated
    assert by_name["warmup_steps"].value == pytest.approx(2_000, rel=0.05)
    assert all(choice.source and choice.rule for choice in choices)


@pytest.mark.parametrize(
    ("parameters", "rate", "batch"),
    [(125e6, 6e-4, 0.5e6), (13e9, 1e-4, 2e6), (175e9, 0.6e-4, 3.2e6)],
)
def test_rows_of_gpt3(parameters: float, rate: float, batch: float) -> None:
    assert interpolate_gpt3("learning_rate", parameters=parameters) == pytest.approx(rate)
    assert interpolate_gpt3("batch_tokens", parameters=parameters) == pytest.approx(batch)


def test_between_and_beyond_the_rows_of_gpt3() -> None:
    assert 1e-4 < interpolate_gpt3("learning_rate", parameters=9e9) < 1.2e-4
    assert interpolate_gpt3("learning_rate", parameters=1e12) == pytest.approx(0.6e-4)
    assert interpolate_gpt3("learning_rate", parameters=1e6) == pytest.approx(6e-4)


def test_a_small_dense_training_is_inside_the_fit_and_one_with_experts_is_not() -> None:
    small = ModelSpec(
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=51_200
    )
    mixture = ModelSpec(
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        vocab_size=51_200,
        num_experts=8,
        num_experts_per_tok=2,
    )
    for model, outside in ((small, False), (mixture, True)):
        rate, *_ = starting_hyperparameters(
            model=model, parameters=125e6, tokens=2.5e9, sequence_length=1024, global_batch_size=256
        )
        assert rate.extrapolated is outside


@pytest.mark.parametrize("num_gpus", [1, 8, 24, 96, 1024, 1536, 7 * 128])
def test_replicas_get_equal_shares(num_gpus: int) -> None:
    batch = batch_sequences(flops=1e23, sequence_length=4096, num_gpus=num_gpus)
    odd = num_gpus // (num_gpus & -num_gpus)
    assert batch % odd == 0 and (batch // odd) % 64 == 0
