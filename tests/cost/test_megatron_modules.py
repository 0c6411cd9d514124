"""Recomputation by module against the real framework: bytes that one rank's layers keep, see
test_megatron_layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.layer import layer_bytes
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute
from tests.cost.cases import case_of
from tests.cost.test_megatron_layers import (
    FAMILIES,
    MICRO_BATCH,
    SEQUENCE,
    SLACK_BYTES,
    count_bytes,
    megatron_case,
    workload,
)

pytestmark = pytest.mark.components

DIVISIONS = ((1, False), (8, False), (8, True))
DENSE = (
    ("mlp",),
    ("layernorm",),
    ("mlp", "layernorm"),
    ("core_attn", "mlp"),
    ("core_attn", "layernorm", "mlp"),
)
LATENT = ((), ("mla_up_proj",), ("mla_up_proj", "layernorm", "mlp"))
CASES: list[tuple[str, int, bool, tuple[Any, ...], str]] = [
    *(
        (family, t, sp, modules, "flash")
        for family in ("gpt", "gqa")
        for t, sp in DIVISIONS
        for modules in DENSE
    ),
    *(("gpt", t, sp, ("core_attn", "mlp"), "unfused") for t, sp in DIVISIONS),
    *(("deepseek", t, sp, modules, "flash") for t, sp in DIVISIONS for modules in LATENT),
]
DEEPSEEK_V3 = ModelSpec(
    num_hidden_layers=2,
    hidden_size=7168,
    num_attention_heads=128,
    intermediate_size=18432,
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    gated_mlp=True,
    normalization="rmsnorm",
    vocab_size=1024,
)
# As of DeepSeek-V2-Lite: queries straight from the hidden state.
LITE = replace(
    DEEPSEEK_V3, hidden_size=2048, num_attention_heads=16, intermediate_size=10944, q_lora_rank=None
)
LATENT_FAMILIES = {"deepseek": DEEPSEEK_V3, "lite": LITE}


def shape(family: str) -> ModelSpec:
    return LATENT_FAMILIES.get(family) or FAMILIES[family]


def in_megatrons_words(
    family: str, t: int, sharded: bool, modules: tuple[str, ...], attention: str
) -> dict[str, Any]:
    case = megatron_case(
        shape(family), workload(family, attention), t=t, sharded=sharded, recompute="none"
    )
    if modules:
        case["config"] |= {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return case | latent_case(shape(family), case["config"]) if family in LATENT_FAMILIES else case


def latent_case(model: ModelSpec, config: dict[str, Any]) -> dict[str, Any]:
    """What changes in a case of latent attention."""
    latent = {
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": model.q_lora_rank,
        "qk_head_dim": model.qk_nope_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_type": "rope",
        "num_query_groups": model.num_attention_heads,
    }
    return {"rotary": False, "latent": True, "config": config | latent}


def left_out(family: str, t: int, sharded: bool, modules: tuple[str, ...]) -> float:
    """Bytes that the formulas leave out on purpose: the norms' fp32 mean and inverse deviation per
    token, and the cosines and sines of queries and of keys, which fused kernels do not keep.
    """
    model, tokens = shape(family), SEQUENCE * MICRO_BATCH
    own = tokens / t if sharded else tokens
    norms = 2 * (1 if model.normalization == "rmsnorm" else 2) * 4 * own
    if "layernorm" in modules:  # then they are not there either
        norms = 0
    if model.kv_lora_rank is None:
        return norms + (4 * SEQUENCE * model.head_size * 2 if model.positions == "rotary" else 0)
    again = "mla_up_proj" in modules
    rope, ranks = model.qk_rope_head_dim or 0, (model.q_lora_rank or 0, model.kv_lora_rank)
    latents = sum(rank > 0 for rank in ranks) * 4 * own + 4 * SEQUENCE * rope * (1 if again else 3)
    # The rotary key stands beside the latent of keys and values.
    latents += 2 * tokens * rope if again or not sharded else 0
    # the latents' norms get a part of a whole tensor; Transformer Engine's projection gives them
    # their part alone
    if sharded:
        whole = sum(ranks) if again else ranks[0]
        latents += 2 * (tokens - own) * whole + (2 * tokens * rope if again else 0)
    return norms + latents


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_saved_bytes_are_megatrons(case: tuple[Any, ...]) -> None:
    """To the byte, but for what is `left_out`."""
    family, t, sharded, modules, attention = case
    config = ParallelConfig(
        tensor_parallel_size=t,
        micro_batch_size=MICRO_BATCH,
        sequence_parallel=sharded,
        recompute=Recompute(granularity="selective", modules=modules) if modules else "none",
    )
    found = layer_bytes(
        case=case_of(model=shape(family), workload=workload(family, attention)),
        candidates=Candidates.alone(config),
    )
    expected = float(found.saved_selective if modules else found.saved) + left_out(
        family, t, sharded, modules
    )
    assert count_bytes(in_megatrons_words(*case)) == pytest.approx(expected, abs=SLACK_BYTES)
