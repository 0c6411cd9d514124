"""Recurrent mixers against the real framework: see test_megatron_layers."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.layer import layer_bytes
from hp_tool.cost.recurrent import key_heads, value_heads
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from tests.cost.cases import case_of
from tests.cost.test_megatron_layers import (
    LLAMA,
    MICRO_BATCH,
    SEQUENCE,
    SLACK_BYTES,
    count_bytes,
    megatron_case,
    workload,
)

pytestmark = pytest.mark.components

MODELS = {
    "mamba2": ModelSpec(
        num_hidden_layers=2,
        hidden_size=2688,
        num_attention_heads=32,
        mixer="mamba2",
        feed_forward="none",
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        mamba_n_groups=8,
        **LLAMA,
    ),
    "gated_delta": ModelSpec(
        num_hidden_layers=2,
        hidden_size=2048,
        num_attention_heads=16,
        intermediate_size=6144,
        mixer="gated_delta",
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        **LLAMA,
    ),
}
OF_MODEL: dict[str, dict[str, Any]] = {
    "mamba2": {
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
    },
    "gated_delta": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 1,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}
CASES = [
    ("mamba2", 1, False),
    ("mamba2", 4, True),
    ("mamba2", 8, False),
    ("gated_delta", 1, False),
    ("gated_delta", 4, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_saved_bytes_are_megatrons(case: tuple[str, int, bool]) -> None:
    """To the byte, but for what the formulas leave out: the norms' fp32 inverse deviations, of a
    delta rule's queries, keys and outputs one a head, and a state space's decays, three numbers a
    head whatever the tokens.
    """
    family, t, sharded = case
    model, training = MODELS[family], workload("gated", "flash")
    config = ParallelConfig(
        tensor_parallel_size=t, sequence_parallel=sharded, micro_batch_size=MICRO_BATCH
    )
    saved = layer_bytes(
        case=case_of(model=model, workload=training), candidates=Candidates.alone(config)
    ).saved
    query = megatron_case(model, training, t=t, sharded=sharded)
    query["config"] |= OF_MODEL[family]
    counted = count_bytes(query | {"mixer": family, "rotary": False})
    norms = (1 if family == "mamba2" else 2) / (t if sharded else 1)
    of_heads = (
        model.mamba_n_groups if family == "mamba2" else 2 * key_heads(model) + value_heads(model)
    )
    deviations = 4 * SEQUENCE * MICRO_BATCH * (norms + of_heads / t)
    decays = 3 * 4 * (model.mamba_num_heads or 0) / t
    assert counted == pytest.approx(float(saved) + deviations + decays, abs=SLACK_BYTES)
