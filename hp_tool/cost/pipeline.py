"""Pipeline schedules: micro-batches, and how many model chunks a stage holds in flight."""

from __future__ import annotations

from hp_tool.cost.candidates import Candidates, FloatArray, IntArray
from hp_tool.cost.elementwise import minimum, where
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> FloatArray:
    """m = B / (d b): micro-batches each replica runs in one step; fractional where illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size)


def chunks_in_flight(candidates: Candidates, *, from_end: IntArray | int, micro_batches: FloatArray) -> FloatArray:
    """Model chunks of L/(pv) layers whose activations stage r holds at once; `from_end` is p - 1 - r.

    1F1B: min(p - r, m). Interleaved: min(2(p-r-1) + (v-1)p + 1, m v), Megatron's warm-up count plus the one running;
    on stage 0 with many micro-batches that is arXiv 2205.05198's L(1 + (p-1)/(pv)) layers.
    """
    p, v = candidates.pipeline_parallel_size, candidates.virtual_pipeline_parallel_size
    plain = from_end + 1
    interleaved = plain + from_end + (v - 1) * p
    return minimum(where(v > 1, interleaved, plain), micro_batches * v)
