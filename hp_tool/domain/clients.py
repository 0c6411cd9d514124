"""What sends the requests of a closed load: benchmark clients by what their documentation says they
do if nothing else is set.

Requests of one length that start together end together and come together again; lengths that differ
drift apart. Of a run with n requests for each in flight the first n-th starts at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A benchmark client, at its own defaults."""

    equal_lengths: bool
    """Whether all prompts have the same length, and all answers have the same length."""
    requests_each: float | None = None
    """Requests of a run for each in flight; None: as many as an engine's measured runs with equal
    lengths had.
    """
    mean_length: float = 1.0
    """Mean of the lengths drawn over the length that the client is given."""
    source: str


DEFAULT_REQUESTS_PER_SLOT = 10.0
"""Requests per request in flight if no client is named, as in public benchmarks."""
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
