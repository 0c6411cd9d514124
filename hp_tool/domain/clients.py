"""Benchmark clients for serving engines, with their documented defaults.

In a closed load, requests of equal length that start together also finish together, whereas
requests of different lengths finish at different times. In a run with n requests per slot, the
first requests of all slots start together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A benchmark client with its default settings."""

    equal_lengths: bool
    """Whether all prompts have one length and all answers have one length."""
    requests_each: float | None = None
    """Number of requests sent per run, divided by the concurrency; None: the same as in the
    engine's measured runs with equal lengths.
    """
    mean_length: float = 1.0
    """Mean length of the generated requests divided by the length given to the client."""
    source: str


DEFAULT_REQUESTS_PER_SLOT = 10.0
"""Number of requests sent per run, divided by the concurrency, if no client is named. Public
benchmarks use this ratio.
"""
CLIENTS = {
    "aiperf": Client(
        equal_lengths=True,
        requests_each=2.0,
        source="docs.nvidia.com/aiperf, command line options: stddev of both lengths 0, request "
        "count max(10, 2 x concurrency)",
    ),
    "genai-bench": Client(
        equal_lengths=True,
        source="docs.sglang.ai/genai-bench, traffic scenarios: D(input, output), a scenario of "
        "fixed lengths",
    ),
    "vllm-bench": Client(
        equal_lengths=True,
        source="docs.vllm.ai, vllm bench serve: random-range-ratio 0, request-rate inf, "
        "num-prompts 1000",
    ),
    "trtllm-bench": Client(
        equal_lengths=True,
        source="nvidia.github.io/TensorRT-LLM, trtllm-bench: prepare-dataset token-norm-dist with "
        "stdev 0",
    ),
    "inferencemax": Client(
        equal_lengths=False,
        requests_each=10.0,
        mean_length=0.9,
        source="github.com/SemiAnalysisAI/InferenceX: random-range-ratio 0.8 (evenly from 0.8 of a "
        "length to all of it), "
        "num-prompts 10 x concurrency, request-rate inf",
    ),
}
