"""Intervals of predictions, from the errors on held-out rows, and wider for features without measurements.

ln(measured / predicted step time) is taken as normal around zero. Its standard deviation is the profile's, from held-out rows;
each kind of doubt without data widens it by the same factor.
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
WIDENING = 2.0
"""Factor on a GPU whose constants come from another one, and again for a feature that was never measured. It is a judgement,
the same for all: no data tells it."""
CHECKED_PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8")
CHECKED_SCHEDULES = (None, "1f1b", "interleaved")


def intervals(*, step_s: float, memory_total_bytes: float, profile: EfficiencyProfile, unchecked: tuple[str, ...]) -> Intervals:
    """The central 90 %.

    Measured memory is what the allocator holds: it may keep more than is in use, never less, so `reserved_log_sd` may extend
    the upper bound.
    """
    doubt = NORMAL_QUANTILE * (WIDENING if unchecked else 1.0)
    constants = profile.framework
    time = math.exp(doubt * constants.time_log_sd * (1.0 if profile.gpu.measured else WIDENING))
    below = math.exp(doubt * constants.memory_log_sd)
    above = math.exp(doubt * (constants.reserved_log_sd or constants.memory_log_sd))
    return Intervals(
        confidence=CONFIDENCE,
        step_s=(step_s / time, step_s * time),
        memory_total_bytes=(memory_total_bytes / below, memory_total_bytes * above),
        source=constants.fitted_on,
    )


def unchecked_features(*, case: TrainingCase, config: ParallelConfig) -> tuple[str, ...]:
    """Features of this prediction without any measured step time in `benchmarks.accuracy`, as fields of a query."""
    model, cluster, workload, strategy = case.model, case.cluster, case.workload, case.strategy
    recompute = config.recompute
    internevo = workload.framework == "internevo"  # timed under ZeRO 1, within a node and beyond, without pipelines
    used = {
        f"model.architecture: {model.architecture}": model.architecture != "decoder",
        "model.num_experts": model.num_experts is not None and case.profile.framework.expert_time_log_sd is None,
        "model.num_nextn_predict_layers": model.num_nextn_predict_layers > 0,
        "cluster.stages": bool(cluster.kinds),
        "cluster.network_oversubscription": cluster.network_oversubscription > 1.0,
        f"training.precision: {workload.precision}": workload.precision not in CHECKED_PRECISIONS,
        f"training.fp8_recipe: {workload.fp8_recipe}": workload.fp8_recipe not in (None, "delayed"),
        "training.parameter_precision: fp8": workload.parameter_precision == "fp8",
        f"training.optimizer: {workload.optimizer}": workload.optimizer != "adam",
        "training.offload": workload.offload not in (None, "none"),
        "training.lora": workload.lora is not None,
        "training.frozen": bool(workload.frozen),
        "training.sequence_lengths": workload.sequence_lengths is not None,
        "training.overlap.expert_parallel": workload.overlap is not None and workload.overlap.expert_parallel is True,
        "parallel.pipeline_schedule": config.pipeline_schedule not in CHECKED_SCHEDULES,
        "parallel.pipeline_layout": strategy.pipeline_layout is not None,
        "parallel.data_parallel_shard_size": config.data_parallel_shard_size > 0 and not internevo,
        "parallel.zero_stage": internevo and config.zero_stage == 3,
        "parallel.pipeline_parallel_size": internevo and config.pipeline_parallel_size > 1,
        "parallel.expert_tensor_parallel_size": config.expert_tensor_parallel_size > 1,
        "parallel.recompute.modules": isinstance(recompute, Recompute) and recompute.modules not in (None, (), ("core_attn",)),
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
    if model.expert_bias:
        simplifications.append("expert_bias: counted as parameters alone, divided like the experts' matrices")
    return {"simplified": simplifications} if simplifications else {}
