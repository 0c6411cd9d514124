"""What lives in host memory instead of the device's: bytes on both sides, and seconds that the way there and back costs.

Nothing here is fitted on training runs: copies between pinned host memory and device reach PCIE_FRACTION of the link,
and the host's update HOST_MEMORY_FRACTION of its memory bandwidth.
"""

from __future__ import annotations

from typing import Any

from hp_tool.cost.elementwise import Column, maximum, minimum
from hp_tool.cost.optimizer import BytesPerParameter
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.workload import TrainingWorkload

PCIE_FRACTION = 0.8
"""Pinned copies of many MB against the link's datasheet rate: 25 of 32 GB/s on PCIe 4, 52 of 64 on PCIe 5."""
HOST_MEMORY_FRACTION = 0.45
"""torch's fused AdamW on a CPU moves its 28 bytes a parameter at 0.55 of a copy's rate (torch 2.13, one thread, 2026-11-21),
and a copy reaches about 0.8 of the memory's datasheet rate."""
HOST_STATES = {"adam": 2, "sgd": 1}
"""fp32 states of the optimizers that run on the host."""
TRANSFER_OVERLAP = 1.0
"""Share of activations' copies that runs beside compute, where there is enough of it: copy engines are the GPU's own."""
LAYERS_ON_DEVICE = 2.0
"""Layers whose offloaded activations are on the device all the same: one under way, one in use."""


def link_rate(gpu: GpuSpec) -> float:
    """Bytes a second between device and host, each way."""
    return PCIE_FRACTION * gpu.pcie_bandwidth_bytes_per_second


def offload_states(
    costs: dict[str, Column], *, workload: TrainingWorkload, gpu: GpuSpec, size: BytesPerParameter
) -> dict[str, Column]:
    """State costs with the share f of the optimizer on the host (Megatron's HybridDeviceOptimizer): a rank with P parameters
    in its shard frees their states and master copy; the host keeps fp32 parameters, gradients and states, pinned.

    Gradients come down in fp32, the host updates (reads and writes parameters and states, reads gradients), 16-bit weights
    go up: one after the other, as by default; the device's own share of the update runs meanwhile.
    """
    share, states = workload.offload_fraction, HOST_STATES[workload.optimizer]
    first, last = (costs[f"{end}_optimizer"] / size.optimizer for end in ("first", "last"))
    moved = share * maximum(first, last)
    host_rate = HOST_MEMORY_FRACTION * (gpu.host_memory_bandwidth_bytes_per_second or 0.0)
    update = moved * (8.0 * (1 + states) + 4.0) / host_rate
    copies = moved * (4.0 + size.communicated_weights) / link_rate(gpu)
    kept: dict[str, Any] = {name: (1.0 - share) * costs[name] for name in ("first_optimizer", "last_optimizer")}
    return costs | kept | {
        "update_s": maximum((1.0 - share) * costs["update_s"] - update, 0.0),
        "offload_s": update + copies,
        "host_bytes": moved * (4.0 * (1 + states) + 4.0),
    }  # fmt: skip


def offload_activations(saved: Column, *, layer_bytes: Column, workload: TrainingWorkload) -> tuple[Column, Column]:
    """(bytes that stay on the device, bytes on the host) of a stage that saves `saved`, `layer_bytes` for each layer of one
    micro-batch: the share f of the layers writes what it keeps to the host in the forward pass and reads it back in the
    backward pass (Transformer Engine's CPU offload; with full recomputation DeepSpeed's cpu_checkpointing).
    """
    away = workload.offload_fraction * saved
    return saved - away + minimum(away, LAYERS_ON_DEVICE * layer_bytes), away


def activation_seconds(stage_bytes: Column, *, forward: Column, backward: Column, gpu: GpuSpec) -> Column:
    """Exposed seconds in one micro-batch that brings `stage_bytes` to the host behind its forward pass, and back behind its
    backward pass."""
    each = stage_bytes / link_rate(gpu)
    return 2.0 * each - TRANSFER_OVERLAP * (minimum(each, forward) + minimum(each, backward))
