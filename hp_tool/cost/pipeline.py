"""How many micro-batches a step has and what stages send each other; what schedules make of it is in `schedules`."""

from __future__ import annotations

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.communication import send_seconds
from hp_tool.cost.elementwise import FloatArray, where
from hp_tool.cost.placement import dense_group
from hp_tool.cost.shapes import activation_element_bytes
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> FloatArray:
    """m = B / (d b): micro-batches each replica runs in one step; fractional where illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size)


def transfer_seconds(
    *, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile, candidates: Candidates
) -> FloatArray:
    """One micro-batch's activations to the next stage: each tensor-parallel rank sends its share, e T h / t
    (Megatron's scatter-gather, arXiv 2104.04473 section 4.1; with SP they are sharded already). Some neighbours are in
    different NVLink domains wherever one domain does not hold all stages, and those set the pace.
    """
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * model.hidden_size * activation_element_bytes(workload) / t
    (stages,) = dense_group(c, "pp", order=cluster.rank_order)
    crosses = stages.size * stages.stride > cluster.nvlink_domain_size
    seconds = send_seconds(message, distance=stages.stride, crosses=crosses, cluster=cluster, profile=profile)
    return where(stages.size > 1, seconds, 0.0)
