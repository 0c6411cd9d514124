"""How many micro-batches a step has; what a pipeline makes of them is in `schedules`."""

from __future__ import annotations

from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> FloatArray:
    """m = B / (d b): micro-batches each replica runs in one step; fractional where illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size)
