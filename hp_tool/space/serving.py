"""The space of serving configurations as arrays."""

import math

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase, default_max_num_seqs
from hp_tool.cost.serving.experts import fewest_redundant
from hp_tool.cost.serving.legality import legality, rejection_counts
from hp_tool.domain import bounds
from hp_tool.domain.engines import engine_facts
from hp_tool.domain.parallel import ParallelQuery, axis_values, divisors

MAX_COMBINATIONS = 20_000_000
"""Maximum number of combinations per query, before filtering."""
MAX_STAGES = 16
"""Maximum number of pipeline stages tried by default. Each stage adds a hop to every token."""


def serving_space(
    *, query: ParallelQuery, case: ServingCase, concurrency: tuple[int, ...]
) -> tuple[ServingCandidates, dict[str, int]]:
    """Return every legal combination that the query allows, at each concurrency, and the number of
    combinations that each rule rejected.

    By default, sizes are the divisors of the number of devices, and the number of redundant experts
    is the smallest that gives every rank equally many experts. Expert parallelism and attention
    data parallelism apply only to MoE models. Batch limits are the engine's defaults.
    """
    model, engine, num_gpus = case.model, case.engine, case.cluster.num_gpus
    shares = divisors(num_gpus, limit=num_gpus)
    expert_shares = (1,) if model.num_experts is None else shares
    stages = tuple(k for k in shares if k <= min(MAX_STAGES, model.num_hidden_layers))
    axes = {
        "parallel.tensor_parallel_size": axis_values(query.tensor_parallel_size)
        or tuple(k for k in shares if model.num_attention_heads % k == 0),
        "parallel.pipeline_parallel_size": axis_values(query.pipeline_parallel_size) or stages,
        "parallel.attention_data_parallel_size": axis_values(query.attention_data_parallel_size)
        or expert_shares,
        "parallel.expert_parallel_size": axis_values(query.expert_parallel_size) or expert_shares,
        "parallel.redundant_experts": axis_values(query.redundant_experts) or (-1,),
        "parallel.max_num_seqs": axis_values(query.max_num_seqs) or (-1,),
        "parallel.max_num_batched_tokens": axis_values(query.max_num_batched_tokens)
        or (engine.max_num_batched_tokens,),
        "inference.concurrency": concurrency,
    }
    lengths = {name: len(values) for name, values in axes.items()}
    bounds.announce_combinations(math.prod(lengths.values()), axes=lengths, most=MAX_COMBINATIONS)
    t, p, d, e, r, seqs, budget, load = (
        axis.ravel()
        for axis in np.meshgrid(
            *(np.array(values, dtype=np.int64) for values in axes.values()), indexing="ij"
        )
    )
    candidates = ServingCandidates(
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        expert_parallel_size=e,
        redundant_experts=np.where(r < 0, fewest_redundant(model, e), r),
        attention_data_parallel_size=d,
        data_parallel_size=np.maximum(num_gpus // (t * p), 1),
        max_num_seqs=np.where(seqs < 0, default_max_num_seqs(engine, d), seqs),
        max_num_batched_tokens=budget,
        concurrency=load,
    )
    if engine_facts(engine.engine).splits_experts_over_stage and query.expert_parallel_size is None:
        candidates = candidates.take(np.flatnonzero((e == 1) | (e == t * d)))
    codes = legality(
        model=model, num_gpus=num_gpus, candidates=candidates, longest_request=case.longest_request
    )
    legal = np.flatnonzero(codes == 0)
    bounds.check_work(done=len(codes) - len(legal))
    return candidates.take(legal), rejection_counts(codes)
