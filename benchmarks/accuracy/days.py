"""Days to train GPT-3 175B on 300B tokens with 1,024 A100: today's stack with and without what
arXiv 2205.05198 adds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.accuracy.published import fastest
from hp_tool.domain.result import Recommendation
from hp_tool.domain.units import SECONDS_PER_DAY

PARAMETERS, TOKENS, GPUS = 175e9, 300e9, 1024
PUBLISHED_FLOPS_PER_SECOND = 140e12
"""What one A100 reached in arXiv 2104.04473 section 5.1."""


def best(*, recompute: str, sequence_parallel: bool) -> Recommendation:
    """Table 5's software and layout for 175B, sixteen replicas; ZeRO stage 0 or 1, whichever is
    faster and fits.
    """
    return fastest(
        {
            "model": "gpt3-175b",
            "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": GPUS},
            "training": {
                "sequence_length": 2048,
                "global_batch_size": 1536,
                "precision": "fp16",
                "attention": "unfused",
                "dropout": 0.1,
                "total_tokens": TOKENS,
            },
            "parallel": {
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": 8,
                "virtual_pipeline_parallel_size": 3,
                "micro_batch_size": 1,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
                "zero_stage": [0, 1],
            },
        }
    )


def published_days() -> float:
    """8 T P / (n X): arXiv 2104.04473's rule, with its software of 2021."""
    return 8.0 * TOKENS * PARAMETERS / (GPUS * PUBLISHED_FLOPS_PER_SECOND) / SECONDS_PER_DAY


def evaluate() -> dict[str, Any]:
    """Days of both, their ratio and configurations."""
    selective = best(recompute="selective", sequence_parallel=True)
    full = best(recompute="full", sequence_parallel=False)
    days, full_days = selective.estimate.days, full.estimate.days
    assert days is not None and full_days is not None
    return {
        "selective_sequence_parallel_days": days,
        "full_recompute_days": full_days,
        "ratio": full_days / days,
        "configurations": [dataclasses.asdict(one.parallel) for one in (selective, full)],
        "published_2021_days": published_days(),
    }
