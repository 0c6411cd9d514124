"""The host: a device can run no kernel before it was launched."""

from __future__ import annotations

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import maximum, minimum
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec


def host_waits(
    *, profile: EfficiencyProfile, cluster: ClusterSpec, candidates: Candidates, layers: Column, device_s: Column
) -> Column:
    """Seconds a device waits for its host in one micro-batch's forward and backward pass through `layers` layers, which take
    the device `device_s`: max(0, l (h + t s) - device_s).

    h launches one layer's kernels, whatever their size. s is added for each of the t ranks of a tensor-parallel group, whose
    collectives wait for the rank that was held up longest, where hosts also serve a network: the group itself, or the
    pipeline, on several nodes. Not counted: launching the embedding, the output layer and the loss.
    """
    framework = profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    return maximum(layers * (framework.host_layer_s + t * stall) - device_s, 0.0)


def message_stalls(*, profile: EfficiencyProfile, cluster: ClusterSpec, candidates: Candidates) -> tuple[Column, Column]:
    """(seconds a micro-batch, seconds a step) by which blocking messages between stages are held up in large jobs.

    A stage between two others receives and sends in each direction, four messages a micro-batch; with two stages it is two.
    Filling and draining the pipeline adds two for each further stage.
    """
    framework = profile.framework
    if not framework.message_stall_s or cluster.num_gpus <= framework.message_stall_nodes * cluster.gpus_per_node:
        return 0.0, 0.0
    others = candidates.pipeline_parallel_size - 1
    return 2.0 * framework.message_stall_s * minimum(others, 2), 2.0 * framework.message_stall_s * others
