"""`python -m benchmarks.accuracy.published_serving [--json]`: published serving of large mixtures
of experts, which no constant saw, beside what the cost model says of it. Needs no folder of
measured figures.
"""

from __future__ import annotations

from benchmarks.accuracy.published import Check, print_checks
from hp_tool.domain.serving import PoolEstimate
from hp_tool.questions import schema, serving

WITHIN = 0.2
SOURCE = (
    "github.com/deepseek-ai/profile-data (the layouts), and "
    "lmsys.org/blog/2025-05-05-large-scale-ep (its rates), both on H800"
)


def evaluate() -> list[Check]:
    """DeepSeek's public profile of DeepSeek-V3: decoding, and prefill."""
    assumed = (
        "SGLang's constants, fp8 weights, keys and values in 16 bits, DeepEP's kernels, a "
        "balanced router"
    )
    many, one = (_pools(prefill_replicas=replicas) for replicas in (32, 1))
    return [
        _check(
            "decoding, EP 128, TP 1, 128 requests a GPU, 4K prompts, two micro-batches",
            f"{assumed}; 256 tokens an answer, prefill that keeps up",
            published=2324.0,
            predicted=many.decode_tokens_per_second_per_gpu,
        ),
        _check(
            "prefill, EP 32, TP 1, 16K tokens a GPU, 4K prompts, two micro-batches",
            f"{assumed}; decoding that keeps up",
            published=7839.0,
            predicted=one.prefill_tokens_per_second_per_gpu,
        ),
    ]


def _check(what: str, assumed: str, *, published: float, predicted: float) -> Check:
    return Check(
        what=what,
        source=SOURCE,
        assumed=assumed,
        unit="tokens/s per GPU",
        published=published,
        predicted=predicted,
        tolerance=f"{WITHIN:.0%}",
        within=abs(predicted / published - 1.0) <= WITHIN,
    )


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


if __name__ == "__main__":
    print_checks(__doc__, evaluate)
