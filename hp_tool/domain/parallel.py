"""Parallelism: a single configuration, or the axes that a search may vary."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval

from hp_tool.domain.fields import Devices, OneOrMany, Shown, Strict, short_repr
from hp_tool.domain.pipeline_layout import PipelineLayout

RecomputeName = Literal["none", "selective", "full", "per_op", "per_layer"]
RecomputeModule = Literal[
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"
]
PipelineSchedule = Literal["1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipe", "dualpipe-v"]
TokenDispatcher = Literal["alltoall", "flex", "allgather"]
ContextCommunication = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Strict):
    """Activation recomputation, in Megatron Core's terms."""

    granularity: RecomputeName
    """none, selective (named modules), full (whole layers); torch-fsdp: per_op, per_layer."""
    method: Literal["uniform", "block"] | None = None
    """full only. uniform (default): a checkpoint every num_layers layers; block: the first
    num_layers of each chunk.
    """
    num_layers: Annotated[int, Interval(ge=1, le=10_000)] | None = None
    """full only. uniform: layers per checkpoint (default 1); block: layers recomputed per model
    chunk (default: all).
    """
    modules: tuple[RecomputeModule, ...] | None = None
    """selective only, Megatron Core's names; default core_attn. core_attn: scores, or the
    log-sum-exp of fused attention; mlp: dense MLPs; moe: routers and experts; moe_act: the experts'
    activation functions; shared_experts; layernorm: the outputs of both norms; mla_up_proj:
    queries, keys and values made from the latents.
    """


def recompute_name(recompute: RecomputeName | Recompute) -> str:
    """Return `selective`, or with details `full block 4`."""
    if isinstance(recompute, str):
        return recompute
    modules = (
        "+".join(recompute.modules)
        if recompute.modules and recompute.modules != ("core_attn",)
        else None
    )
    parts = (recompute.granularity, recompute.method, recompute.num_layers, modules)
    return " ".join(str(part) for part in parts if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Strict):
    """One configuration, fully resolved: no field depends on a default elsewhere."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    recompute: RecomputeName | Recompute = "none"
    zero_stage: int = 1
    data_parallel_shard_size: int = 0
    """Ranks of the data-parallel group over which ZeRO shards; 0: all of them."""
    pipeline_schedule: PipelineSchedule | None = None
    """None: 1f1b, or interleaved if virtual_pipeline_parallel_size exceeds 1."""
    moe_token_dispatcher_type: TokenDispatcher | None = None
    """None: the query's dispatcher, or the default of its framework's release. Also None if each
    rank has all experts.
    """
    rank_order: str | None = None
    """Like the following fields, the same for all candidates of a query; None if the query does not
    set it.
    """
    pipeline_layout: str | None = None
    context_parallel_communication: ContextCommunication | None = None
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    dynamic_context_parallel: bool | None = None

    __repr__ = short_repr


QUERY_STRATEGY_FIELDS = (
    "rank_order",
    "pipeline_layout",
    "context_parallel_communication",
    "hierarchical_context_parallel_sizes",
    "dynamic_context_parallel",
)
"""Fields of ParallelConfig that have the same value for all candidates of a query."""
STRATEGY_FIELDS = (*QUERY_STRATEGY_FIELDS, "moe_token_dispatcher_type")
"""Fields that apply to one framework only. They determine the Strategy of a query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(Strict):
    """Settings that all candidates of a query have in common, such as the rank order and the
    context exchange.
    """

    context_parallel_communication: ContextCommunication = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    """a2a+p2p: (ranks per Ulysses group, number of such groups in the ring). None: the Ulysses
    group is as large as possible within an NVLink domain, and its size divides the heads.
    """
    dynamic_context_parallel: bool = False
    moe_token_dispatcher_type: TokenDispatcher = "alltoall"  # noqa: S105 (a token is no password here)
    """Dispatcher of candidates that do not set one."""
    pipeline_layout: PipelineLayout | None = None
    """Pipeline layout; None: equal stages, see `cost.pipeline_stages`."""


DEFAULT_STRATEGY = Strategy()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelQuery(Strict):
    """`parallel` as a query writes it: each axis is a value (fixed), a list (allowed values) or
    absent (free).
    """

    tensor_parallel_size: Annotated[
        OneOrMany[Devices], Shown("Tensor parallel", "Parallelism", unset="any")
    ] = None
    """Devices that split each matmul (t)."""
    pipeline_parallel_size: Annotated[
        OneOrMany[Devices], Shown("Pipeline parallel", "Parallelism", unset="any")
    ] = None
    """Pipeline stages (p)."""
    virtual_pipeline_parallel_size: Annotated[
        OneOrMany[Devices], Shown("Chunks per rank", "Parallelism", unset="any", kind="training")
    ] = None
    """Model chunks per pipeline rank (v); 1 is plain 1F1B."""
    context_parallel_size: Annotated[
        OneOrMany[Devices], Shown("Context parallel", "Parallelism", unset="any", kind="training")
    ] = None
    """Devices that split a sequence (c)."""
    expert_parallel_size: Annotated[
        OneOrMany[Devices], Shown("Expert parallel", "Parallelism", unset="any")
    ] = None
    """Devices that divide the experts (e)."""
    expert_tensor_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Expert tensor parallel", "Parallelism", unset="any", kind="training"),
    ] = None
    """Devices that split one expert's matmuls."""
    data_parallel_size: Devices | None = None
    """num_gpus / (t p c). It may be omitted; if given, it is checked."""
    data_parallel_shard_size: Annotated[
        OneOrMany[Annotated[int, Interval(ge=0, le=1 << 20)]],
        Shown("ZeRO group", "Parallelism", unset="all replicas", kind="training"),
    ] = None
    """HSDP: number S of adjacent ranks that ZeRO shards over; the d / S groups are replicas. 0
    (default): one group of all ranks.
    """
    micro_batch_size: Annotated[
        OneOrMany[Devices], Shown("Micro-batch", "Parallelism", unset="any", kind="training")
    ] = None
    """Sequences in one forward pass (b)."""
    sequence_parallel: Annotated[
        OneOrMany[bool], Shown("Sequence parallel", "Parallelism", unset="any", kind="training")
    ] = None
    """Whether norms and dropout are sharded over the tensor-parallel group; default: true if t >
    1.
    """
    recompute: Annotated[
        OneOrMany[RecomputeName | Recompute],
        Shown("Recomputation", "Parallelism", unset="any", kind="training"),
    ] = None
    """Activation recomputation: a name, or a mapping with details."""
    zero_stage: Annotated[
        OneOrMany[Annotated[int, Interval(ge=0, le=3)]],
        Shown("ZeRO stage", "Parallelism", unset="any (3: FSDP)", kind="training"),
    ] = None
    """0: replicated, 1: sharded optimizer states, 2: and gradients, 3: and parameters; torch-fsdp:
    2 or 3.
    """
    pipeline_schedule: Annotated[
        OneOrMany[PipelineSchedule],
        Shown("Pipeline schedule", "Parallelism", unset="as chunks need", kind="training"),
    ] = None
    """1f1b; interleaved (at least two model chunks per rank); gpipe; with a split backward pass
    zb-h1, zbv (two chunks per rank), dualpipe (each stage stored twice) and dualpipe-v (two chunks,
    stored once), which also overlap forward and backward passes. None: 1f1b, or interleaved if
    virtual_pipeline_parallel_size exceeds 1.
    """
    pipeline_layout: str | None = None
    """The contents of each model chunk, in Megatron Core's notation: `Et*3|(tt|)*29,m|L`. It has
    pipeline_parallel_size x virtual_pipeline_parallel_size chunks. None: equal stages."""
    rank_order: str | None = None
    """Dimensions that consecutive devices belong to, innermost first; None: Megatron Core's
    tp-cp-ep-dp-pp.
    """
    context_parallel_communication: Annotated[
        ContextCommunication | None,
        Shown("Context exchange", "Parallelism", unset="any", kind="training"),
    ] = None
    """Exchange between the ranks that split a sequence; None: p2p."""
    hierarchical_context_parallel_sizes: tuple[Devices, Devices] | None = None
    """a2a+p2p only: neighbouring ranks that exchange heads, and such groups in the ring (Megatron
    Core). Their product is the context_parallel_size. None: as many of the former as share an
    NVLink domain and divide the heads.
    """
    dynamic_context_parallel: bool | None = None
    """Whether each packed micro-batch takes as many context-parallel ranks as its sequences need,
    at most context_parallel_size (Megatron Core); needs training.packed and sequence_lengths.
    """
    moe_token_dispatcher_type: Annotated[
        OneOrMany[TokenDispatcher],
        Shown("Token dispatcher", "Parallelism", unset="any", kind="training"),
    ] = None
    """alltoall sends a token once per expert, flex (DeepEP, HybridEP) once per node with any of its
    experts, allgather to every rank. None: an estimate uses flex from framework_version 26.02.01
    (NeMo) or 0.16 (Megatron Core) on, else alltoall; a ranking tries both if release and GPUs
    support both.
    """
    attention_data_parallel_size: Annotated[
        OneOrMany[Devices],
        Shown("Attention data parallel", "Parallelism", unset="any", kind="inference"),
    ] = None
    """Inference only: groups of a stage that attend to different requests."""
    redundant_experts: Annotated[
        OneOrMany[Annotated[int, Interval(ge=0, le=1 << 20)]],
        Shown("Redundant experts", "Parallelism", unset="fewest", kind="inference"),
    ] = None
    """Inference only: copies of experts in addition to the model's own, over all ranks that divide
    the experts; None: the fewest that give each rank equally many.
    """
    max_num_seqs: Annotated[
        OneOrMany[Devices],
        Shown("Engine limit (max_num_seqs)", "Parallelism", unset="engine's own", kind="inference"),
    ] = None
    """Inference only: maximum requests that one scheduler runs at once; None: the engine's
    default.
    """
    max_num_batched_tokens: OneOrMany[Devices] = None
    """Inference only: maximum tokens of one forward pass; None: the engine's default."""


def common_settings(query: ParallelQuery, *, context_parallel_size: int) -> dict[str, Any]:
    """Return the query's settings that apply to all candidates of this context-parallel size, by
    field. The levels of context parallelism apply only if their product is this size.
    """
    values = {name: getattr(query, name) for name in QUERY_STRATEGY_FIELDS}
    sizes = query.hierarchical_context_parallel_sizes
    if sizes is not None and sizes[0] * sizes[1] != context_parallel_size:
        values["hierarchical_context_parallel_sizes"] = None
    if context_parallel_size == 1:
        values["dynamic_context_parallel"] = None
    return values


Value = TypeVar("Value")


def axis_values(value: Value | tuple[Value, ...] | None) -> tuple[Value, ...]:
    """Return the distinct values of an axis in a query: none, a single one, or those of a list."""
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, tuple) else (value,)


def divisors(number: int, *, limit: int) -> tuple[int, ...]:
    """Return the divisors of an integer up to `limit`, in ascending order."""
    return tuple(k for k in range(1, min(number, limit) + 1) if number % k == 0)
