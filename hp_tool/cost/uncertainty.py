"""Prediction intervals, derived from errors on held-out rows.

ln(measured / predicted step time) is assumed normal with mean zero. Its variance is the sum of the
framework's own variance and a term for each difference from the nearest measured runs
(`domain.familiarity`, `domain.efficiency.Doubts`).
"""

import dataclasses
import math

import numpy as np

from hp_tool.cost.arrays import BoolArray, Bools, Floats, Ints
from hp_tool.cost.candidates import (
    ALLGATHER,
    CORE_ATTN,
    DUALPIPE,
    MODULES,
    ONE_F_ONE_B,
    PER_OP,
    Candidates,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.familiarity import (
    Familiarity,
    Nearness,
    Setting,
    arithmetic_precision,
    family_of,
    find_nearest,
    kind_of_model,
)
from hp_tool.domain.frameworks import SAME_CODE, framework_facts, loops_experts
from hp_tool.domain.hardware import DEFAULT_RANK_ORDER, GpuSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.result import Intervals
from hp_tool.domain.workload import TrainingWorkload

CONFIDENCE = 0.9
NORMAL_QUANTILE = 1.6449
"""Half-width of the central 90% interval of a normal distribution, in standard deviations."""
ALLOCATABLE_FRACTION = 0.95
"""Fraction of a device that PyTorch's allocator can use before an allocation fails. The remainder
is lost to fragmentation.

The likelihood of 386 layouts of nanotron without pipelines is highest at 0.951. The outcomes of
fine-tuning runs are predicted best at 0.95 to 0.97 (`benchmarks.accuracy.out_of_memory`).
"""
MAX_TIMED_LENGTH = 16_384
"""Maximum sequence length, in tokens, at which attention was timed (ops/context_attention.csv)."""
MAX_TIMED_LOOP = 8
"""Maximum number of experts in a loop over experts in the timed runs (Mixtral's)."""
NO_PIPELINES = ("internevo", "torch-fsdp")
"""Frameworks without timed runs that use pipelines."""
UNMEASURED_MODULES = MODULES["moe"] | MODULES["shared_experts"]
"""Modules that no published MoE recipe recomputes."""

_normal_survival = np.frompyfunc(lambda z: 0.5 * math.erfc(z / math.sqrt(2.0)), 1, 1)
"""Return the probability that a standard normal variable exceeds z."""


def intervals(
    *,
    step_s: float,
    memory_total_bytes: float,
    case: TrainingCase,
    unmeasured: tuple[str, ...],
    recorded_s: float | None = None,
    retries: float = 0.0,
    slowdown: float = 1.0,
) -> Intervals:
    """Return the central 90% intervals of step time, allocated memory, and reserved memory.

    The allocator reserves at least the memory in use: `reserved_log_sd` raises only the upper bound
    of reserved memory.

    Args:
        recorded_s: Step time with CUDA graphs, passed only if the query does not set cuda_graphs.
            The step-time interval is widened to include the lower bound for this time.
        retries: Probability p of allocator retries (`memory.retry_chance`).
        slowdown: Ratio of the step time with retries to the step time without. The variance of
            ln(step time) increases by p (1 - p) ln(slowdown)^2.
    """
    unsure = math.sqrt(retries * (1.0 - retries)) * math.log(slowdown)
    time = math.exp(
        NORMAL_QUANTILE * math.hypot(step_log_sd(case=case, unmeasured=len(unmeasured)), unsure)
    )
    allocated, reserved = (
        math.exp(
            NORMAL_QUANTILE
            * float(memory_log_sd(case=case, unmeasured=len(unmeasured), reserved=each))
        )
        for each in (False, True)
    )
    return Intervals(
        confidence=CONFIDENCE,
        step_s=((step_s if recorded_s is None else min(step_s, recorded_s)) / time, step_s * time),
        memory_total_bytes=(memory_total_bytes / allocated, memory_total_bytes * allocated),
        memory_reserved_bytes=(memory_total_bytes / allocated, memory_total_bytes * reserved),
        source=case.profile.framework.fitted_on,
    )


def memory_log_sd(*, case: TrainingCase, unmeasured: Ints, reserved: bool = False) -> Floats:
    """Return the standard deviation of ln(measured / predicted allocated memory), given the number
    of unmeasured features.

    With `reserved`, return the upward deviation of reserved memory.
    """
    constants = case.profile.framework
    framework_log_sd = (reserved and constants.reserved_log_sd) or constants.memory_log_sd
    unfamiliar = len({"trainer", "model_kind"}.intersection(nearest_runs(case).differs))
    doubted = unmeasured + unfamiliar + (case.workload.lora is not None)
    variance: Floats = framework_log_sd**2 + doubted * case.profile.doubts.memory_feature_log_sd**2
    return variance**0.5


def exceeds_probability(*, total_bytes: Floats, device_bytes: Floats, log_sd: Floats) -> Floats:
    """Return the probability that memory exceeds what can be allocated, if it is log-normal with
    the median `total_bytes`.

    P = Phi(ln(total / (f device)) / sd), with the fraction f = ALLOCATABLE_FRACTION of the complete
    device, including the headroom. The allocator releases cached blocks before an allocation fails,
    so they are not counted.
    """
    allocatable = ALLOCATABLE_FRACTION * device_bytes
    probability: Floats = np.asarray(
        _normal_survival(np.log(allocatable / total_bytes) / log_sd), dtype=np.float64
    )
    return probability


def out_of_memory_probability(
    *, case: TrainingCase, candidates: Candidates, total_bytes: Floats, device_bytes: Floats
) -> Floats:
    """Return the probability that each candidate runs out of device memory (OOM)."""
    unmeasured: Ints = sum((used * 1 for used in _features(case, candidates).values()), 0)
    return exceeds_probability(
        total_bytes=total_bytes,
        device_bytes=device_bytes,
        log_sd=memory_log_sd(case=case, unmeasured=unmeasured),
    )


def step_log_sd(*, case: TrainingCase, unmeasured: int = 0) -> float:
    """Return the standard deviation of ln(measured / predicted step time), given the number of
    unmeasured features.
    """
    framework, doubts = case.profile.framework, case.profile.doubts
    variance = framework.time_log_sd**2 + unmeasured * doubts.feature_log_sd**2
    variance += nearest_runs(case).variance
    if not case.profile.gpu.measured:
        variance += doubts.kernels_log_sd**2
    if case.workload.lora is not None:
        variance += doubts.lora_log_sd**2
    if has_untimed_experts(case.model, case.workload):
        variance += framework.untimed_expert_log_sd**2
    return math.sqrt(variance)


def has_untimed_experts(model: ModelSpec, workload: TrainingWorkload) -> bool:
    """Return True if the trainer runs experts in a way that no timed run covers. The timed runs
    loop over few experts, but this workload loops over more experts or groups them.
    """
    experts = model.num_experts or 0
    if not experts or not framework_facts(workload.framework).loops_experts:
        return False
    return experts > MAX_TIMED_LOOP or not loops_experts(workload)


def nearest_runs(case: TrainingCase) -> Nearness:
    """Return the measured runs nearest to the case."""
    constants = case.profile.framework
    setting = training_setting(
        model=case.model,
        gpu=case.cluster.gpu,
        workload=case.workload,
        num_gpus=case.cluster.num_gpus,
        lender="" if constants.stands_for is None else constants.framework,
    )
    return find_nearest(setting, case.profile.index, case.profile.doubts.extras)


def familiarity_of(case: TrainingCase, unmeasured: tuple[str, ...]) -> Familiarity:
    """Return the familiarity of a configuration with these unmeasured features."""
    return nearest_runs(case).answer(unmeasured)


def training_setting(
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    workload: TrainingWorkload,
    num_gpus: int,
    lender: str = "",
) -> Setting:
    """Return the attributes by which a training is compared with measured runs."""
    return Setting(
        software=SAME_CODE.get(workload.framework, workload.framework),
        release=workload.framework_version or "",
        gpu=gpu.name,
        die=gpu.silicon or "",
        family=family_of(model.name),
        model_kind=kind_of_model(model),
        precision=arithmetic_precision(workload.precision),
        task="pretrain" if workload.lora is None else "lora",
        num_gpus=num_gpus,
        lender=lender,
    )


def ratio_log_sd(profile: EfficiencyProfile, *, differing: Ints = 0) -> Floats:
    """Return the standard deviation of ln(measured / predicted) for the ratio of two step times.

    Both configurations have the same model and devices; `differing` are the unmeasured features
    that only one of them has.
    """
    framework = profile.framework
    pair = (
        math.sqrt(2.0) * framework.time_log_sd
        if framework.pair_log_sd is None
        else framework.pair_log_sd
    )
    variance: Floats = pair**2 + differing * profile.doubts.feature_log_sd**2
    return variance**0.5


def with_pairs(profile: EfficiencyProfile, *, experts: bool, adapters: bool) -> EfficiencyProfile:
    """Return the profile with the deviations of step-time ratios that apply to MoE models, to
    adapters, or to both.
    """
    constants = profile.framework
    if constants.pair_log_sd is None:
        return profile
    pair = (
        constants.expert_pair_log_sd or constants.pair_log_sd if experts else constants.pair_log_sd
    )
    if adapters:
        pair = math.hypot(pair, profile.doubts.lora_pair_log_sd)
    return dataclasses.replace(profile, framework=dataclasses.replace(constants, pair_log_sd=pair))


def unmeasured_table(*, case: TrainingCase, candidates: Candidates) -> BoolArray:
    """Return a boolean array (n, features): whether each of n rows uses each unmeasured feature."""
    columns = (
        np.broadcast_to(used, len(candidates)) for used in _features(case, candidates).values()
    )
    return np.stack([*columns], axis=1)


def unmeasured_layouts(*, case: TrainingCase, candidates: Candidates) -> BoolArray:
    """Return a boolean array (n,): whether the layout of each row has an unmeasured feature."""
    found = np.zeros(len(candidates), dtype=np.bool_)
    for name, used in _features(case, candidates).items():
        if name.startswith("parallel."):
            found |= used
    return found


def unmeasured_features(*, case: TrainingCase, candidate: Candidates) -> tuple[str, ...]:
    """Return the unmeasured features of one candidate, as query fields.

    No measured step time in `benchmarks.accuracy` covers them.
    """
    return tuple(name for name, is_used in _features(case, candidate).items() if is_used)


def _features(case: TrainingCase, c: Candidates) -> dict[str, Bools]:
    """Return whether each candidate uses each feature that has no measured step time."""
    model, cluster, workload, strategy = case.model, case.cluster, case.workload, case.strategy
    internevo = (
        workload.framework == "internevo"
    )  # Timed under ZeRO 1, within a node and across nodes, without pipelines.
    unmeasured_modules = UNMEASURED_MODULES if model.num_experts else ~(CORE_ATTN | PER_OP)
    return {
        "model.num_nextn_predict_layers": model.num_nextn_predict_layers > 0
        and not model.num_experts,
        "cluster.stages": bool(cluster.kinds),
        "cluster.network_oversubscription": cluster.network_oversubscription > 1.0,
        f"training.optimizer: {workload.optimizer}": workload.optimizer != "adam",
        "training.expert_precision": workload.expert_precision not in (None, workload.precision),
        "training.offload: optimizer": workload.offload == "optimizer",
        "training.frozen_precision: nf4": workload.frozen_precision == "nf4",
        "training.frozen": bool(workload.frozen),
        "training.expert_kernel": (model.num_experts or 0) > MAX_TIMED_LOOP
        and loops_experts(workload),
        "training.sequence_lengths": workload.sequence_lengths is not None,
        "training.sequence_length": workload.computed_attention_length > MAX_TIMED_LENGTH,
        "parallel.pipeline_schedule": (c.pipeline_schedule != ONE_F_ONE_B)
        & (c.pipeline_schedule != DUALPIPE),
        "parallel.pipeline_layout": strategy.pipeline_layout is not None and not model.num_experts,
        "parallel.data_parallel_shard_size": False if internevo else c.data_parallel_shard_size > 0,
        "parallel.zero_stage": (c.zero_stage == 3) if internevo else False,
        "parallel.pipeline_parallel_size": (c.pipeline_parallel_size > 1)
        if workload.framework in NO_PIPELINES
        else False,
        "parallel.moe_token_dispatcher_type: allgather": c.moe_token_dispatcher_type == ALLGATHER,
        "parallel.expert_tensor_parallel_size": c.expert_tensor_parallel_size > 1,
        "parallel.recompute.modules": (c.recompute_modules & unmeasured_modules) > 0,
        "parallel.context_parallel_communication": (c.context_parallel_size > 1)
        if strategy.context_parallel_communication not in ("p2p", "a2a")
        else False,
        "parallel.rank_order": cluster.rank_order != DEFAULT_RANK_ORDER,
    }


# Simplifications of the model, which the provenance of an estimate lists.


def simplified_fields(model: ModelSpec) -> dict[str, object]:
    """Return the provenance entry `simplified`: a list of sentences, empty if nothing is
    simplified.
    """
    simplifications = []
    if model.norms_per_layer != 2 or model.embedding_norm:
        simplifications.append(
            "norms: all count as parameters, time and activations are those of two a layer beside "
            "queries' and keys'"
        )
    if model.attention_sinks:
        simplifications.append("attention_sinks: counted as parameters alone")
    if model.left_out is not None:
        simplifications.append(f"left out: {model.left_out}")
    if model.tower_parameters:
        simplifications.append(
            f"towers: about {model.tower_parameters / 1e9:.2g}B weights count where served, untimed"
        )
    return {"simplified": simplifications} if simplifications else {}
