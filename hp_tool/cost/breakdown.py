"""One row of the cost arrays as a typed estimate, with MFU, HFU, days and money."""

from __future__ import annotations

from typing import Any

from hp_tool import __version__
from hp_tool.cost.candidates import CORE_ATTN, NONE, SELECTIVE, Candidates
from hp_tool.cost.flops import TokenFlops, step_tokens, token_flops
from hp_tool.cost.goodput import goodput
from hp_tool.cost.legality_reasons import host_memory_reason, memory_reason
from hp_tool.cost.recomputation import recomputed_layer_fraction, repeated_token_flops
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.training import TrainingCosts
from hp_tool.cost.uncertainty import intervals, simplified, unchecked_features
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, Strategy
from hp_tool.domain.result import Estimate, MemoryEstimate, Reason, TimeEstimate
from hp_tool.domain.workload import TrainingWorkload, VariableLengthWorkload
from hp_tool.units import SECONDS_PER_DAY, SECONDS_PER_HOUR


def estimate_row(
    index: int,
    *,
    costs: TrainingCosts,
    candidates: Candidates,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    strategy: Strategy = DEFAULT_STRATEGY,
) -> Estimate:
    """Row `index` of many in full."""
    return estimate_alone(
        costs=costs.row(index),
        candidate=candidates.row(index),
        model=model,
        cluster=cluster,
        workload=workload,
        profile=profile,
        strategy=strategy,
    )


def estimate_alone(
    *,
    costs: TrainingCosts,
    candidate: Candidates,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
    strategy: Strategy = DEFAULT_STRATEGY,
) -> Estimate:
    """One candidate alone in full. Shares of peak count all devices of the cluster. What the intervals are widened for, because
    nobody measured it, stands in `provenance` as unchecked.
    """
    memory, config = _memory(costs), candidate.only_config()
    unchecked = unchecked_features(
        model=model, cluster=cluster, workload=workload, config=config, strategy=strategy, profile=profile
    )
    parts = {name: float(seconds) for name, seconds in costs.parts.items()}
    step_s = float(costs.step_s)
    tokens = step_tokens(workload)
    flops = token_flops(model, workload)
    rate = tokens / (step_s * cluster.num_gpus)
    peak = peak_flops(cluster.gpu, precision=workload.precision)
    again, again_paper = _recomputed_flops(candidate, model, flops)
    busy = (parts["compute"] + parts["recompute"]) / step_s
    return Estimate(
        feasible=bool(costs.feasible),
        reasons=_too_large(memory, host_capacity_bytes=costs.host_capacity_bytes),
        parallel=config,
        memory=memory,
        time=TimeEstimate(step_s=step_s, parts_s=parts),
        tokens_per_second=rate * cluster.num_gpus,
        tokens_per_second_per_gpu=rate,
        model_tflops_per_gpu=rate * flops.model / 1e12,
        mfu=rate * flops.model / peak,
        hfu=rate * (flops.model + again) / peak,
        hfu_paper=rate * (flops.model + again_paper) / peak,
        intervals=intervals(step_s=step_s, memory_total_bytes=memory.total_bytes, profile=profile, unchecked=unchecked),
        provenance=_provenance(model, cluster, workload, profile)
        | _kinds(cluster, costs)
        | ({"unchecked": list(unchecked)} if unchecked else {}),
        **_whole_training(model, cluster, workload, step_s=step_s, busy=busy),
    )


def _whole_training(
    model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, *, step_s: float, busy: float
) -> dict[str, Any]:
    """What `total_tokens` take, as Estimate names it; goodput alone where the query does not say how many there are."""
    kept = goodput(model=model, cluster=cluster, workload=workload)
    if workload.total_tokens is None:
        return {"goodput": kept}
    seconds = workload.total_tokens / step_tokens(workload) * step_s
    days, gpu_hours = seconds / SECONDS_PER_DAY, seconds * cluster.num_gpus / SECONDS_PER_HOUR
    effective_days = None
    if kept is not None:
        effective_days, gpu_hours = days / kept.fraction, gpu_hours / kept.fraction
    price = cluster.price_per_gpu_hour
    return {
        "goodput": kept,
        "days": days,
        "effective_days": effective_days,
        "gpu_hours": gpu_hours,
        "cost": gpu_hours * price if price is not None else None,
        "energy": seconds * cluster.num_gpus * _power_w(cluster, busy=busy),
    }


def _kinds(cluster: ClusterSpec, costs: TrainingCosts) -> dict[str, object]:
    """How a pipeline over two kinds of GPU is divided."""
    if not cluster.kinds:
        return {}
    layers = zip(cluster.kinds, costs.layers_by_kind, strict=True)
    return {"layers_per_stage": [[kind.gpu.name, int(count)] for kind, count in layers]}


def _memory(costs: TrainingCosts) -> MemoryEstimate:
    parts = {f"{name}_bytes": float(size) for name, size in costs.memory_parts.items()}
    total = float(costs.memory_total_bytes)
    return MemoryEstimate(
        total_bytes=total,
        capacity_bytes=float(costs.capacity_bytes),
        worst_stage=int(costs.worst_stage),
        host_bytes=float(costs.host_bytes),
        layer_activations_bytes=float(costs.layer_activations_bytes),
        allocated_bytes=total - parts["overhead_bytes"],
        **parts,
    )


def _too_large(memory: MemoryEstimate, *, host_capacity_bytes: float) -> tuple[Reason, ...]:
    """Why it does not fit, on the device or else on the host; nothing where it does."""
    if memory.total_bytes > memory.capacity_bytes:
        return (memory_reason(needed=memory.total_bytes, available=memory.capacity_bytes, parts=memory.parts_bytes),)
    if memory.host_bytes > host_capacity_bytes:
        return (host_memory_reason(needed=memory.host_bytes, available=host_capacity_bytes),)
    return ()


def _recomputed_flops(candidate: Candidates, model: ModelSpec, flops: TokenFlops) -> tuple[float, float]:
    """(forward FLOPs a token run again, the same as arXiv 2205.05198 counts them: its s/3h is three attention cores more
    than the model's s/6h, where one core, s/18h, is what selective recomputation repeats).
    """
    if candidate.recompute_method == NONE:
        return 0.0, 0.0
    if candidate.recompute_method == SELECTIVE:
        if candidate.recompute_modules == CORE_ATTN:
            return flops.attention, 3.0 * flops.attention
        again = repeated_token_flops(model, candidate, attention=flops.attention)
        return again, again
    per_chunk = model.num_hidden_layers / (candidate.pipeline_parallel_size * candidate.virtual_pipeline_parallel_size)
    fraction = float(recomputed_layer_fraction(candidate, layers_per_chunk=per_chunk))
    again = fraction * (flops.layers + flops.attention)
    return again, again


def _power_w(cluster: ClusterSpec, *, busy: float) -> float:
    """Mean power of one device and its share of the host: idle power, plus the rest of the board's for the busy share.

    Busy is the share of the step in kernels of layers, ends and recomputation; a device that waits, communicates or updates
    draws idle power here. Cooling and what switches and storage draw are not counted.
    """
    gpu = cluster.gpu
    idle = gpu.idle_power_w if gpu.idle_power_w is not None else 0.25 * gpu.power_w
    return idle + (gpu.power_w - idle) * busy + gpu.host_power_w


def _provenance(
    model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile
) -> dict[str, object]:
    known: dict[str, object] = {
        "version": __version__,
        "model": model.name,
        "gpu": cluster.gpu.name,
        "num_gpus": cluster.num_gpus,
        "gpu_efficiency": profile.gpu.gpu,
        "gpu_efficiency_measured": profile.gpu.measured,
        "framework_efficiency": profile.framework.framework,
        "flops_convention": f"{workload.attention_mask_flops} attention"
        + (", no weight gradients of frozen matrices" if workload.freezes_output_layer else ""),
        "price_per_gpu_hour": cluster.price_per_gpu_hour,
    }
    if workload.framework_version is not None:
        known["framework_version"] = f"{workload.framework_version}: constants do not tell releases apart"
    if isinstance(workload, VariableLengthWorkload):
        known |= {
            "sequence_lengths": workload.sequence_lengths,
            "packed": workload.packed,
            "row_fill": workload.tokens_per_row / workload.sequence_length,
            "attended_length": workload.attended_length,
        }
    return known | simplified(model)
