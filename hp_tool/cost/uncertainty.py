"""Intervals of predictions, from the errors on rows that were left out of the fits.

ln(measured / predicted step time) is taken as normal around zero. Its variance is a sum: the framework's own scatter, and a
doubt for each thing that its measured runs do not tell (`domain.efficiency.Doubts`).
"""

import math

from hp_tool.cost.case import TrainingCase
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import DEFAULT_RANK_ORDER
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.result import Intervals

CONFIDENCE = 0.9
NORMAL_QUANTILE = 1.6449
"""Half-width of the central 90 % of a normal distribution, in standard deviations."""
CHECKED_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
CHECKED_SCHEDULES = (None, "1f1b", "interleaved")
CHECKED_MODULES = {"core_attn", "mla_up_proj", "mlp", "layernorm", "moe_act"}
"""Those that recipes with experts recompute."""


def intervals(*, step_s: float, memory_total_bytes: float, case: TrainingCase, unchecked: tuple[str, ...]) -> Intervals:
    """The central 90 %.

    Measured memory is what the allocator holds: it may keep more than is in use, never less, so `reserved_log_sd` may extend
    the upper bound.
    """
    constants, doubts = case.profile.framework, case.profile.doubts
    time = math.exp(NORMAL_QUANTILE * step_log_sd(case=case, unchecked=len(unchecked)))
    more = (len(unchecked) + (case.workload.lora is not None)) * doubts.memory_feature_log_sd**2
    below, above = (
        math.exp(NORMAL_QUANTILE * math.sqrt(sd**2 + more))
        for sd in (constants.memory_log_sd, constants.reserved_log_sd or constants.memory_log_sd)
    )
    return Intervals(
        confidence=CONFIDENCE,
        step_s=(step_s / time, step_s * time),
        memory_total_bytes=(memory_total_bytes / below, memory_total_bytes * above),
        source=constants.fitted_on,
    )


def step_log_sd(*, case: TrainingCase, unchecked: int = 0) -> float:
    """Standard deviation of ln(measured / predicted step time) of a configuration with so many features without data."""
    framework, doubts, gpu = case.profile.framework, case.profile.doubts, case.cluster.gpu
    variance = framework.time_log_sd**2 + unchecked * doubts.feature_log_sd**2
    if gpu.name not in framework.fitted_gpus:
        variance += doubts.card_log_sd**2
    if gpu.silicon not in framework.fitted_silicon:
        variance += doubts.silicon_log_sd**2
    if not case.profile.gpu.measured:
        variance += doubts.kernels_log_sd**2
    if case.workload.lora is not None:
        variance += doubts.lora_log_sd**2
    return math.sqrt(variance)


def ratio_log_sd(profile: EfficiencyProfile, *, differing: int = 0) -> float:
    """Standard deviation of ln(measured / predicted) of the ratio of two step times, of one model on the same devices;
    `differing` are the features without data that only one of the two has.
    """
    framework = profile.framework
    pair = math.sqrt(2.0) * framework.time_log_sd if framework.pair_log_sd is None else framework.pair_log_sd
    return math.sqrt(pair**2 + differing * profile.doubts.feature_log_sd**2)


def unchecked_features(*, case: TrainingCase, config: ParallelConfig) -> tuple[str, ...]:
    """Features of this prediction without any measured step time in `benchmarks.accuracy`, as fields of a query."""
    model, cluster, workload, strategy = case.model, case.cluster, case.workload, case.strategy
    recompute = config.recompute
    internevo = workload.framework == "internevo"  # timed under ZeRO 1, within a node and beyond, without pipelines
    used = {
        f"model.architecture: {model.architecture}": model.architecture != "decoder",
        "model.num_experts": model.num_experts is not None and case.profile.framework.expert_time_log_sd is None,
        "model.num_nextn_predict_layers": model.num_nextn_predict_layers > 0 and not model.num_experts,
        "cluster.stages": bool(cluster.kinds),
        "cluster.network_oversubscription": cluster.network_oversubscription > 1.0,
        f"training.precision: {workload.precision}": workload.precision not in CHECKED_PRECISIONS,
        f"training.fp8_recipe: {workload.fp8_recipe}": workload.fp8_recipe == "blockwise",
        f"training.optimizer: {workload.optimizer}": workload.optimizer != "adam",
        "training.expert_precision": workload.expert_precision not in (None, workload.precision),
        "training.dispatch_precision": workload.dispatch_precision == "fp8",
        "training.offload: optimizer": workload.offload == "optimizer",
        "training.frozen_precision: nf4": workload.frozen_precision == "nf4",
        "training.frozen": bool(workload.frozen),
        "training.sequence_lengths": workload.sequence_lengths is not None,
        "parallel.pipeline_schedule": config.pipeline_schedule not in CHECKED_SCHEDULES,
        "parallel.pipeline_layout": strategy.pipeline_layout is not None and not model.num_experts,
        "parallel.data_parallel_shard_size": config.data_parallel_shard_size > 0 and not internevo,
        "parallel.zero_stage": internevo and config.zero_stage == 3,
        "parallel.pipeline_parallel_size": internevo and config.pipeline_parallel_size > 1,
        "parallel.moe_token_dispatcher_type: allgather": config.moe_token_dispatcher_type == "allgather",  # noqa: S105
        "parallel.expert_tensor_parallel_size": config.expert_tensor_parallel_size > 1,
        "parallel.recompute.modules": isinstance(recompute, Recompute)
        and not set(recompute.modules or ()) <= (CHECKED_MODULES if model.num_experts else {"core_attn"}),
        "parallel.context_parallel_communication": config.context_parallel_size > 1
        and strategy.context_parallel_communication != "p2p",
        "parallel.rank_order": cluster.rank_order != DEFAULT_RANK_ORDER,
    }
    return tuple(name for name, is_used in used.items() if is_used)


# Parts of a model that an estimate counts in a simpler form; its provenance lists them.


def simplified(model: ModelSpec) -> dict[str, object]:
    """Provenance's `simplified` entry, a list of sentences; empty if the model is counted whole."""
    simplifications = []
    if model.norms_per_layer != 2 or model.query_key_norm is not None or model.embedding_norm:
        simplifications.append("norms: all count as parameters, their time and activations are those of two a layer")
    if model.attention_sinks:
        simplifications.append("attention_sinks: counted as parameters alone")
    if model.left_out is not None:
        simplifications.append(f"left out: {model.left_out}")
    return {"simplified": simplifications} if simplifications else {}
