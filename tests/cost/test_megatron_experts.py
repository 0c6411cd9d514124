"""Mixture-of-experts layers against the real framework: bytes that one rank's layers keep, see
test_megatron_layers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.layer import layer_bytes
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute
from tests.cost.cases import case_of
from tests.cost.test_megatron_layers import (
    MICRO_BATCH,
    SEQUENCE,
    SLACK_BYTES,
    count_bytes,
    megatron_case,
    parameters,
    workload,
)

pytestmark = pytest.mark.components

MIXTRAL = ModelSpec(
    num_hidden_layers=2,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    moe_intermediate_size=14336,
    num_experts=8,
    num_experts_per_tok=2,
    gated_mlp=True,
    normalization="rmsnorm",
    vocab_size=1024,
)
FAMILIES = {
    "mixtral": MIXTRAL,
    "shared": replace(
        MIXTRAL,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        num_shared_experts=2,
    ),
}
DIVISIONS = ((1, 1, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1), (4, 8, 1), (2, 4, 2), (1, 2, 2), (2, 1, 4))
"""(tensor parallel, expert parallel, experts' own tensor parallel); with the first Megatron Core
wants sequence parallelism.
"""
LONG = ((1, 4, 1), (2, 1, 1), (4, 8, 1), (1, 2, 2), (2, 1, 4))
MODULES = {
    "mixtral": (("moe",), ("layernorm",)),
    "shared": (
        ("shared_experts",),
        ("moe",),
        ("layernorm", "shared_experts"),
        ("core_attn", "layernorm", "moe"),
    ),
}
"""Not moe_act: Megatron Core has it for grouped matmuls alone, which run on a GPU."""
CASES: list[tuple[str, tuple[int, int, int], Any]] = [
    *itertools.product(FAMILIES, DIVISIONS, ("none", "selective", "full")),
    *((family, (2, 4, 1), modules) for family, several in MODULES.items() for modules in several),
]


def in_megatrons_words(
    family: str, division: tuple[int, int, int], recompute: str | tuple[str, ...]
) -> dict[str, Any]:
    """With a capacity of the mean load, padded: the shapes of a balanced router, which fake tensors
    cannot show otherwise.
    """
    model, (t, ep, etp) = FAMILIES[family], division
    named = isinstance(recompute, tuple)
    case = megatron_case(
        model,
        workload(family, "flash"),
        t=t,
        sharded=t > 1,
        recompute="none" if named else recompute,
    )
    if named:
        case["config"] |= {
            "recompute_granularity": "selective",
            "recompute_modules": list(recompute),
        }
    case["config"] |= {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": (
            model.num_shared_experts * (model.moe_intermediate_size or 0)
        )
        or None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    }
    return case | {"expert_parallel_size": ep, "expert_tensor_parallel_size": etp}


@pytest.mark.parametrize(
    "case", parameters(CASES, long=LONG), ids=lambda case: "-".join(map(str, case))
)
def test_saved_bytes_are_megatrons(case: tuple[Any, ...]) -> None:
    """To the byte, but for the norms' statistics and the rotary angles, as of dense layers, and for
    the router's own tensors.

    Those are here, a token of the rank's: probabilities (4E bytes), map (E) and permutation (8k),
    which the dispatcher holds on to until its next micro-batch whatever is recomputed; then indices
    and probabilities of the k experts (24k). The formulas count 8E, what the fused permutation's
    map from tokens to rows takes, and nothing under full recomputation nor where the module moe is
    recomputed. A norm whose output is discarded has no statistics either.
    """
    family, (t, ep, etp), recompute = case
    model, modules = FAMILIES[family], recompute if isinstance(recompute, tuple) else ()
    config = ParallelConfig(
        tensor_parallel_size=t,
        sequence_parallel=t > 1,
        micro_batch_size=MICRO_BATCH,
        data_parallel_size=max(t, etp) * ep // t,
        expert_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        recompute=Recompute(granularity="selective", modules=modules) if modules else recompute,
    )
    found = layer_bytes(
        case=case_of(model=model, workload=workload(family, "flash")),
        candidates=Candidates.alone(config),
    )
    saved = {"none": found.saved, "full": found.saved_full}.get(recompute, found.saved_selective)
    tokens, experts, chosen = (
        SEQUENCE * MICRO_BATCH / t,
        model.num_experts or 0,
        model.num_experts_per_tok or 0,
    )
    held = (
        tokens * (5 * experts + 8 * chosen) + 8 * experts * etp
    )  # and how many tokens each expert gets from each rank
    norms, angles = (
        2 * 4 * tokens * ("layernorm" not in modules),
        2 * 4 * SEQUENCE * model.head_size,
    )
    # The ranks that share an expert gather one another's copies, and 4 bytes of probability with
    # each.
    routing = tokens * (24 * chosen - 8 * experts + 4 * chosen * (etp - 1)) * ("moe" not in modules)
    left_out = held + (0 if recompute == "full" else norms + angles + routing)
    assert count_bytes(in_megatrons_words(*case)) == pytest.approx(
        float(saved) + left_out, abs=SLACK_BYTES
    )
