"""Determine the values of each axis to try: those in the query, else default values for the model
and the cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hp_tool.cost.arrays import Bools, Ints
from hp_tool.cost.candidates import (
    DISPATCHERS,
    ONE_F_ONE_B,
    Candidates,
    recompute_codes,
    schedule_code,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.domain.frameworks import Degree, framework_facts, training_engine
from hp_tool.domain.parallel import (
    ParallelQuery,
    PipelineSchedule,
    Recompute,
    RecomputeModule,
    RecomputeName,
    TokenDispatcher,
    axis_values,
    divisors,
)
from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.domain.releases import FLEX_EXISTS, LATEST, is_at_least
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError

MAX_MICRO_BATCH = 64
MAX_EXPERT_TENSOR = 8
"""Maximum expert tensor-parallel size tried by default."""
CONTEXT_TOKENS = 1_024
"""Minimum number of tokens per rank. Larger context-parallel sizes are not tried by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Values of each axis to try."""

    tensor_parallel_size: tuple[int, ...]
    pipeline_parallel_size: tuple[int, ...]
    virtual_pipeline_parallel_size: tuple[int, ...]
    context_parallel_size: tuple[int, ...]
    expert_parallel_size: tuple[int, ...]
    expert_tensor_parallel_size: tuple[int, ...]
    micro_batch_size: tuple[int, ...]
    sequence_parallel: tuple[bool, ...] | None
    """None: on if tensor_parallel_size > 1, else off."""
    recompute: tuple[tuple[int, int, int], ...]
    """Recomputation codes; see cost.candidates.RECOMPUTE_COLUMNS."""
    zero_stage: tuple[int, ...]
    moe_token_dispatcher_type: tuple[int, ...] = (0,)
    """Dispatcher codes; see cost.candidates.DISPATCHERS."""
    known_zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    """All stages that the framework supports, whether or not they are tried."""
    data_parallel_shard_size: tuple[int, ...] = (0,)
    """Ranks per shard group; 0: the whole data-parallel group."""
    data_parallel_size: int | None = None
    """Required data-parallel size; None: it follows from the number of devices."""
    pipeline_schedule: tuple[PipelineSchedule, ...] | None = None
    """None: 1F1B, interleaved if a rank has several model chunks."""
    chunks_are_asked: bool = False
    """Whether the query sets the number of model chunks per rank. If it does not, only numbers are
    tried that divide the number of layers, either as is or with the embedding and the output layer
    counted as one layer each.
    """

    def lengths(self, *names: str) -> dict[str, int]:
        """Return the number of values of each axis, by the axis's path in a query."""
        values = {name: getattr(self, name) for name in names}
        return {
            f"parallel.{name}": len(each)
            for name, each in values.items()
            if isinstance(each, tuple)
        }

    def schedules(self) -> tuple[tuple[int, int], ...]:
        """Return the compatible pairs (pipeline_schedule code, virtual_pipeline_parallel_size)."""
        chunks = self.virtual_pipeline_parallel_size
        if self.pipeline_schedule is None:
            return tuple((ONE_F_ONE_B, count) for count in chunks)
        names = self.pipeline_schedule
        return tuple(
            (schedule_code(name), count)
            for name in names
            for count in scheduled_chunks(chunks, schedule=name)
        )


def default_axes(*, query: ParallelQuery, case: TrainingCase) -> Axes:
    """Return the values to try for each axis: those of the query, else all divisors that the
    framework supports, within practical limits.
    """
    model, cluster, workload = case.model, case.cluster, case.workload
    n = cluster.num_gpus
    # Neither pipeline nor context parallelism can split a model with an encoder and a decoder.
    unsplit = (1,) if model.architecture == "encoder_decoder" else None
    unstaged = unsplit or ((1,) if fine_tunes_on_cards(case) else None)
    framework = framework_facts(workload.framework)
    balanced = framework.balances_blocks
    plain = (1,) if framework.is_plain else unsplit

    def free(name: Degree, values: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the query's values of an axis, else its default values. If the framework does not
        support the axis, the default is (1,).
        """
        return axis_values(getattr(query, name)) or (
            values() if name in framework.degrees else (1,)
        )

    layers = model.num_hidden_layers
    unevenly = () if balanced or cluster.kinds else _uneven_stages(layers, n)
    stages = free(
        "pipeline_parallel_size",
        lambda: unstaged or tuple(sorted((*divisors(layers, limit=n), *unevenly))),
    )
    laid_out = (
        len(parse_layout(query.pipeline_layout).chunks) if query.pipeline_layout is not None else 0
    )
    if laid_out:  # which fixes p * v
        stages = axis_values(query.pipeline_parallel_size) or divisors(laid_out, limit=n)
    chunks = (
        axis_values(query.virtual_pipeline_parallel_size)
        or tuple(laid_out // p for p in stages if laid_out and laid_out % p == 0)
        or (plain if "virtual_pipeline_parallel_size" in framework.degrees else (1,))
        or tuple(
            k for k in range(1, layers + 1) if layers % k == 0 or _with_ends(layers, stages, k)
        )
    )
    shards = axis_values(query.data_parallel_shard_size) or (0,)
    supported_stages = framework.zero_stages
    default_stages = tuple(
        stage for stage in supported_stages if stage == 1 or (stage == 0 and not any(shards))
    )  # 0 means no sharding
    return Axes(
        tensor_parallel_size=free(
            "tensor_parallel_size", lambda: divisors(model.num_attention_heads, limit=n)
        ),
        pipeline_parallel_size=stages,
        virtual_pipeline_parallel_size=chunks,
        context_parallel_size=free(
            "context_parallel_size", lambda: plain or _context_sizes(workload, n)
        ),
        expert_parallel_size=free(
            "expert_parallel_size", lambda: divisors(model.num_experts or 1, limit=n)
        ),
        expert_tensor_parallel_size=free(
            "expert_tensor_parallel_size", lambda: _expert_tensor_sizes(case)
        ),
        moe_token_dispatcher_type=_dispatchers(query, case),
        micro_batch_size=axis_values(query.micro_batch_size)
        or divisors(
            workload.global_batch_size,
            limit=1 if query.dynamic_context_parallel else MAX_MICRO_BATCH,
        ),
        sequence_parallel=axis_values(query.sequence_parallel) or None,
        recompute=_recompute_values(query, case),
        zero_stage=axis_values(query.zero_stage) or default_stages or supported_stages,
        known_zero_stages=supported_stages,
        data_parallel_shard_size=shards,
        data_parallel_size=query.data_parallel_size,
        pipeline_schedule=axis_values(query.pipeline_schedule) or None,
        chunks_are_asked=query.virtual_pipeline_parallel_size is not None
        or bool(laid_out)
        or bool(cluster.kinds),
    )


MAX_CARDS = 8


def fine_tunes_on_cards(case: TrainingCase) -> bool:
    """Return whether the job fine-tunes on up to MAX_CARDS cards of one host without NVLink.

    Trainers for such hosts replicate or shard the model and use no pipeline parallelism.
    """
    cluster = case.cluster
    return (
        case.workload.task != "pretrain"
        and cluster.gpu.nvlink_bandwidth_bytes_per_second is None
        and cluster.num_gpus <= min(MAX_CARDS, cluster.gpus_per_node)
        and not cluster.kinds
    )


def _expert_tensor_sizes(case: TrainingCase) -> tuple[int, ...]:
    """Return the powers of two by which an expert can be split within an NVLink domain, if there
    are more ranks than experts.

    Otherwise return only 1, because splitting experts adds communication that expert parallelism
    avoids.
    """
    model, cluster = case.model, case.cluster
    if not model.num_experts or model.num_experts >= cluster.num_gpus:
        return (1,)
    max_size = min(
        cluster.num_gpus // model.num_experts, cluster.nvlink_domain_size, MAX_EXPERT_TENSOR
    )
    return tuple(k for k in divisors(model.expert_size, limit=max_size) if k & (k - 1) == 0)


def _dispatchers(query: ParallelQuery, case: TrainingCase) -> tuple[int, ...]:
    """Return the codes of the dispatchers in the query. By default, these are alltoall, and flex if
    the release and the GPUs support it.
    """
    names: tuple[TokenDispatcher, ...] = axis_values(query.moe_token_dispatcher_type)
    exists = (
        is_at_least(case.workload.framework_version or LATEST, since=FLEX_EXISTS)
        and case.cluster.runs_flex_dispatcher
    )
    if not names and case.model.num_experts and exists:
        names = framework_facts(case.workload.framework).dispatchers
    return tuple(DISPATCHERS.index(name) for name in names) or (0,)


def scheduled_chunks(
    chunks: tuple[int, ...], *, schedule: PipelineSchedule | None
) -> tuple[int, ...]:
    """Return the numbers of model chunks per rank that the schedule supports.

    These are two or more for interleaved, two for V-shaped schedules, and one for all others. If
    the schedule is None, any number is supported.

    Raises:
        InputError: The schedule supports none of `chunks`.
    """
    if schedule is None:
        return chunks
    fixed = 2 if schedule in ("zbv", "dualpipe-v") else 1
    interleaved = schedule == "interleaved"
    supported = tuple(count for count in chunks if (count > 1 if interleaved else count == fixed))
    if not supported:
        raise InputError(
            f"pipeline_schedule {schedule} requires a virtual_pipeline_parallel_size "
            f"{'above' if interleaved else 'of'} {fixed}, "
            f"got {', '.join(map(str, chunks))}; change "
            "virtual_pipeline_parallel_size or remove pipeline_schedule",
            field="parallel.pipeline_schedule",
        )
    return supported


def _context_sizes(workload: TrainingWorkload, num_gpus: int) -> tuple[int, ...]:
    """Return the powers of two that leave each rank at least CONTEXT_TOKENS tokens. Splitting
    shorter sequences only adds communication.

    Return only 1 for unfused attention, which does not support context parallelism (Megatron Core,
    Transformer Engine).
    """
    if workload.attention != "flash":
        return (1,)
    largest = min(max(workload.sequence_length // CONTEXT_TOKENS, 1), num_gpus)
    return tuple(1 << k for k in range(largest.bit_length()))


def _uneven_stages(layers: int, num_gpus: int) -> tuple[int, ...]:
    """Return the numbers of stages that divide the number of devices but not the number of layers
    (`domain.pipeline_layout`).
    """
    return tuple(p for p in divisors(num_gpus, limit=layers - 1) if layers % p)


def _with_ends(layers: int, stages: tuple[int, ...], chunks: int) -> bool:
    """Return whether this number of chunks per rank works with at least one of the
    stage counts that do not divide the number of layers.
    """
    return any(layers % p and p > 1 and _counts_ends(layers, p * chunks) for p in stages)


def is_default_layout(c: Candidates, *, layers: int) -> Bools:
    """Return whether each layout has a default number of chunks: one per rank, or a number that
    divides the layers, as is or with the embedding and the output layer counted as one layer each.
    """
    v = c.virtual_pipeline_parallel_size
    usual: Bools = (v == 1) | _counts_ends(layers, c.pipeline_parallel_size * v)
    return usual


def _counts_ends(layers: int, chunks: Ints) -> Bools:
    return -layers % chunks <= 2


def _recompute_values(query: ParallelQuery, case: TrainingCase) -> tuple[tuple[int, int, int], ...]:
    workload = case.workload
    values: tuple[RecomputeName | Recompute, ...] = axis_values(query.recompute)
    if not values and framework_facts(workload.framework).is_plain:
        values = ("none", "full")
    elif not values:  # merged passes cannot recompute full layers
        sets = tuple(
            Recompute(granularity="selective", modules=modules) for modules in _module_sets(case)
        )
        values = ("none", "selective", *sets, *(() if workload.merges_passes else ("full",)))
    return tuple(dict.fromkeys(recompute_codes(value) for value in values))


def _module_sets(case: TrainingCase) -> tuple[tuple[RecomputeModule, ...], ...]:
    """Return the sets of modules that Megatron Bridge's recipes for MoE models recompute. These
    modules are cheap to recompute.

    Megatron Core does not recompute norms and activations under delayed fp8 scaling.
    """
    model, workload = case.model, case.workload
    if (
        not model.num_experts
        or training_engine(workload.framework) != "megatron-core"
        or workload.lora is not None
    ):
        return ()
    latent: tuple[RecomputeModule, ...] = ("mla_up_proj",) if model.kv_lora_rank is not None else ()
    delayed = workload.precision == "fp8" and workload.fp8_recipe in (None, "delayed")
    cheap: tuple[RecomputeModule, ...] = () if delayed else ("layernorm", "moe_act")
    return tuple(
        dict.fromkeys(modules for modules in (latent, cheap, (*latent, *cheap)) if modules)
    )
