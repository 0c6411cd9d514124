"""Which configurations the frameworks accept: a bit per rule. `reasons` says in words what one of them broke."""

from __future__ import annotations

import numpy as np

from hp_tool.cost.balanced import splits
from hp_tool.cost.candidates import ONE_F_ONE_B, Candidates
from hp_tool.cost.elementwise import BoolArray, IntArray, anywhere, maximum
from hp_tool.cost.schedules.legality import schedule_broken
from hp_tool.cost.strategy_rules import STRATEGY_REASONS, strategy_broken
from hp_tool.domain.frameworks import facts
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, Strategy
from hp_tool.domain.pipeline_split import splits_unevenly
from hp_tool.domain.workload import TrainingWorkload

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
