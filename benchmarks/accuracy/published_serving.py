"""`python -m benchmarks.accuracy.published_serving [--json]`: published serving of large mixtures
of experts, which no constant saw, beside what the cost model says of it. Needs no folder of
measured figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from hp_tool.domain.serving import PoolEstimate
from hp_tool.questions import schema, serving

WITHIN = 0.2
SOURCE = (
    "github.com/deepseek-ai/profile-data (the layouts), and "
    "lmsys.org/blog/2025-05-05-large-scale-ep (its rates), both on H800"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """One figure beside ours, in tokens per second and GPU."""

    what: str
    source: str
    assumed: str
    published: float
    predicted: float

    @property
    def holds(self) -> bool:
        return abs(self.predicted / self.published - 1.0) <= WITHIN


def evaluate() -> list[Published]:
    """DeepSeek's public profile of DeepSeek-V3: decoding, and prefill."""
    assumed = (
        "SGLang's constants, fp8 weights, keys and values in 16 bits, DeepEP's kernels, a "
        "balanced router"
    )
    many, one = (_pools(prefill_replicas=replicas) for replicas in (32, 1))
    return [
        Published(
            what="decoding, EP 128, TP 1, 128 requests a GPU, 4K prompts, two micro-batches",
            source=SOURCE,
            assumed=f"{assumed}; 256 tokens an answer, prefill that keeps up",
            published=2324.0,
            predicted=many.decode_tokens_per_second_per_gpu,
        ),
        Published(
            what="prefill, EP 32, TP 1, 16K tokens a GPU, 4K prompts, two micro-batches",
            source=SOURCE,
            assumed=f"{assumed}; decoding that keeps up",
            published=7839.0,
            predicted=one.prefill_tokens_per_second_per_gpu,
        ),
    ]


def _pools(*, prefill_replicas: int) -> PoolEstimate:
    """One decoding replica of 128 GPUs behind this many of 32 that prefill; the full one of both
    decides.
    """
    sizes = {"prefill": 32, "decode": 128}
    layout = {
        f"{pool}_{axis}_parallel_size": n
        for pool, n in sizes.items()
        for axis in ("expert", "attention_data")
    }
    layout |= {f"{pool}_tensor_parallel_size": 1 for pool in sizes}
    query = schema.parse_query(
        {
            "kind": "inference",
            "model": "deepseek-v3",
            "cluster": {"gpu": "h800-sxm-80gb", "num_gpus": 32 * prefill_replicas + 128},
            "inference": {
                "input_length": 4096,
                "output_length": 256,
                "concurrency": 100_000,
                "precision": "fp8",
                "engine": "sglang",
                "expert_imbalance": 1.0,
                "two_batch_overlap": True,
                "disaggregated": layout
                | {"prefill_replicas": prefill_replicas, "decode_replicas": 1},
            },
            "parallel": {"max_num_seqs": 128, "max_num_batched_tokens": 16_384},
        }
    )
    (pools,) = serving.disaggregated(query=query)
    return pools.estimate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON list on stdout")
    figures = evaluate()
    if parser.parse_args().json:
        print(
            json.dumps(
                [dataclasses.asdict(one) | {"holds": one.holds} for one in figures], indent=2
            )
        )
        return
    for one in figures:
        print(f"{'holds ' if one.holds else 'MISSED'}  {one.what}")
        print(
            f"        published {one.published:,.0f}, predicted {one.predicted:,.0f} tokens/s per "
            f"GPU (within {WITHIN:.0%})"
        )
        print(f"        {one.source}; assumed: {one.assumed}")


if __name__ == "__main__":
    main()
