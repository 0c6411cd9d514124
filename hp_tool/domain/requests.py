"""Requests that launchers pass to the profiler: a training run, a short serving run, or single
operations.
"""

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.inference import InferenceWorkload, TraceSpec
from hp_tool.domain.measurement import Operation, ProfileRequest, Request, Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.serving import ServingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest(Request):
    """Request to serve one batch a few times on the devices of one replica."""

    kind: Literal["inference"] = "inference"
    model: ModelSpec
    inference: InferenceWorkload
    """Lengths, precision and `concurrency`, the number of prompts served at once."""
    parallel: ServingConfig
    runner: Runner = "megatron-core"
    """megatron-core: Megatron Core's layers with a KV cache and greedy decoding; vllm: `vllm bench
    latency`, if vLLM is installed; endpoint: requests to a running server.
    """
    repetitions: int = 5
    warmup: int = 1
    num_requests: int = 1
    """Number of requests in flight in each repetition that measures an endpoint. Batches use the
    load's concurrency instead.
    """
    trace: TraceSpec | None = None
    """Requests to send to an endpoint in sequence, repeated from the start; None: requests of equal
    length, as in the load.
    """

    @property
    def num_processes(self) -> int:
        """Number of processes that torchrun starts. vLLM starts its own workers."""
        return 1 if self.runner == "vllm" else self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest(Request):
    """Request to time single operations one after another, on all ranks at once."""

    kind: Literal["benchmark"] = "benchmark"
    operations: tuple[Operation, ...]
    budget_s: float = 0.1
    """Seconds for the repetitions of one operation. At least three repetitions run."""


RunRequest = ProfileRequest | InferenceRequest | BenchmarkRequest
"""A request; `kind` distinguishes the types."""
