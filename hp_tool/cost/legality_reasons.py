"""Reasons why a configuration is illegal or does not fit in memory, with numbers and fixes."""

import math
from collections.abc import Callable

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.filled_stages import split_candidates
from hp_tool.cost.legality import (
    MEMORY,
    REASONS,
    has_indivisible_heads,
    has_indivisible_width,
    has_unsplittable_mixer,
    least_micro_batches,
    schedule_rule,
)
from hp_tool.cost.recurrent import key_heads
from hp_tool.cost.strategy_legality import STRATEGY_REASONS, explain_strategy
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.parallel import ParallelConfig, divisors
from hp_tool.domain.result import Reason
from hp_tool.domain.units import format_gib


def explain_violations(
    code: int, *, case: TrainingCase, config: ParallelConfig
) -> tuple[Reason, ...]:
    """Return the reasons encoded in the `legality` code of one configuration."""
    reasons = []
    for bit, name in enumerate(REASONS):
        if not code >> bit & 1:
            continue
        if name in STRATEGY_REASONS:
            reasons.append(explain_strategy(name, case=case, config=config))
            continue
        message, needed, available = _EXPLANATIONS[name](case, config)
        reasons.append(Reason(code=name, message=message, needed=needed, available=available))
    return tuple(reasons)


def memory_reason(*, needed: float, available: float, parts: dict[str, float]) -> Reason:
    """Return the reason why a legal configuration does not fit in memory, with the total and its
    parts in descending order.
    """
    largest = sorted(parts.items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{name} {format_gib(size)}" for name, size in largest if size >= 0.01 * needed
    )
    return Reason(
        code=MEMORY,
        message=f"needs {format_gib(needed)}, has {format_gib(available)}: {shown}",
        needed=needed,
        available=available,
    )


def host_memory_reason(*, needed: float, available: float) -> Reason:
    """Return the reason for offloaded bytes that exceed host memory."""
    return Reason(
        code="host_memory",
        message=f"offloads {format_gib(needed)} per device, but the host has "
        f"{format_gib(available)} per device; lower training.offload_fraction",
        needed=needed,
        available=available,
    )


def _micro_batches(case: TrainingCase, config: ParallelConfig) -> int:
    return case.workload.global_batch_size // max(
        config.data_parallel_size * config.micro_batch_size, 1
    )


def _micro_batch_arithmetic(config: ParallelConfig) -> str:
    return (
        f"global_batch_size / (data {config.data_parallel_size} x micro {config.micro_batch_size})"
    )


_Explanation = tuple[str, float, float]
"""(problem with its fix, required amount, available amount)."""


def _heads(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    t = config.tensor_parallel_size
    kind = next(kind for _, kind in case.model.kinds if has_indivisible_heads(kind, t))
    heads, kv = kind.num_attention_heads, kind.kv_heads
    possible_sizes = [
        size for size in divisors(heads, limit=64) if not has_indivisible_heads(kind, size)
    ]
    violation = (
        f"num_attention_heads {heads}"
        if heads % t
        else f"num_key_value_heads {kv} and is not a multiple of it"
    )
    return (
        f"tensor_parallel_size {t} does not divide {violation}; choose one of {possible_sizes}",
        t,
        heads if heads % t else kv,
    )


def _hidden(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    t = config.tensor_parallel_size
    model = next(kind for _, kind in case.model.kinds if has_indivisible_width(kind, t))
    return (
        f"tensor_parallel_size {t} does not divide hidden_size {model.hidden_size} and "
        "intermediate_size "
        f"{model.ffn_size}; choose a common divisor",
        t,
        model.hidden_size,
    )


def _layers(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    layers, framework = case.model.num_hidden_layers, case.workload.framework
    if framework_facts(framework).balances_blocks:
        message = (
            f"{framework} gives stages equal weight in {layers} layers and the output layer. "
            f"pipeline_parallel_size {p} x virtual_pipeline_parallel_size {v} has "
            f"empty stages: {split_candidates(case.model, p).empty}; choose fewer stages and "
            "virtual_pipeline_parallel_size 1"
        )
    else:
        message = (
            f"pipeline_parallel_size {p} x virtual_pipeline_parallel_size {v} does not divide "
            f"num_hidden_layers {layers}. Uneven chunks would leave one without layers, or the "
            f"schedule requires equal chunks; choose a product below {layers} "
            f"(zbv: one of {list(divisors(layers, limit=layers))})"
        )
    return message, p * v, layers


def _world_size(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    t, p = config.tensor_parallel_size, config.pipeline_parallel_size
    c, d, devices = config.context_parallel_size, config.data_parallel_size, case.cluster.num_gpus
    return (
        f"tensor {t} x pipeline {p} x context {c} x data {d} = {t * p * c * d} devices, but "
        "cluster.num_gpus is "
        f"{devices}; choose sizes whose product divides {devices}",
        t * p * c * d,
        devices,
    )


def _batch(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    d, b, batch = (
        config.data_parallel_size,
        config.micro_batch_size,
        case.workload.global_batch_size,
    )
    return (
        f"data_parallel_size {d} x micro_batch_size {b} = {d * b} does not divide "
        f"global_batch_size {batch}; "
        "change micro_batch_size or global_batch_size",
        d * b,
        batch,
    )


def _sequence(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    c, t, workload = config.context_parallel_size, config.tensor_parallel_size, case.workload
    pieces = c * (2 if c > 1 else 1) * (t if config.sequence_parallel else 1)
    decoder = workload.decoder_sequence_length
    lengths = str(workload.sequence_length) + (
        f" (decoder {decoder})" if decoder is not None else ""
    )
    return (
        f"sequence_length {lengths} cannot be split {pieces} ways (context {c}, sequence parallel "
        f"over tensor {t}); "
        f"choose a multiple of {pieces}",
        pieces,
        workload.sequence_length,
    )


def _experts(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    ep, etp = config.expert_parallel_size, config.expert_tensor_parallel_size
    t, c, d = config.tensor_parallel_size, config.context_parallel_size, config.data_parallel_size
    fix = (
        f"choose an expert_parallel_size that divides num_experts {case.model.num_experts}, and "
        f"whose product with expert_tensor_parallel_size {etp} divides the {t * c * d} ranks of a "
        f"stage (tensor {t} x context {c} x data {d})"
        if case.model.num_experts
        else "the model has no experts; set both to 1"
    )
    return (
        f"expert_parallel_size {ep} x expert_tensor_parallel_size {etp} does not fit: {fix}",
        ep * etp,
        case.model.num_experts or 1,
    )


def _interleaving(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    return (
        f"virtual_pipeline_parallel_size {v} needs pipeline_parallel_size of at least 2, not {p}",
        2,
        p,
    )


def _uneven_micro_batches(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, m = config.pipeline_parallel_size, _micro_batches(case, config)
    return (
        f"interleaving needs the number of micro-batches ({m} = "
        f"{_micro_batch_arithmetic(config)}) to be a "
        f"multiple of pipeline_parallel_size {p}; change micro_batch_size, or set "
        "virtual_pipeline_parallel_size to 1",
        p,
        m,
    )


def _few_micro_batches(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, m = config.pipeline_parallel_size, _micro_batches(case, config)
    return (
        f"{case.workload.framework}'s 1F1B needs at least pipeline_parallel_size - 1 = {p - 1} "
        "micro-batches, not "
        f"{m} = {_micro_batch_arithmetic(config)}; choose fewer stages or smaller micro-batches",
        p - 1,
        m,
    )


def _shards(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    size, d = config.data_parallel_shard_size, config.data_parallel_size
    return (
        f"data_parallel_shard_size {size} does not divide data_parallel_size {d}"
        + (
            ", or its replicas do not divide the ranks with the same experts"
            if case.model.num_experts
            else ""
        )
        + f"; choose one of {list(divisors(d, limit=d))}, or 0 to shard over all replicas",
        size,
        d,
    )


def _schedule(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    rule = schedule_rule(
        config, num_layers=case.model.num_hidden_layers, micro_batches=_micro_batches(case, config)
    )
    return rule, least_micro_batches(config), _micro_batches(case, config)


def _kinds(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, kinds = config.pipeline_parallel_size, case.cluster.kinds
    shares = " and ".join(f"{kind.num_gpus} x {kind.gpu.name}" for kind in kinds)
    stages = case.cluster.num_gpus // math.gcd(*(kind.num_gpus for kind in kinds))
    return (
        f"pipeline_parallel_size {p} does not divide {shares} into stages with a single kind of "
        f"GPU; choose a multiple of {stages}",
        stages,
        p,
    )


def _encoder_decoder(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    p, c = config.pipeline_parallel_size, config.context_parallel_size
    return (
        f"{case.model.name} is an encoder-decoder model, for which frameworks support neither "
        f"pipeline parallelism (here {p}) nor context parallelism (here {c}); set both sizes to 1",
        p * c,
        1,
    )


def _mixer(case: TrainingCase, config: ParallelConfig) -> _Explanation:
    framework, candidate = case.workload.framework, Candidates.alone(config)
    kind = next(
        kind
        for _, kind in case.model.kinds
        if has_unsplittable_mixer(kind, candidate, workload=case.workload)
    )
    t, c, v = (
        config.tensor_parallel_size,
        config.context_parallel_size,
        config.virtual_pipeline_parallel_size,
    )
    sizes = f"here tensor_parallel_size is {t}, context_parallel_size {c}"
    if kind.is_recurrent and training_engine(framework) != "megatron-core":
        rule = (
            f"{framework} does not split them; set tensor_parallel_size, context_parallel_size and "
            "pipeline_parallel_size to 1"
        )
    elif kind.mixer == "mamba2":
        rule = (
            f"tensor_parallel_size must divide their {kind.mamba_num_heads} heads and "
            f"{kind.mamba_n_groups} groups; context_parallel_size must divide the heads of a "
            "rank, and must divide or be a multiple of its groups; "
            f"virtual_pipeline_parallel_size (here {v}) must be 1 before "
            "training.framework_version 0.17"
        )
    elif kind.is_recurrent:
        rule = (
            f"tensor_parallel_size must divide their {key_heads(kind)} key heads; before "
            "training.framework_version 0.18, context_parallel_size must be 1; from 0.18 on, "
            "tensor_parallel_size x context_parallel_size must divide the key heads"
        )
    else:
        rule = "set context_parallel_size to 1"
    what = kind.mixer if kind.is_recurrent else "selected keys (index_topk)"
    return f"layers with {what}: {rule}; {sizes}", max(t * c, v), 1


_EXPLANATIONS: dict[str, Callable[[TrainingCase, ParallelConfig], _Explanation]] = {
    "heads_not_divisible": _heads,
    "hidden_not_divisible": _hidden,
    "layers_not_divisible": _layers,
    "world_size_mismatch": _world_size,
    "batch_not_divisible": _batch,
    "sequence_not_divisible": _sequence,
    "experts_not_divisible": _experts,
    "interleaving_needs_pipeline": _interleaving,
    "micro_batches_not_divisible": _uneven_micro_batches,
    "too_few_micro_batches": _few_micro_batches,
    "shards_not_divisible": _shards,
    "schedule_not_applicable": _schedule,
    "kinds_not_divisible": _kinds,
    "encoder_decoder_not_split": _encoder_decoder,
    "mixer_not_divisible": _mixer,
}
