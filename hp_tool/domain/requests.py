"""What launchers carry to the profiler: a training run, a short real serving run, or single
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
    """All the profiler needs to serve one batch a few times on the devices of one replica."""

    kind: Literal["inference"] = "inference"
    model: ModelSpec
    inference: InferenceWorkload
    """Lengths, precision, and `concurrency`: the prompts served at once."""
    parallel: ServingConfig
    runner: Runner = "megatron-core"
    """megatron-core: Megatron Core's layers over a KV cache, greedy; vllm: `vllm bench latency`,
    where vLLM is installed; endpoint: requests to a server that runs already.
    """
    repetitions: int = 5
    warmup: int = 1
    num_requests: int = 1
    """Of a repetition, of an endpoint: those in flight. A batch is that of the load's
    concurrency.
    """
    trace: TraceSpec | None = None
    """Of an endpoint: its requests in turn, again and again; None: equal ones, of the load's
    lengths.
    """

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts; vLLM starts its own workers."""
        return 1 if self.runner == "vllm" else self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest(Request):
    """Single operations, timed one after another on all ranks at once."""

    kind: Literal["benchmark"] = "benchmark"
    operations: tuple[Operation, ...]
    budget_s: float = 0.1
    """Seconds spent on the repetitions of one operation, at least three of them."""


RunRequest = ProfileRequest | InferenceRequest | BenchmarkRequest
"""Told apart by `kind`."""
