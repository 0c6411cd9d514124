"""What the losses keep of the logits: a 16-bit tensor, an fp32 copy, or a chunk of either."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.questions import schema
from hp_tool.questions.training import estimate

TOKENS, VOCABULARY = 8192, 128256


def found(training: dict[str, Any], **parallel: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {"sequence_length": TOKENS, "global_batch_size": 8} | training,
        "parallel": {"micro_batch_size": 1} | parallel,
    }
    return estimate(query=schema.parse_query(query), with_fixes=False)


@pytest.mark.parametrize(
    ("cross_entropy", "framework", "bytes_each", "tokens"),
    [
        ("unfused", "megatron-core", 2 + 4, TOKENS),
        ("fused", "megatron-core", 2 + 4, TOKENS),
        ("in_place", "megatron-core", 2, TOKENS),
        ("in_place", "torch-fsdp", 2, TOKENS),
        ("unfused", "torch-fsdp", 2 + 3 * 4, TOKENS),
        ("chunked", "torch-fsdp", 2 + 3 * 4, 256),
    ],
)
def test_bytes_of_logits(cross_entropy: str, framework: str, bytes_each: int, tokens: int) -> None:
    memory = found({"cross_entropy": cross_entropy, "framework": framework}).memory
    assert memory is not None and memory.logits_bytes == bytes_each * tokens * VOCABULARY


def test_what_is_saved_has_its_price_in_time() -> None:
    times = [
        found({"cross_entropy": name}).time.step_s
        for name in ("in_place", "fused", "unfused", "chunked")
    ]  # type: ignore[union-attr]
    assert times == sorted(times)


def test_8b_with_a_million_tokens_fits_8_devices_with_a_chunked_loss_alone() -> None:
    """All layers recomputed and their inputs on the host, the sequence split over the devices."""
    training = {"framework": "torch-fsdp", "sequence_length": 2**20, "offload": "activations"}
    whole, chunked = (
        found(training | {"cross_entropy": name}, context_parallel_size=8, recompute="full")
        for name in ("unfused", "chunked")
    )
    assert chunked.feasible and not whole.feasible
