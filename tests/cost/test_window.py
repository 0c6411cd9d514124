"""Sliding-window attention: fewer scores, counted one by one here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool import catalog
from hp_tool.cost.block import windowed_length
from hp_tool.cost.flops import token_flops
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate

GEMMA = catalog.model_from_mapping(
    {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32768,
        "sliding_window": 1024,
    }
)


def query(**model: Any) -> Any:
    """One GPU, long rows, attention fused."""
    shape = {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "vocab_size": 32000,
        "gated_mlp": True,
        "normalization": "rmsnorm",
    }
    return {
        "kind": "training",
        "model": shape | model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1, "gpus_per_node": 1},
        "training": {"sequence_length": 16384, "global_batch_size": 4},
        "parallel": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "micro_batch_size": 1,
            "recompute": "none",
        },
    }


@given(length=st.integers(1, 300), window=st.integers(1, 300))
def test_a_causal_window_sees_these_keys(length: int, window: int) -> None:
    model = replace(GEMMA, sliding_window=window, sliding_window_layers=None)
    scores = sum(min(place, window) for place in range(1, length + 1))
    # The formula is the integral: half a score a token off at most, as s / 2 is for (s + 1) / 2.
    assert windowed_length(model, float(length)) / 2.0 == pytest.approx(scores / length, abs=0.5)


def test_layers_with_and_without_a_window() -> None:
    assert (GEMMA.sliding_window, GEMMA.sliding_window_layers) == (1024, 10)
    assert windowed_length(GEMMA, 8192.0) == pytest.approx(
        (10 * 1024 * (2 - 1 / 8) + 2 * 8192) / 12
    )
    assert windowed_length(GEMMA, 1024.0) == 1024.0
    both_ways = replace(GEMMA, architecture="encoder", sliding_window_layers=None)
    assert windowed_length(both_ways, 8192.0) == 1024.0


def test_model_flops_leave_out_what_no_query_sees() -> None:
    workload = TrainingWorkload(sequence_length=8192, global_batch_size=8)
    full = replace(GEMMA, sliding_window=None, sliding_window_layers=None)
    windowed, whole = (token_flops(model, workload).attention for model in (GEMMA, full))
    assert windowed / whole == pytest.approx(windowed_length(GEMMA, 8192.0) / 8192.0)


def test_a_window_shortens_the_step_and_a_long_one_changes_nothing() -> None:
    plain, short, long = (
        estimate(query=parse_query(query(**window)))
        for window in ({}, {"sliding_window": 1024}, {"sliding_window": 16384})
    )
    assert short.time is not None and plain.time is not None and long.time is not None
    assert short.time.step_s < 0.9 * plain.time.step_s
    assert short.memory == plain.memory
    assert long.time == plain.time


def test_unequal_sequences_with_a_window_are_refused_by_name() -> None:
    asked = query(sliding_window=1024)
    asked["training"] |= {"sequence_lengths": "github", "packed": True}
    with pytest.raises(UnsupportedError) as caught:
        estimate(query=parse_query(asked))
    assert caught.value.field == "model.sliding_window"
