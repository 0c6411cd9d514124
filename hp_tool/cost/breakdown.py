"""Convert a candidate's costs to an estimate with MFU, HFU, days and price."""

from dataclasses import replace

import numpy as np

from hp_tool import __version__
from hp_tool.cost.arrays import BoolArray, Bools, Floats
from hp_tool.cost.candidates import CORE_ATTN, NONE, SELECTIVE, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.flops import TokenFlops, step_tokens, token_flops
from hp_tool.cost.goodput import goodput
from hp_tool.cost.legality_reasons import host_memory_reason, memory_reason
from hp_tool.cost.lora import trained_parameters
from hp_tool.cost.model_layers import layer_kinds
from hp_tool.cost.recomputation import recomputed_layer_fraction, repeated_token_flops
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.stage_contents import blocks_by_stage
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.cost.uncertainty import (
    exceeds_probability,
    familiarity_of,
    intervals,
    memory_log_sd,
    nearest_runs,
    simplified_fields,
    unmeasured_features,
)
from hp_tool.domain.fit import fit_of
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate, MemoryEstimate, Reason, TimeEstimate
from hp_tool.domain.units import JOULES_PER_MWH, SECONDS_PER_DAY, SECONDS_PER_HOUR
from hp_tool.domain.workload import VariableLengthWorkload

MIN_RETRY_PROBABILITY = 0.01
"""Minimum probability of allocator retries that an estimate reports."""
MIN_WAIT_FRACTION = 0.01
"""Minimum fraction of a dense model's step spent waiting for the host before CUDA graphs are
suggested.
"""
LAUNCH_BOUND_RATIO = 1.02
"""Ratio of the step time to the step time with CUDA graphs, above which a step is reported as
launch-bound.
"""
ROUNDING_FACTOR = 1.0 - 1e-9
"""Factor on bounds that covers the rounding errors of their floating-point sums."""
NEEDLESS_RECOMPUTE = (
    "recompute selective frees nothing here and runs the attention core again: flash attention "
    "stores no scores, and a core "
    "that is run again keeps the projection's whole output, where its values lie, beside the "
    "rotated queries and keys; choose "
    "recompute none"
)


def estimate_row(
    index: int,
    *,
    costs: TrainingCosts,
    candidates: Candidates,
    case: TrainingCase,
    config: ParallelConfig | None = None,
) -> Estimate:
    """Return the complete estimate of row `index`. If the caller already has the row's
    configuration, it can pass it as `config`.
    """
    candidate = candidates.row(index)
    return estimate_alone(
        case=case,
        costs=costs.row(index),
        candidate=candidate,
        config=config or candidate.only_config(),
    )


def estimate_alone(
    *, costs: TrainingCosts, candidate: Candidates, case: TrainingCase, config: ParallelConfig
) -> Estimate:
    """Return the complete estimate of the candidate `config`.

    MFU and HFU count all devices of the cluster. `familiarity` lists features without measurements,
    which widen the intervals.
    """
    model, cluster, workload = case.model, case.cluster, case.workload
    memory = _memory_estimate(costs, fragmentation=case.profile.framework.fragmentation_fraction)
    unmeasured = unmeasured_features(case=case, candidate=candidate)
    parts = {name: float(seconds) for name, seconds in costs.parts.items()}
    step_s = float(costs.step_s)
    log_sd = memory_log_sd(case=case, unmeasured=len(unmeasured))
    fails = float(
        exceeds_probability(
            total_bytes=memory.total_bytes, device_bytes=costs.device_bytes, log_sd=log_sd
        )
    )
    recorded_s = _step_with_graphs_s(case, candidate, costs)
    tokens = step_tokens(workload)
    flops = token_flops(model, workload)
    halved = flops.causal
    rate = tokens / (step_s * cluster.num_gpus)
    peak = peak_flops(cluster.gpu, precision=workload.precision)
    again, again_paper = _recomputed_flops(candidate, model, flops)
    again_halved, _ = _recomputed_flops(candidate, model, halved)
    busy = (parts["compute"] + parts["attention"] + parts["recompute"]) / step_s
    estimate = Estimate(
        feasible=bool(costs.feasible),
        reasons=_memory_reasons(memory, host_capacity_bytes=costs.host_capacity_bytes),
        parallel=config,
        memory=memory,
        time=TimeEstimate(step_s=step_s, parts_s=parts),
        tokens_per_second=rate * cluster.num_gpus,
        tokens_per_second_per_gpu=rate,
        model_tflops_per_gpu=rate * flops.model / 1e12,
        mfu=rate * flops.model / peak,
        hfu=rate * (flops.model + again) / peak,
        mfu_causal=rate * halved.model / peak,
        hfu_causal=rate * (halved.model + again_halved) / peak,
        hfu_paper=rate * (flops.model + again_paper) / peak,
        intervals=intervals(
            step_s=step_s,
            memory_total_bytes=memory.total_bytes,
            case=case,
            unmeasured=unmeasured,
            recorded_s=recorded_s,
            retries=float(costs.retry_chance),
            slowdown=float(costs.retry_slowdown),
        ),
        familiarity=familiarity_of(case, unmeasured),
        out_of_memory_probability=fails,
        fit=fit_of(
            out_of_memory_probability=fails,
            within_headroom=memory.total_bytes <= memory.capacity_bytes,
        ),
        provenance=_provenance(case, config)
        | _recompute_provenance(case, candidate)
        | _stage_kinds_provenance(cluster, costs)
        | _nearly_full_provenance(costs)
        | ({"with_cuda_graphs": {"step_s": recorded_s}} if recorded_s is not None else {}),
        goodput=goodput(case=case),
    )
    if workload.total_tokens is None:
        return estimate
    return _with_training_totals(estimate, case=case, tokens=tokens, step_s=step_s, busy=busy)


def host_waits_s(costs: TrainingCosts, *, case: TrainingCase) -> Floats:
    """Return the seconds per step in which devices wait for their hosts, including allocator
    retries.
    """
    framework = case.profile.framework
    return costs.parts["overhead"] - framework.step_overhead_s * case.profile.release_factor


def may_be_launch_bound(waits_s: Floats, *, step_s: Floats) -> Bools:
    """Return whether the waits for hosts are long enough for the step to exceed LAUNCH_BOUND_RATIO.
    CUDA graphs save at most these waits.
    """
    least = max(MIN_WAIT_FRACTION, ROUNDING_FACTOR * (1.0 - 1.0 / LAUNCH_BOUND_RATIO))
    long: Bools = waits_s > least * step_s
    return long


def launch_bound(candidates: Candidates, *, case: TrainingCase) -> BoolArray:
    """Return whether kernel launches limit the step time of each of n rows of a dense model; shape
    (n,).

    The query must not set cuda_graphs, and the rows must satisfy `may_be_launch_bound`.
    """
    graphs_s = training_costs(case=case, candidates=candidates, compares_graphs=True).graphs_s
    assert graphs_s  # present, because of compares_graphs
    bound: BoolArray = np.asarray(graphs_s[0] > LAUNCH_BOUND_RATIO * graphs_s[1])
    return bound


def _step_with_graphs_s(
    case: TrainingCase, candidate: Candidates, costs: TrainingCosts
) -> float | None:
    """Return the step time with CUDA graphs if the query does not set cuda_graphs and the step is
    launch-bound; else None.
    """
    step_s = float(costs.step_s)
    if case.recorded is None or (
        host_waits_s(costs, case=case) <= MIN_WAIT_FRACTION * step_s and not case.model.num_experts
    ):
        return None
    # The costs of a row have no graphs_s, so they are computed again for the candidate alone.
    graphs_s = costs.graphs_s or training_costs(case=case, candidates=candidate).graphs_s
    assert graphs_s  # present for a single candidate whose query does not set cuda_graphs
    as_launched, as_recorded = map(float, graphs_s)
    return (
        step_s * as_recorded / as_launched
        if as_launched > LAUNCH_BOUND_RATIO * as_recorded
        else None
    )


def _with_training_totals(
    estimate: Estimate, *, case: TrainingCase, tokens: float, step_s: float, busy: float
) -> Estimate:
    cluster, workload, goodput = case.cluster, case.workload, estimate.goodput
    assert workload.total_tokens is not None
    seconds = workload.total_tokens / tokens * step_s
    days, gpu_hours = seconds / SECONDS_PER_DAY, seconds * cluster.num_gpus / SECONDS_PER_HOUR
    effective_days = None
    if goodput is not None:
        effective_days, gpu_hours = days / goodput.fraction, gpu_hours / goodput.fraction
    price, carbon = cluster.price_per_gpu_hour, cluster.grid_carbon_kg_per_kwh
    energy = seconds * cluster.num_gpus * _power_w(cluster, busy=busy)
    return replace(
        estimate,
        days=days,
        effective_days=effective_days,
        gpu_hours=gpu_hours,
        cost=gpu_hours * price if price is not None else None,
        energy=energy,
        co2_kg=None
        if carbon is None
        else 1e3 * energy / JOULES_PER_MWH * cluster.power_usage_effectiveness * carbon,
    )


def _nearly_full_provenance(costs: TrainingCosts) -> dict[str, object]:
    """Return provenance entries for a nearly full device: the probability of allocator retries and
    their slowdown.
    """
    retries, slowdown = float(costs.retry_chance), float(costs.retry_slowdown)
    return (
        {"nearly_full": {"probability": retries, "slowdown": slowdown}}
        if retries > MIN_RETRY_PROBABILITY
        else {}
    )


def _stage_kinds_provenance(cluster: ClusterSpec, costs: TrainingCosts) -> dict[str, object]:
    """Return provenance entries for a pipeline over two kinds of GPU: the number of layers per
    stage on each kind.
    """
    if not cluster.kinds:
        return {}
    layers = zip(cluster.kinds, costs.layers_by_kind, strict=True)
    return {"layers_per_stage": [[kind.gpu.name, int(count)] for kind, count in layers]}


def _memory_estimate(costs: TrainingCosts, *, fragmentation: float) -> MemoryEstimate:
    parts = {f"{name}_bytes": float(size) for name, size in costs.memory_parts.items()}
    total = float(costs.memory_total_bytes)
    allocated = total - parts["overhead_bytes"]
    # The allocator releases cached blocks before the device is full.
    reservable = max(allocated, float(costs.device_bytes) - parts["overhead_bytes"])
    return MemoryEstimate(
        total_bytes=total,
        capacity_bytes=float(costs.capacity_bytes),
        device_bytes=float(costs.device_bytes),
        worst_stage=int(costs.worst_stage),
        host_bytes=float(costs.host_bytes),
        layer_activations_bytes=float(costs.layer_activations_bytes),
        allocated_bytes=allocated,
        reserved_bytes=min(allocated * (1.0 + fragmentation), reservable),
        **parts,
    )


def _memory_reasons(memory: MemoryEstimate, *, host_capacity_bytes: float) -> tuple[Reason, ...]:
    """Return the reasons why the device's or the host's memory is exceeded; empty if everything
    fits.
    """
    if memory.total_bytes > memory.capacity_bytes:
        return (
            memory_reason(
                needed=memory.total_bytes, available=memory.capacity_bytes, parts=memory.parts_bytes
            ),
        )
    if memory.host_bytes > host_capacity_bytes:
        return (host_memory_reason(needed=memory.host_bytes, available=host_capacity_bytes),)
    return ()


def _recomputed_flops(
    candidate: Candidates, model: ModelSpec, flops: TokenFlops
) -> tuple[float, float]:
    """Return the recomputed forward FLOPs per token, as this model counts them and as arXiv
    2205.05198 does.

    The paper counts s/3h, which is three attention cores more than the model's s/6h. Selective
    recomputation repeats one core, s/18h.
    """
    if candidate.recompute_method == NONE:
        return 0.0, 0.0
    if candidate.recompute_method == SELECTIVE:
        if candidate.recompute_modules == CORE_ATTN:
            return flops.attention, 3.0 * flops.attention
        again = repeated_token_flops(model, candidate, attention=flops.attention)
        return again, again
    per_chunk = model.num_hidden_layers / (
        candidate.pipeline_parallel_size * candidate.virtual_pipeline_parallel_size
    )
    fraction = float(recomputed_layer_fraction(candidate, layers_per_chunk=per_chunk))
    again = fraction * (flops.layers + flops.attention)
    return again, again


def _power_w(cluster: ClusterSpec, *, busy: float) -> float:
    """Return the mean power of one device, including its share of the host, in watts.

    The device draws full board power for the fraction of the step spent in kernels of layers,
    embedding, output layer and recomputation. While it waits, communicates or updates, it counts at
    idle power. Cooling, switches and storage are excluded.
    """
    gpu = cluster.gpu
    return gpu.idle_w + (gpu.power_w - gpu.idle_w) * busy + gpu.host_power_w


def _recompute_provenance(case: TrainingCase, candidate: Candidates) -> dict[str, object]:
    """Return a provenance entry `recompute` (a sentence) if recomputing the attention core frees no
    memory.
    """
    core_alone = (
        candidate.recompute_method == SELECTIVE and candidate.recompute_modules == CORE_ATTN
    )
    if not core_alone or case.workload.attention != "flash" or case.model.architecture != "decoder":
        return {}
    kinds, _ = layer_kinds(case=case, candidates=candidate)
    frees = any(layer.saved_selective < layer.saved for layer in kinds.saved)
    return {} if frees else {"recompute": NEEDLESS_RECOMPUTE}


def _assumed_settings(case: TrainingCase, config: ParallelConfig) -> dict[str, object]:
    """Return the values assumed for settings that the query omits. If a ranking varies the
    dispatcher, the dispatcher is part of the configuration and is not listed here.
    """
    key, dispatcher = "parallel.moe_token_dispatcher_type", config.moe_token_dispatcher_type
    return dict(case.assumed) | (
        {key: dispatcher} if dispatcher is not None and key in case.assumed else {}
    )


def _provenance(case: TrainingCase, config: ParallelConfig) -> dict[str, object]:
    model, cluster, workload, profile = case.model, case.cluster, case.workload, case.profile
    provenance: dict[str, object] = {
        "version": __version__,
        "model": model.name,
        "gpu": cluster.gpu.name,
        "num_gpus": cluster.num_gpus,
        "gpu_efficiency": profile.gpu.gpu,
        "gpu_efficiency_measured": profile.gpu.measured,
        "framework_efficiency": profile.framework.framework,
        "framework_efficiency_measured": not {"trainer", "die"}.intersection(
            nearest_runs(case).differs
        ),
        "flops_convention": f"{workload.attention_mask_flops} attention"
        + (", no weight gradients of frozen matrices" if workload.freezes_output_layer else ""),
        "price_per_gpu_hour": cluster.price_per_gpu_hour,
        "assumed": _assumed_settings(case, config),
    }
    if (
        workload.attention == "flash"
        and profile.framework.attention_kernel in profile.gpu.attention_kernels
    ):
        provenance["attention_kernel"] = profile.framework.attention_kernel
    if workload.lora is not None:
        provenance["trained_parameters"] = int(trained_parameters(model, workload.lora, config))
    if workload.framework_version is not None:
        version, factor, newest = (
            workload.framework_version,
            profile.release_factor,
            profile.framework.newest_release,
        )
        same = "fitted constants are those of every release, defaults its own"
        trend = same if factor == 1.0 else f"steps {factor:.3f} times those under {newest}"
        provenance["framework_version"] = f"{version}: {trend}"
    if isinstance(workload, VariableLengthWorkload):
        provenance |= {
            "sequence_lengths": workload.sequence_lengths,
            "packed": workload.packed,
            "row_fill": workload.tokens_per_row / workload.sequence_length,
            "attended_length": workload.attended_length,
        }
    if model.blocks is not None and config.pipeline_parallel_size > 1:
        provenance["blocks_by_stage"] = blocks_by_stage(
            model, config, case.strategy.pipeline_layout
        )
    return provenance | simplified_fields(model)
