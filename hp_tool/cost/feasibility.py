"""Which configurations the frameworks accept: a bit per rule, and for one configuration the reason in words."""

from __future__ import annotations

import math

import numpy as np

from hp_tool.cost.balanced import splits
from hp_tool.cost.candidates import ONE_F_ONE_B, BoolArray, Candidates, IntArray
from hp_tool.cost.elementwise import anywhere, maximum
from hp_tool.cost.schedules.legality import least_micro_batches, schedule_broken, schedule_rule
from hp_tool.cost.strategy_rules import STRATEGY_REASONS, explain_strategy, strategy_broken
from hp_tool.domain.frameworks import facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Strategy
from hp_tool.domain.pipeline_split import splits_unevenly
from hp_tool.domain.result import Reason
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.units import gib

REASONS = (
    "heads_not_divisible",
    "hidden_not_divisible",
    "layers_not_divisible",
    "world_size_mismatch",
    "batch_not_divisible",
    "sequence_not_divisible",
    "experts_not_divisible",
    "interleaving_needs_pipeline",
    "micro_batches_not_divisible",
    "too_few_micro_batches",
    "shards_not_divisible",
    "schedule_not_applicable",
    "kinds_not_divisible",
    "encoder_decoder_not_split",
    *STRATEGY_REASONS,
)
"""Bit i of a legality code stands for REASONS[i]."""

MEMORY = "memory"
"""The reason of a legal configuration that does not fit."""


def legality(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    candidates: Candidates,
    strategy: Strategy = DEFAULT_STRATEGY,
) -> IntArray:
    """0 where the framework would accept the configuration, else the broken rules as bits; shape of the candidates."""
    c = candidates
    t, p, v = c.tensor_parallel_size, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
    rank_batch = c.data_parallel_size * c.micro_batch_size
    # Key/value heads are split, or whole copies are kept where there are fewer of them than ranks.
    kv = model.kv_heads
    broken = (
        (model.num_attention_heads % t != 0) | ((kv % t != 0) & (t % kv != 0)),
        (model.hidden_size % t != 0) | (model.ffn_size % t != 0),
        strategy.pipeline_layout is None and _layers_broken(model, cluster, c, framework=workload.framework),
        t * p * c.context_parallel_size * c.data_parallel_size != cluster.num_gpus,
        (workload.global_batch_size % rank_batch != 0) | (workload.global_batch_size < rank_batch),
        _sequence_broken(workload, c),
        _experts_broken(model, c),
        (v > 1) & (p < 2),
        (v > 1) & (c.pipeline_schedule == ONE_F_ONE_B) & (workload.global_batch_size // rank_batch % p != 0),
        _pipeline_unfilled(workload, c),
        _shards_broken(model, c),
        schedule_broken(c, num_layers=model.num_hidden_layers, micro_batches=workload.global_batch_size // rank_batch),
        (p * cluster.kinds[0].num_gpus % cluster.num_gpus != 0) if cluster.kinds else False,
        # Megatron Core's schedules and context parallelism know no cross attention.
        (model.architecture == "encoder_decoder") & ((p > 1) | (c.context_parallel_size > 1)),
        *strategy_broken(model=model, workload=workload, candidates=c, strategy=strategy),
    )
    code: IntArray = sum(rule * (1 << bit) for bit, rule in enumerate(broken))
    return code


def _sequence_broken(workload: TrainingWorkload, c: Candidates) -> BoolArray:
    """Every rank must get an equal piece, of the decoder's sequence too."""
    pieces = _sequence_pieces(c)
    broken: BoolArray = workload.sequence_length % pieces != 0
    if workload.decoder_sequence_length is not None:
        broken = broken | (workload.decoder_sequence_length % pieces != 0)
    return broken


def _sequence_pieces(c: Candidates) -> IntArray:
    """Pieces a sequence is cut into: two for each context-parallel rank (balanced causal load), each sharded again by SP."""
    sharded = 1 + (c.tensor_parallel_size - 1) * c.sequence_parallel
    pieces: IntArray = c.context_parallel_size * (1 + (c.context_parallel_size > 1)) * sharded
    return pieces


def _pipeline_unfilled(workload: TrainingWorkload, c: Candidates) -> BoolArray | bool:
    """Some frameworks' 1F1B wants m >= p - 1."""
    if not facts(workload.framework).fills_pipeline:
        return False
    micro_batches = workload.global_batch_size // (c.data_parallel_size * c.micro_batch_size)
    few: BoolArray = micro_batches < c.pipeline_parallel_size - 1
    return few


def _layers_broken(model: ModelSpec, cluster: ClusterSpec, c: Candidates, *, framework: str) -> BoolArray:
    """Where the framework balances blocks: a stage without any; or interleaving, which it does not have. Elsewhere every chunk
    holds the same number of layers, or the ends hold fewer, see `domain.pipeline_split`. Two kinds of GPU hold any number each.
    """
    p, layers = c.pipeline_parallel_size, model.num_hidden_layers
    if facts(framework).balances_blocks:
        empty: BoolArray = (splits(model, p).empty > 0) | (c.virtual_pipeline_parallel_size > 1)
        return empty
    chunks = p * c.virtual_pipeline_parallel_size
    if cluster.kinds:  # balanced layer by layer; at least one in each chunk
        too_few: BoolArray = chunks > layers
        return too_few
    even = layers % chunks == 0
    uneven = splits_unevenly(num_layers=layers, stages=p, chunks=c.virtual_pipeline_parallel_size)
    broken: BoolArray = (even | uneven) == 0
    return broken


def _experts_broken(model: ModelSpec, c: Candidates) -> BoolArray:
    """Experts must divide over e_p ranks, those (times e_t) over the ranks of one pipeline stage; a dense model has none."""
    ep, etp = c.expert_parallel_size, c.expert_tensor_parallel_size
    if not model.num_experts:
        return (ep > 1) | (etp > 1)
    ranks = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size
    width = model.moe_intermediate_size or model.ffn_size
    broken: BoolArray = (model.num_experts % ep != 0) | (ranks % (ep * etp) != 0) | (width % etp != 0)
    return broken


def _shards_broken(model: ModelSpec, c: Candidates) -> BoolArray | bool:
    """Shard groups must divide the data-parallel group, and their replicas the ranks that hold the same experts."""
    size, d = c.data_parallel_shard_size, c.data_parallel_size
    if not anywhere(size > 0):
        return False
    broken: BoolArray = d % maximum(size, 1) != 0
    if model.num_experts:
        replicas = maximum(d // maximum(size, 1), 1)
        ranks = c.tensor_parallel_size * c.context_parallel_size * d
        broken = broken | (ranks // (c.expert_parallel_size * c.expert_tensor_parallel_size) % replicas != 0)
    return broken & (size > 0)


def rejection_counts(codes: IntArray, *, weights: IntArray | None = None) -> dict[str, int]:
    """How many candidates broke each rule; one that broke two counts in both, and as often as its weight says."""
    found = np.bincount(codes, weights=weights)
    broken = np.flatnonzero(found)
    counts = {name: int(found[broken[broken >> bit & 1 == 1]].sum()) for bit, name in enumerate(REASONS)}
    return {name: count for name, count in counts.items() if count}


def explain(
    code: int,
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: TrainingWorkload,
    config: ParallelConfig,
    strategy: Strategy = DEFAULT_STRATEGY,
) -> tuple[Reason, ...]:
    """The broken rules of one configuration, with numbers and the mend."""
    names = [name for bit, name in enumerate(REASONS) if code >> bit & 1]
    return tuple(
        explain_strategy(name, model=model, config=config, strategy=strategy)
        if name in STRATEGY_REASONS
        else _explain(name, model, cluster, workload, config)
        for name in names
    )


def _explain(name: str, model: ModelSpec, cluster: ClusterSpec, workload: TrainingWorkload, config: ParallelConfig) -> Reason:
    t, p, v = config.tensor_parallel_size, config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    c, d, b = config.context_parallel_size, config.data_parallel_size, config.micro_batch_size
    heads, layers, batch = model.num_attention_heads, model.num_hidden_layers, workload.global_batch_size
    if name == "heads_not_divisible":
        allowed = _divisors(heads, limit=64)
        return Reason(
            code=name,
            message=f"tensor_parallel_size {t} does not divide num_attention_heads {heads} (and num_key_value_heads "
            f"{model.kv_heads}); choose one of {allowed}",
            needed=t,
            available=heads,
        )
    if name == "hidden_not_divisible":
        return Reason(
            code=name,
            message=f"tensor_parallel_size {t} does not divide hidden_size {model.hidden_size} and intermediate_size "
            f"{model.ffn_size}; choose a common divisor",
            needed=t,
            available=model.hidden_size,
        )
    if name == "layers_not_divisible" and facts(workload.framework).balances_blocks:
        empty = splits(model, p).empty
        return Reason(
            code=name,
            message=f"{workload.framework} splits {layers} layers and the output layer by weight: with pipeline_parallel_size "
            f"{p} x virtual_pipeline_parallel_size {v}, stages without a block: {empty}; choose fewer stages and one chunk",
            needed=p * v,
            available=layers,
        )
    if name == "too_few_micro_batches":
        return Reason(
            code=name,
            message=f"{workload.framework}'s 1F1B needs at least pipeline_parallel_size - 1 = {p - 1} micro-batches, not "
            f"{batch // max(d * b, 1)} = global_batch_size / (data {d} x micro {b}); "
            "choose fewer stages or smaller micro-batches",
            needed=p - 1,
            available=batch // max(d * b, 1),
        )
    if name == "layers_not_divisible":
        return Reason(
            code=name,
            message=f"pipeline_parallel_size {p} x virtual_pipeline_parallel_size {v} does not divide num_hidden_layers "
            f"{layers}; choose a product among {_divisors(layers, limit=layers)}{_unevenly(layers)}",
            needed=p * v,
            available=layers,
        )
    if name == "world_size_mismatch":
        return Reason(
            code=name,
            message=f"tensor {t} x pipeline {p} x context {c} x data {d} = {t * p * c * d} devices, but cluster.num_gpus is "
            f"{cluster.num_gpus}; choose sizes whose product divides {cluster.num_gpus}",
            needed=t * p * c * d,
            available=cluster.num_gpus,
        )
    if name == "batch_not_divisible":
        return Reason(
            code=name,
            message=f"data_parallel_size {d} x micro_batch_size {b} = {d * b} does not divide global_batch_size {batch}; "
            "change micro_batch_size or global_batch_size",
            needed=d * b,
            available=batch,
        )
    if name == "sequence_not_divisible":
        parts = c * (2 if c > 1 else 1) * (t if config.sequence_parallel else 1)
        return Reason(
            code=name,
            message=f"sequence_length {_lengths(workload)} cannot be split {parts} ways (context {c}, sequence parallel "
            f"over tensor {t}); choose a multiple of {parts}",
            needed=parts,
            available=workload.sequence_length,
        )
    if name == "experts_not_divisible":
        ep, etp, ranks = config.expert_parallel_size, config.expert_tensor_parallel_size, t * c * d
        mend = (
            f"choose an expert_parallel_size that divides num_experts {model.num_experts} and, times "
            f"expert_tensor_parallel_size {etp}, the {ranks} ranks of a stage (tensor {t} x context {c} x data {d})"
            if model.num_experts
            else "the model has no experts; leave both at 1"
        )
        return Reason(
            code=name,
            message=f"expert_parallel_size {ep} x expert_tensor_parallel_size {etp} does not fit: {mend}",
            needed=ep * etp,
            available=model.num_experts or 1,
        )
    if name == "interleaving_needs_pipeline":
        return Reason(
            code=name,
            message=f"virtual_pipeline_parallel_size {v} needs pipeline_parallel_size of at least 2, not {p}",
            needed=2,
            available=p,
        )
    if name == "shards_not_divisible":
        size = config.data_parallel_shard_size
        return Reason(
            code=name,
            message=f"data_parallel_shard_size {size} does not divide data_parallel_size {d}"
            + (", or its replicas do not divide the ranks that hold the same experts" if model.num_experts else "")
            + f"; choose one of {_divisors(d, limit=d)}, or 0 for all of them",
            needed=size,
            available=d,
        )
    if name == "kinds_not_divisible":
        shares = " and ".join(f"{kind.num_gpus} x {kind.gpu.name}" for kind in cluster.kinds)
        whole = cluster.num_gpus // math.gcd(*(kind.num_gpus for kind in cluster.kinds))
        return Reason(
            code=name,
            message=f"pipeline_parallel_size {p} does not divide {shares} into stages of one kind each; "
            f"choose a multiple of {whole}",
            needed=whole,
            available=p,
        )
    if name == "encoder_decoder_not_split":
        return Reason(
            code=name,
            message=f"{model.name} has an encoder and a decoder, which frameworks run without pipeline (pipeline {p}) and "
            f"context parallelism (context {c}); set both sizes to 1",
            needed=p * c,
            available=1,
        )
    m = batch // max(d * b, 1)
    if name == "schedule_not_applicable":
        return Reason(
            code=name,
            message=schedule_rule(config, num_layers=layers, micro_batches=m),
            needed=least_micro_batches(config),
            available=m,
        )
    return Reason(
        code=name,
        message=f"interleaving needs the number of micro-batches ({m} = global_batch_size / (data {d} x micro {b})) to be a "
        f"multiple of pipeline_parallel_size {p}; change micro_batch_size, or set virtual_pipeline_parallel_size to 1",
        needed=p,
        available=m,
    )


def _unevenly(layers: int) -> str:
    """The numbers of stages that shorter ends make possible besides."""
    sizes = [1 << k for k in range(1, layers.bit_length() + 1)]
    found = [p for p in sizes if layers % p and splits_unevenly(num_layers=layers, stages=p, chunks=1)]
    return f", or stages with one chunk each and shorter ends among {found}" if found else ""


def _lengths(workload: TrainingWorkload) -> str:
    """One number, or the encoder's and the decoder's."""
    decoder = workload.decoder_sequence_length
    return str(workload.sequence_length) + (f" (decoder {decoder})" if decoder is not None else "")


def memory_reason(*, needed: float, available: float, parts: dict[str, float]) -> Reason:
    """Why a legal configuration does not fit: the sum, and its parts from the largest down."""
    largest = sorted(parts.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {gib(size)}" for name, size in largest if size >= 0.01 * needed)
    return Reason(
        code=MEMORY, message=f"needs {gib(needed)}, has {gib(available)}: {shown}", needed=needed, available=available
    )


def host_memory_reason(*, needed: float, available: float) -> Reason:
    """Why what is offloaded does not fit."""
    return Reason(
        code="host_memory",
        message=f"offloads {gib(needed)} a device, whose share of host memory is {gib(available)}; "
        "lower training.offload_fraction",
        needed=needed,
        available=available,
    )


def _divisors(n: int, *, limit: int) -> list[int]:
    return [k for k in range(1, min(n, limit) + 1) if n % k == 0]
