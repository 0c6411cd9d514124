"""Values of free axes that a ranking tries in addition to the usual values in `space.axes`.

Settings that change the numerics (precision, batch, dropped tokens) are not free. Offload is tried
only if no configuration fits without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from hp_tool.cost.candidates import MODULES, recompute_codes
from hp_tool.domain.frameworks import framework_facts, training_engine
from hp_tool.domain.parallel import Recompute, divisors
from hp_tool.errors import InputError
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.recompute_rules import check_recompute
from hp_tool.space import Axes, default_axes


def more_module_sets(problem: TrainingProblem, axes: Axes) -> list[tuple[int, int, int]]:
    """Return the codes of selective recomputations that the framework supports and `axes` lacks:
    sets of modules, and recomputation per operation.

    Megatron Core does not recompute norms and activations under delayed fp8 scaling.
    """
    if not _has_free_recomputation(problem):
        return []
    sets = itertools.chain.from_iterable(
        itertools.combinations(MODULES, size) for size in range(1, len(MODULES) + 1)
    )
    # Recomputing an MoE block includes its activations and shared experts.
    module_sets = [
        names
        for names in sets
        if "moe" not in names or not {"moe_act", "shared_experts"} & set(names)
    ]
    workload = problem.workload
    delayed = workload.precision == "fp8" and workload.fp8_recipe in (None, "delayed")
    supported_sets = [
        names for names in module_sets if not (delayed and {"layernorm", "moe_act"} & set(names))
    ]
    specs = [Recompute(granularity="selective", modules=names) for names in supported_sets]
    supported = (
        spec
        for spec in (Recompute(granularity="per_op"), *specs)
        if _supports_recompute(spec, problem)
    )
    return [codes for codes in map(recompute_codes, supported) if codes not in axes.recompute]


def tries_layer_counts(problem: TrainingProblem) -> bool:
    """Return whether a ranking tries each number of recomputed layers, per model chunk (method
    block) and per checkpoint (method uniform).
    """
    workload = problem.workload
    return (
        _has_free_recomputation(problem)
        and training_engine(workload.framework) == "megatron-core"
        and not workload.merges_passes
    )


def more_zero_stages(problem: TrainingProblem, axes: Axes) -> tuple[int, ...]:
    """Return the framework's ZeRO stages that `axes` lacks; none if the query sets the stage."""
    if (
        problem.parallel.zero_stage is not None
        or problem.cluster.kinds
        or framework_facts(problem.workload.framework).is_plain
    ):
        return ()
    return tuple(stage for stage in axes.known_zero_stages if stage not in axes.zero_stage)


def more_shards(problem: TrainingProblem, axes: Axes) -> tuple[int, ...]:
    """Return the sizes of replica groups within which ZeRO may shard, instead of over all
    replicas.
    """
    framework = framework_facts(problem.workload.framework)
    is_plain = framework.is_plain and not framework.broadcasts_weights
    if problem.parallel.data_parallel_shard_size is not None or problem.cluster.kinds or is_plain:
        return ()
    return tuple(
        size
        for size in divisors(problem.cluster.num_gpus, limit=problem.cluster.num_gpus)
        if size > 1
    )


def group_stages(problem: TrainingProblem, stages: Iterable[int]) -> tuple[int, ...]:
    """Return the ZeRO stages that can shard within groups of replicas. For Megatron Core this is
    only stage 1, the distributed optimizer.
    """
    max_stage = 1 if training_engine(problem.workload.framework) == "megatron-core" else 3
    return tuple(stage for stage in stages if 0 < stage <= max_stage)


def strategy_variants(problem: TrainingProblem) -> Iterator[TrainingProblem]:
    """Yield the problem with each other context exchange that the query leaves open, restricted to
    the context-parallel sizes that support it.

    For a2a+p2p, each pair of level sizes is a separate problem.
    """
    sizes = [
        size
        for size in default_axes(query=problem.parallel, case=problem).context_parallel_size
        if size > 1
    ]
    fixed = (
        problem.parallel.context_parallel_communication is not None
        or problem.parallel.dynamic_context_parallel
    )
    if fixed or training_engine(problem.workload.framework) != "megatron-core" or not sizes:
        return
    for kind in ("all_gather", "a2a"):
        yield problem.with_parallel(
            context_parallel_size=tuple(sizes), context_parallel_communication=kind
        )
    for size in sizes:
        for inner in divisors(size, limit=size - 1)[1:]:
            if problem.model.num_attention_heads % inner == 0:
                yield problem.with_parallel(
                    context_parallel_size=size,
                    context_parallel_communication="a2a+p2p",
                    hierarchical_context_parallel_sizes=(inner, size // inner),
                )


def _has_free_recomputation(problem: TrainingProblem) -> bool:
    """Return whether the ranking chooses the recomputation. It does if the query leaves it open and
    the model is a decoder on devices of one kind.
    """
    decoder = (
        problem.model.architecture == "decoder"
        and not framework_facts(problem.workload.framework).is_plain
    )
    return problem.parallel.recompute is None and decoder and not problem.cluster.kinds


def _supports_recompute(spec: Recompute, problem: TrainingProblem) -> bool:
    try:
        check_recompute(spec, problem.model, problem.workload)
    except InputError:
        return False
    return True
