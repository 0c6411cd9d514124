"""Step time: critical stage, bubble, stage-to-stage transfers, data parallelism and optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from hp_tool.cost.arrays import Floats, Ints, anywhere, column
from hp_tool.cost.block import LayerTime
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.critical_stage import StageTime, critical_stage
from hp_tool.cost.embedding_and_head import HeadTime
from hp_tool.cost.host import message_stalls
from hp_tool.cost.network import dense_group, send_seconds
from hp_tool.cost.optimizer import activation_seconds
from hp_tool.cost.pipeline_stages import Pipeline
from hp_tool.cost.stragglers import straggler_share
from hp_tool.cost.zero import StateTimes, data_parallel_seconds
from hp_tool.domain.workload import TrainingWorkload


def micro_batches(candidates: Candidates, *, workload: TrainingWorkload) -> Floats:
    """Return m = B / (d b), the micro-batches per replica and step; fractional if the candidate is
    illegal.
    """
    return workload.global_batch_size / (
        candidates.data_parallel_size * candidates.micro_batch_size
    )


def transfer_seconds(*, case: TrainingCase, candidates: Candidates) -> Floats:
    """Return the seconds to send one micro-batch's activations to the next stage.

    Each tensor-parallel rank sends its share, e T h / t. This is Megatron's scatter-gather (arXiv
    2104.04473 section 4.1); with SP, activations are already sharded. If the stages span several
    NVLink domains, some adjacent stages are in different domains. The slowest pair of stages
    determines the time.
    """
    cluster, workload = case.cluster, case.workload
    c = candidates
    t = c.tensor_parallel_size
    tokens = workload.sequence_length * c.micro_batch_size / c.context_parallel_size
    message = tokens * case.model.hidden_size * workload.activation_element_bytes / t
    group = dense_group(c, "pp", cluster=cluster)
    (stages,) = group.axes
    crosses = stages.size * stages.stride > group.domain.size
    seconds = send_seconds(message, machine=case, distance=stages.stride, crosses=crosses)
    return (stages.size > 1) * seconds


# Exposed seconds by part.


def time_parts(
    *,
    case: TrainingCase,
    candidates: Candidates,
    layers: Sequence[LayerTime],
    pipeline: Pipeline,
    head: HeadTime,
    states: StateTimes,
    micro_batches: Floats,
    offloaded: Floats = 0.0,
) -> dict[str, Floats]:
    """Return the exposed seconds of a step, by STEP_KEYS.

    pipeline_bubble = bubble of `critical_stage` + 2 (p - 1) transfer + stalls of a step's first
    messages (`message_stalls`). If stages run on different GPUs or have a layout, `pipeline_parts`
    computes the bubble.

    The slowest stage runs m micro-batches and waits while the other stages fill and drain the
    pipeline. The exposed part of transfers between stages counts once per micro-batch, and in both
    directions for the first micro-batch. `layers` are as in `critical_stage`. `offloaded` is the
    number of bytes that each micro-batch on the slowest stage sends to the host.
    """
    profile = case.profile
    c, m, framework = candidates, micro_batches, profile.framework
    p = c.pipeline_parallel_size
    critical = critical_stage(case=case, candidates=c, layers=layers, pipeline=pipeline, head=head)
    stage = critical.stage
    transfer = transfer_seconds(case=case, candidates=c)
    stalled, stalled_once = message_stalls(case=case, candidates=c)
    overhead = column(framework.step_overhead_s, like=p)
    if framework.host_launch_s:
        overhead = overhead + m * stage.host_waits
    parts = {
        "compute": m * (stage.compute + critical.ends - critical.ends_communication),
        "attention": m * stage.attention,
        "recompute": m * stage.recompute,
        "tensor_parallel": m * (stage.tensor + critical.ends_communication),
        "context_parallel": column(m * stage.context, like=p),
        "expert_parallel": column(m * stage.expert, like=p),
        "pipeline_bubble": critical.bubble + 2.0 * (p - 1.0) * transfer + stalled_once,
        "pipeline_p2p": (2.0 * (1.0 - framework.pipeline_overlap))
        * m
        * c.virtual_pipeline_parallel_size
        * transfer
        + m * stalled,
        "data_parallel": data_parallel_seconds(
            profile=profile,
            candidates=c,
            states=states,
            micro_batches=m,
            forward=stage.occupied_forward,
            stage=stage.occupied,
            layers=pipeline.critical.count,
        ),
        "optimizer": states.update_s,
        "offload": column(
            _offload_seconds(
                case, states=states, stage=stage, offloaded=offloaded, micro_batches=m
            ),
            like=p,
        ),
        "overhead": overhead,
    }
    slower = straggler_share(
        case=case,
        candidates=c,
        micro_batches=m,
        devices=_devices(case, c, pipeline),
        run=states.run,
    )
    if anywhere(slower > 0.0):
        busy = ("compute", "attention", "recompute")
        waits = slower * sum(parts[name] for name in busy)
        parts["data_parallel"] = parts["data_parallel"] + waits
    return (
        parts
        if profile.release_factor == 1.0
        else {name: profile.release_factor * part for name, part in parts.items()}
    )


def _devices(case: TrainingCase, c: Candidates, pipeline: Pipeline) -> Ints:
    """Return the number of devices of the job, computed from the parallel sizes.

    The cluster's count is not used, because a part of a pipeline may be costed on the devices of
    one kind of GPU or on those of the complete job.
    """
    if pipeline.part is None:
        return case.cluster.num_gpus
    t, p, d = c.tensor_parallel_size, c.pipeline_parallel_size, c.data_parallel_size
    devices: Ints = t * p * c.context_parallel_size * d
    return devices


def _offload_seconds(
    case: TrainingCase,
    *,
    states: StateTimes,
    stage: StageTime,
    offloaded: Floats,
    micro_batches: Floats,
) -> Floats:
    """Return the exposed seconds per step of the optimizer update on the host, or of copying
    activations to the host and back.
    """
    workload = case.workload
    if workload.offload == "optimizer":
        return states.offload_s
    if workload.offload == "activations":
        forward, backward = stage.occupied_forward, stage.occupied - stage.occupied_forward
        return micro_batches * activation_seconds(
            offloaded, forward=forward, backward=backward, gpu=case.cluster.gpu
        )
    return 0.0
