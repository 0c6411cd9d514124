"""The host: a device can run no kernel before it was launched."""

from __future__ import annotations

import dataclasses

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import Column, maximum, minimum
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import ClusterSpec

MOE_LAUNCHES = 58.0 / 31.0
"""Kernels of a layer with experts over those of a dense one, both passes, as attention.py (8 elementwise, 6 matmuls, 2 of the
core), mlp.py (9 and 6) and experts.py (36 and 6) count them."""
FORWARD_LAUNCHES = 12.0 / 31.0
"""Share of a layer's kernels that belong to the forward pass: what recomputing it launches again."""


def without_host(framework: FrameworkEfficiency) -> FrameworkEfficiency:
    """The constants where kernels are launched as recorded CUDA graphs: no device waits."""
    return dataclasses.replace(
        framework, host_layer_s=0.0, host_tensor_stall_s=0.0, host_pipeline_stall_s=0.0, expert_overhead_s=0.0
    )


def launched_layers(layers: Column, *, moe_fraction: Column, recomputed_fraction: Column) -> Column:
    """Dense layers without recomputation that have as many kernels as `layers` layers, of which these shares have experts
    and are recomputed whole.
    """
    return layers * (1.0 + (MOE_LAUNCHES - 1.0) * moe_fraction) * (1.0 + FORWARD_LAUNCHES * recomputed_fraction)


def host_waits(
    *,
    profile: EfficiencyProfile,
    cluster: ClusterSpec,
    candidates: Candidates,
    layers: Column,
    recomputed_fraction: Column,
    forward_s: Column,
    backward_s: Column,
) -> tuple[Column, Column]:
    """Seconds a device waits for its host in one micro-batch's forward and in its backward pass through `layers` layers (of
    launched_layers), which take the device `forward_s` and `backward_s`: max(0, f l (h + t s) - forward_s), f the forward
    pass's share of the launches, and the same of the backward pass, which repeats what is recomputed.

    h launches one layer's kernels, whatever their size. s is added for each of the t ranks of a tensor-parallel group, whose
    collectives wait for the rank that was held up longest, where hosts also serve a network: the group itself, or the
    pipeline, on several nodes. Not counted: launching the embedding, the output layer and the loss.
    """
    framework = profile.framework
    t, domain = candidates.tensor_parallel_size, cluster.nvlink_domain_size
    stall = framework.host_tensor_stall_s * (t > domain)
    if cluster.num_gpus > domain:
        stall = stall + framework.host_pipeline_stall_s * (candidates.pipeline_parallel_size > 1)
    host_s = layers * (framework.host_layer_s + t * stall)
    forward = FORWARD_LAUNCHES / (1.0 + FORWARD_LAUNCHES * recomputed_fraction) * host_s
    return maximum(forward - forward_s, 0.0), maximum(host_s - forward - backward_s, 0.0)


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
