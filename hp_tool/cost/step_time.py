"""How many micro-batches a step has and what stages send each other; what schedules make of it is in `schedules`."""

from __future__ import annotations

from hp_tool.cost.arrays import Floats, where, zeros_like
from hp_tool.cost.block import LayerTime, activation_element_bytes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.collectives import send_seconds
from hp_tool.cost.critical_stage import StageTime, bubble_seconds, ends_time, message_stalls, stage_time
from hp_tool.cost.data_parallel import data_parallel_seconds
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.model_states import StateTimes
from hp_tool.cost.optimizer import activation_seconds
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.topology import dense_group
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> Floats:
    """m = B / (d b): micro-batches each replica runs in one step; fractional where illegal."""
    return workload.global_batch_size / (candidates.data_parallel_size * candidates.micro_batch_size)


def transfer_seconds(*, case: TrainingCase, candidates: Candidates) -> Floats:
    """One micro-batch's activations to the next stage: each tensor-parallel rank sends its share, e T h / t
    (Megatron's scatter-gather, arXiv 2104.04473 section 4.1; with SP they are sharded already). Some neighbours are in
    different NVLink domains wherever one domain does not hold all stages, and those set the pace.
    """
    cluster, workload = case.cluster, case.workload
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * case.model.hidden_size * activation_element_bytes(workload) / t
    (stages,) = dense_group(c, "pp", order=cluster.rank_order)
    crosses = stages.size * stages.stride > cluster.nvlink_domain_size
    seconds = send_seconds(message, machine=case, distance=stages.stride, crosses=crosses)
    return where(stages.size > 1, seconds, 0.0)


# Step time of each candidate from its layers', ends' and states' costs: exposed seconds by part.


TIME_PARTS = (
    "compute",
    "recompute",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_bubble",
    "pipeline_p2p",
    "data_parallel",
    "optimizer",
    "offload",
    "overhead",
)
"""Exposed seconds; they sum to the step time."""


def time_parts(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layer: LayerTime,
    pipeline: Pipeline,
    head: HeadTime,
    states: StateTimes,
    micro_batches: Floats,
    offloaded: Floats = 0.0,
) -> dict[str, Floats]:
    """The slowest stage runs m micro-batches, then waits for the others to fill and drain.

    `layer` is the mean layer of that stage; `offloaded` what a micro-batch on it sends to the host, in bytes. Transfers
    between stages take part twice: once for each micro-batch, as far as they are not hidden, and on the way there and back
    of the first one.
    """
    profile = case.profile
    c, m, framework = candidates, micro_batches, profile.framework
    p = c.pipeline_parallel_size
    stage = stage_time(case=case, candidates=c, layer=layer, pipeline=pipeline)
    ends = ends_time(model=case.model, candidates=c, head=head, stage=stage, pipeline=pipeline)
    bubble = bubble_seconds(candidates=c, layer=layer, stage=stage, ends=ends, pipeline=pipeline)
    transfer = transfer_seconds(case=case, candidates=c)
    stalled, stalled_once = message_stalls(case=case, candidates=c)
    nothing = zeros_like(p)
    overhead = nothing + framework.step_overhead_s
    if framework.host_layer_s:
        overhead = overhead + m * stage.host_waits
    return {
        "compute": m * (stage.compute + ends.pacing - ends.communication),
        "recompute": m * stage.recompute,
        "tensor_parallel": m * (stage.tensor + ends.communication),
        "context_parallel": m * stage.context + nothing,
        "expert_parallel": m * stage.expert + nothing,
        "pipeline_bubble": bubble + 2.0 * (p - 1.0) * transfer + stalled_once,
        "pipeline_p2p": (2.0 * (1.0 - framework.pipeline_overlap)) * m * c.virtual_pipeline_parallel_size * transfer
        + m * stalled,
        "data_parallel": data_parallel_seconds(
            profile=profile,
            candidates=c,
            states=states,
            micro_batches=m,
            forward=stage.held_forward,
            stage=stage.held,
            layers=pipeline.critical.count,
        ),
        "optimizer": states.update_s,
        "offload": nothing + _offload_seconds(case, states=states, stage=stage, offloaded=offloaded, micro_batches=m),
        "overhead": overhead,
    }


def step_seconds(parts: dict[str, Floats]) -> Floats:
    """The sum of TIME_PARTS."""
    return sum((parts[name] for name in TIME_PARTS[1:]), parts[TIME_PARTS[0]])


def _offload_seconds(
    case: TrainingCase, *, states: StateTimes, stage: StageTime, offloaded: Floats, micro_batches: Floats
) -> Floats:
    """Exposed seconds a step that the host adds: of its update, or of activations' way there and back."""
    workload = case.workload
    if workload.offload == "optimizer":
        return states.offload_s
    if workload.offload == "activations":
        backward = stage.total - stage.forward
        return micro_batches * activation_seconds(offloaded, forward=stage.forward, backward=backward, gpu=case.cluster.gpu)
    return 0.0
