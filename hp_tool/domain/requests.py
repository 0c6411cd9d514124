"""What launchers carry to the profiler: a training run, a short real serving run, or single operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.fields import Strict
from hp_tool.domain.measurement import Operation, ProfileRequest, Runner
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import InferenceWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest(Strict):
    """All the profiler needs to serve one batch a few times; written as JSON, read on the cluster."""

    kind: Literal["inference"] = "inference"
    run_id: str
    model: ModelSpec
    inference: InferenceWorkload
    """Lengths, precision, and `concurrency`: the prompts served at once."""
    parallel: ServingConfig
    num_gpus: int
    """Devices of the one replica that is run."""
    gpu: str
    """Catalogue name the measurement will be filed under; `cpu` runs gloo."""
    runner: Runner = "megatron-core"
    """megatron-core: Megatron Core's layers over a KV cache, greedy; vllm: `vllm bench latency`, where vLLM is installed."""
    repetitions: int = 5
    warmup: int = 1
    timeout_s: float
    seed: int = 0

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts: vLLM starts its own workers."""
        return 1 if self.runner == "vllm" else self.num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest(Strict):
    """Single operations, timed one after another on all ranks at once."""

    kind: Literal["benchmark"] = "benchmark"
    run_id: str
    operations: tuple[Operation, ...]
    num_gpus: int
    """World size."""
    gpu: str
    """Catalogue name of the devices; `cpu` runs gloo."""
    timeout_s: float
    budget_s: float = 0.1
    """Seconds spent on the repetitions of one operation, at least three of them."""
    seed: int = 0

    @property
    def num_processes(self) -> int:
        """Processes that torchrun starts."""
        return self.num_gpus


RunRequest = ProfileRequest | InferenceRequest | BenchmarkRequest
"""`kind` tells which."""
