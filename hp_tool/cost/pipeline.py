"""Pipeline schedules: how many chunks a stage holds in flight, and the bubble."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.candidates import Candidates, FloatArray, IntArray
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> FloatArray:
    """m = B / (d b): micro-batches each replica runs in one step; fractional where illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size).astype(np.float64)


def chunks_in_flight(candidates: Candidates, *, stage: IntArray, micro_batches: FloatArray) -> FloatArray:
    """Model chunks whose activations stage r holds at once, counted in chunks of L/(pv) layers.

    1F1B: min(p - r, m). Interleaved: min(2(p-r-1) + (v-1)p + 1, m v), Megatron's warm-up count plus the one running;
    on stage 0 with many micro-batches that is arXiv 2205.05198's L(1 + (p-1)/(pv)) layers.
    """
    p, v = candidates.pipeline_parallel_size, candidates.virtual_pipeline_parallel_size
    plain = np.minimum(p - stage, micro_batches)
    interleaved = np.minimum(2 * (p - stage - 1) + (v - 1) * p + 1, micro_batches * v)
    return np.where(v > 1, interleaved, plain)


def bubble_seconds(candidates: Candidates, *, all_stages_s: FloatArray, slowest_stage_s: FloatArray) -> FloatArray:
    """Idle time of the slowest stage while the pipeline fills and drains: what the other stages take for one
    micro-batch, divided by v. With equal stages that is (p-1)/v (t_f + t_b), arXiv 2104.04473 section 2.2.
    """
    return (all_stages_s - slowest_stage_s) / candidates.virtual_pipeline_parallel_size
