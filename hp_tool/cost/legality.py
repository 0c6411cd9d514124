"""Legality rules of frameworks, one bit per rule, computed for all candidates at once."""

import functools
import operator

import numpy as np

from hp_tool.cost.arrays import Bools, IntArray, Ints, anywhere, maximum
from hp_tool.cost.candidates import (
    DUALPIPE,
    DUALPIPE_V,
    GPIPE,
    ONE_F_ONE_B,
    ZB_H1,
    ZBV,
    Candidates,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.filled_stages import split_candidates
from hp_tool.cost.recurrent import key_heads, value_heads
from hp_tool.cost.strategy_legality import STRATEGY_REASONS, find_violations
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.pipeline_layout import splits_unevenly
from hp_tool.domain.releases import DELTA_RULES_EXCHANGE_HEADS, STAGES_IN_PATTERNS, is_at_least
from hp_tool.domain.workload import TrainingWorkload

# The rules of all frameworks, one bit per rule; `legality_reasons` explains them for one
# configuration.


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
    "mixer_not_divisible",
)
"""Reason codes: bit i of a legality code means REASONS[i]."""

MEMORY = "memory"
"""Reason code of a legal configuration that does not fit in memory."""


def legality(*, case: TrainingCase, candidates: Candidates) -> IntArray:
    """Return 0 if the framework accepts the candidate, else a code with one bit set per violated
    rule.

    The result has the shape of the candidates.
    """
    model, cluster, workload = case.model, case.cluster, case.workload
    c = candidates
    t, p, v = c.tensor_parallel_size, c.pipeline_parallel_size, c.virtual_pipeline_parallel_size
    rank_batch = c.data_parallel_size * c.micro_batch_size
    kinds = [kind for _, kind in model.kinds]
    broken = (
        functools.reduce(operator.or_, [has_indivisible_heads(kind, t) for kind in kinds]),
        functools.reduce(operator.or_, [has_indivisible_width(kind, t) for kind in kinds]),
        case.strategy.pipeline_layout is None
        and _has_indivisible_layers(case, c, framework=workload.framework),
        t * p * c.context_parallel_size * c.data_parallel_size != cluster.num_gpus,
        (workload.global_batch_size % rank_batch != 0) | (workload.global_batch_size < rank_batch),
        _has_indivisible_sequence(workload, c),
        _has_indivisible_experts(model, c),
        (v > 1) & (p < 2),
        (v > 1)
        & (c.pipeline_schedule == ONE_F_ONE_B)
        & (workload.global_batch_size // rank_batch % p != 0),
        _pipeline_unfilled(workload, c),
        has_indivisible_shards(model, c),
        violates_schedule(
            c,
            num_layers=model.num_hidden_layers,
            micro_batches=workload.global_batch_size // rank_batch,
        ),
        (p * cluster.kinds[0].num_gpus % cluster.num_gpus != 0) if cluster.kinds else False,
        # Megatron Core's schedules and context parallelism do not support cross-attention.
        (model.architecture == "encoder_decoder") & ((p > 1) | (c.context_parallel_size > 1)),
        *find_violations(case=case, candidates=c),
        functools.reduce(
            operator.or_, [has_unsplittable_mixer(kind, c, workload=workload) for kind in kinds]
        ),
    )
    code: IntArray = sum(rule * (1 << bit) for bit, rule in enumerate(broken))
    return code


def has_indivisible_heads(model: ModelSpec, t: Ints) -> Bools:
    """Return whether the attention heads cannot be split across t ranks.

    Key/value heads are split; if there are fewer heads than ranks, they are replicated.
    """
    if model.mixer != "attention":
        return False
    kv = model.kv_heads
    broken: Bools = (model.num_attention_heads % t != 0) | ((kv % t != 0) & (t % kv != 0))
    return broken


def has_indivisible_width(model: ModelSpec, t: Ints) -> Bools:
    """Return whether the hidden size or the width of the dense MLP is not divisible by t."""
    width = 0 if model.feed_forward == "none" else model.ffn_size
    broken: Bools = (model.hidden_size % t != 0) | (width % t != 0)
    return broken


def has_unsplittable_mixer(model: ModelSpec, c: Candidates, *, workload: TrainingWorkload) -> Bools:
    """Return whether the framework cannot split the token mixers across the candidate's ranks.

    Megatron Core 0.16 splits Mamba 2's heads and groups across tensor-parallel and context-parallel
    ranks, replicating groups if necessary. It supports interleaving since 0.17 (ssm/mamba_mixer.py,
    mamba_context_parallel.py, mamba_block.py). It splits the heads of a gated delta rule across
    tensor-parallel ranks and, since 0.18, across context-parallel ranks (ssm/gated_delta_net.py).
    It does not split sequences in layers with an indexer (transformer_config.py). Other frameworks
    do not split the layers of Hugging Face transformers.
    """
    t, context, p = c.tensor_parallel_size, c.context_parallel_size, c.pipeline_parallel_size
    if model.mixer == "attention":
        chosen: Bools = (context > 1) if model.index_topk is not None else False
        return chosen
    if not model.is_recurrent:
        return False
    if training_engine(workload.framework) != "megatron-core":
        is_divided: Bools = (t > 1) | (context > 1) | (p > 1)
        return is_divided
    if model.mixer != "mamba2":
        exchanges = is_at_least(workload.framework_version or "", since=DELTA_RULES_EXCHANGE_HEADS)
        ranks = t * context if exchanges else t
        delta: Bools = (key_heads(model) % ranks != 0) | (value_heads(model) % ranks != 0)
        return delta if exchanges else delta | (context > 1)
    heads, groups = model.mamba_num_heads or 1, model.mamba_n_groups
    each = maximum(groups // t, 1)
    over_sequence = (heads // t % context != 0) | ((each % context != 0) & (context % each != 0))
    broken: Bools = (heads % t != 0) | (groups % t != 0) | over_sequence
    if not is_at_least(workload.framework_version or "", since=STAGES_IN_PATTERNS):
        broken = broken | (c.virtual_pipeline_parallel_size > 1)
    return broken


def _has_indivisible_sequence(workload: TrainingWorkload, c: Candidates) -> Bools:
    """Return whether a sequence, or the decoder's sequence, cannot be split into equal chunks."""
    pieces = _sequence_pieces(c)
    broken: Bools = workload.sequence_length % pieces != 0
    if workload.decoder_sequence_length is not None:
        broken = broken | (workload.decoder_sequence_length % pieces != 0)
    return broken


def _sequence_pieces(c: Candidates) -> Ints:
    """Return the number of chunks of a sequence: two per context-parallel rank (to balance causal
    attention), times t with sequence parallelism.
    """
    sharded = 1 + (c.tensor_parallel_size - 1) * c.sequence_parallel
    pieces: Ints = c.context_parallel_size * (1 + (c.context_parallel_size > 1)) * sharded
    return pieces


def _pipeline_unfilled(workload: TrainingWorkload, c: Candidates) -> Bools:
    """Return whether there are fewer than p - 1 micro-batches although the framework's 1F1B
    requires that many.
    """
    if not framework_facts(workload.framework).fills_pipeline:
        return False
    micro_batches = workload.global_batch_size // (c.data_parallel_size * c.micro_batch_size)
    few: Bools = micro_batches < c.pipeline_parallel_size - 1
    return few


def _has_indivisible_layers(case: TrainingCase, c: Candidates, *, framework: str) -> Bools:
    """Return whether the layers cannot be split into the model chunks.

    If the framework balances blocks, no stage may be empty and interleaving is impossible.
    Otherwise all chunks have the same number of layers, or some have fewer
    (`domain.pipeline_layout`), except under ZB-V. Stages on two kinds of GPU may have different
    numbers of layers.
    """
    model = case.model
    p, layers = c.pipeline_parallel_size, model.num_hidden_layers
    if framework_facts(framework).balances_blocks:
        empty: Bools = (split_candidates(model, p).empty > 0) | (
            c.virtual_pipeline_parallel_size > 1
        )
        return empty
    chunks = p * c.virtual_pipeline_parallel_size
    if case.cluster.kinds:  # Balanced by layer, with at least one layer per chunk.
        too_few: Bools = chunks > layers
        return too_few
    even = layers % chunks == 0
    uneven = splits_unevenly(num_layers=layers, stages=p, chunks=c.virtual_pipeline_parallel_size)
    if c.names_schedules:
        uneven = uneven & (c.pipeline_schedule != ZBV)
    broken: Bools = (even | uneven) == 0
    return broken


def _has_indivisible_experts(model: ModelSpec, c: Candidates) -> Bools:
    """Return whether the experts cannot be split across e_p ranks, or e_p e_t does not divide the
    number of ranks of a stage.

    For dense models, return whether expert parallelism is enabled at all.
    """
    ep, etp = c.expert_parallel_size, c.expert_tensor_parallel_size
    if not model.num_experts:
        return (ep > 1) | (etp > 1)
    ranks = c.tensor_parallel_size * c.context_parallel_size * c.data_parallel_size
    width = model.expert_size
    broken: Bools = (model.num_experts % ep != 0) | (ranks % (ep * etp) != 0) | (width % etp != 0)
    return broken


def has_indivisible_shards(model: ModelSpec, c: Candidates) -> Bools:
    """Return whether the shard size does not divide the data-parallel size, or the number of shard
    groups does not divide the number of ranks with the same experts.
    """
    size, d = c.data_parallel_shard_size, c.data_parallel_size
    if not anywhere(size > 0):
        return False
    broken: Bools = d % maximum(size, 1) != 0
    if model.num_experts:
        replicas = maximum(d // maximum(size, 1), 1)
        ranks = c.tensor_parallel_size * c.context_parallel_size * d
        broken = broken | (
            ranks // (c.expert_parallel_size * c.expert_tensor_parallel_size) % replicas != 0
        )
    return broken & (size > 0)


def rejection_counts(codes: IntArray, *, weights: IntArray | None = None) -> dict[str, int]:
    """Return {reason: number of candidates that violate the rule}, each candidate multiplied by its
    weight.

    A candidate counts for every rule that it violates.
    """
    counted = np.bincount(codes, weights=weights)
    broken = np.flatnonzero(counted)
    counts = {
        name: int(counted[broken[broken >> bit & 1 == 1]].sum()) for bit, name in enumerate(REASONS)
    }
    return {name: count for name, count in counts.items() if count}


# Rules of the pipeline schedules.


def violates_schedule(c: Candidates, *, num_layers: int, micro_batches: Ints) -> Bools:
    """Return whether the candidate violates its schedule's rule in RULES. `legality` checks 1F1B
    and interleaving itself.
    """
    schedule = c.pipeline_schedule
    if not c.names_schedules:
        return False
    p, v, m = c.pipeline_parallel_size, c.virtual_pipeline_parallel_size, micro_batches
    uneven = num_layers % (p * v) != 0
    broken: Bools = (schedule != ONE_F_ONE_B) & (
        (p < 2)
        | ((schedule == GPIPE) & (v != 1))
        | ((schedule == ZB_H1) & ((v != 1) | (m < p)))
        | ((schedule == ZBV) & ((v != 2) | (m < 2 * p - 1) | uneven))
        | ((schedule == DUALPIPE) & ((v != 1) | (p % 2 != 0) | (m % 2 != 0) | (m < 2 * p)))
        | ((schedule == DUALPIPE_V) & ((v != 2) | (m < 2 * p)))
    )
    return broken


RULES = {
    "gpipe": "one model chunk per rank",
    "zb-h1": "one model chunk per rank and at least pipeline_parallel_size micro-batches",
    "zbv": "two model chunks per rank of equally many layers, and at least 2 "
    "pipeline_parallel_size - 1 micro-batches",
    "dualpipe": "one model chunk per rank, an even pipeline_parallel_size, and an even number of "
    "micro-batches, at least 2 "
    "pipeline_parallel_size",
    "dualpipe-v": "two model chunks per rank and at least 2 pipeline_parallel_size micro-batches",
}
"""Requirements of each schedule, in addition to at least two pipeline stages."""


def least_micro_batches(config: ParallelConfig) -> int:
    """Return the minimum number of micro-batches of the schedule."""
    p = config.pipeline_parallel_size
    return {"zb-h1": p, "zbv": 2 * p - 1, "dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(
        config.pipeline_schedule or "", 1
    )


def schedule_rule(config: ParallelConfig, *, num_layers: int, micro_batches: int) -> str:
    """Describe the rule of the configuration's schedule, with the configuration's numbers filled
    in.
    """
    p, v = config.pipeline_parallel_size, config.virtual_pipeline_parallel_size
    return (
        f"pipeline_schedule {config.pipeline_schedule} needs at least 2 stages, "
        f"{RULES[config.pipeline_schedule or 'gpipe']}; "
        f"here pipeline_parallel_size is {p}, virtual_pipeline_parallel_size {v}, "
        f"num_hidden_layers {num_layers}, "
        f"micro-batches {micro_batches}. Change one of these values, or remove pipeline_schedule"
    )
