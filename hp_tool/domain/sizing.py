"""Queries and results of sizing: a budget, and the model, tokens, hyperparameters and days that it
allows.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Interval

from hp_tool.domain.fields import Count, Strict
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.result import Goodput, Reason, Recommendation
from hp_tool.domain.workload import ReliabilitySpec

LawName = Literal["chinchilla-1", "chinchilla-2", "chinchilla-3", "chinchilla-corrected", "kaplan"]
Style = Literal["llama", "gpt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsQuery(Strict):
    """Experts in place of dense MLPs; the experts of a token together are as wide as the dense MLP
    would be.
    """

    num_experts: Annotated[int, Interval(ge=2, le=4096)]
    """Routed experts per layer."""
    num_experts_per_tok: Annotated[int, Interval(ge=1, le=4096)]
    """Experts that each token is sent to (top-k)."""
    num_shared_experts: Annotated[int, Interval(ge=0, le=64)] = 0
    """Experts that process every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingQuery(Strict):
    """A budget for a training. Omitted fields follow from a scaling law, from the cluster, or from
    both.

    Two of the three quantities `model` or `parameters`, `tokens` and `flops` determine the
    training; one of them does so together with the law. If `days` is also set, it is a deadline,
    and the answer has the fewest devices of the cluster that meet it. If only `days` is set, the
    answer is the training that the whole cluster completes in this time.
    """

    id: str | None = None
    """Your name for the query, repeated in the answer."""
    cluster: str | ClusterQuery | None = None
    """As in any query; None: only shape and hyperparameters, without days."""
    days: Annotated[float, Interval(ge=1e-3, le=1e5)] | None = None
    """Calendar days, including time lost to failures."""
    model: str | ModelSpec | dict[str, Any] | None = None
    """A given model, as in any query; None: its shape follows from the budget."""
    parameters: Annotated[float, Interval(ge=1e6, le=1e15)] | None = None
    """Active parameters: all of a dense model's; in a mixture of experts, those that process a
    token.
    """
    tokens: Annotated[float, Interval(ge=1e3, le=1e18)] | None = None
    """Tokens of the training."""
    flops: Annotated[float, Interval(ge=1e12, le=1e32)] | None = None
    """Compute as the laws count it, 6 x parameters x tokens."""
    law: LawName = "chinchilla-corrected"
    """How compute is divided between parameters and tokens."""
    tokens_per_parameter: Annotated[float, Interval(ge=1e-3, le=1e6)] | None = None
    """Over-training: this ratio replaces the law's."""
    style: Style = "llama"
    """llama: RMSNorm, rotary positions, SwiGLU, grouped queries, untied embeddings. gpt: LayerNorm
    with biases, learned positions, GELU, as many key/value heads as heads, tied embeddings.
    """
    vocab_size: Annotated[int, Interval(ge=2, le=10_000_000)] | None = None
    """Rounded up to a multiple of 1,024 (128 for each of 8 tensor-parallel ranks); None: 128,256
    (llama) or 50,257 (gpt).
    """
    aspect_ratio: Annotated[float, Interval(ge=4.0, le=1024.0)] | None = None
    """hidden_size / num_hidden_layers; None: GPT-3's, 64 for small models to 128 for large ones."""
    num_key_value_heads: Annotated[int, Interval(ge=1, le=1024)] | None = None
    """Key and value heads; None: by style."""
    experts: ExpertsQuery | None = None
    """A mixture of experts; None: dense."""
    sequence_length: Count = 4096
    """Tokens per sequence."""
    global_batch_size: Count | None = None
    """Sequences per optimizer step; None: by the batch size law."""
    precision: Precision = "bf16"
    """Precision of matmul inputs."""
    framework: str = "megatron-core"
    """Training framework."""
    parallel: ParallelQuery = ParallelQuery()
    """Restricts the parallelism, as in any query."""
    reliability: ReliabilitySpec = ReliabilitySpec()
    """Failures and checkpoints; omitted fields have published values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value, the rule that determines it, and the source of the rule."""

    name: str
    value: float | int | str | tuple[float, ...]
    unit: str = ""
    rule: str
    source: str
    extrapolated: bool = False
    """Whether the value is outside the range in which the rule was fitted."""
    alternatives: dict[str, float] | None = None
    """Values by other published rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The training that a budget allows."""

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    model: ModelSpec
    parameters: float
    """Total parameters of the model."""
    active_parameters: float
    """Parameters used per token; equal to `parameters` for a dense model."""
    tokens: float
    tokens_per_parameter: float
    """Tokens per active parameter."""
    flops: float
    """Model FLOPs of the training run as the cost model counts them, including attention and the
    output layer.
    """
    law: Choice
    """Scaling law that divides compute between parameters and tokens."""
    loss: Choice
    """Loss predicted by the corrected Chinchilla fit, on its data and tokenizer."""
    compute_overhead: float
    """Compute of the training run divided by that of a compute-optimal one with the same loss,
    minus 1, such as 0.2 for 20% more.
    """
    shape: tuple[Choice, ...]
    """Reasons for the model's shape; empty if the model was given."""
    hyperparameters: tuple[Choice, ...]
    num_gpus: int | None = None
    days: float | None = None
    """Days of uninterrupted training."""
    effective_days: float | None = None
    """days / goodput."""
    gpu_hours: float | None = None
    """GPU-hours of effective_days."""
    cost: float | None = None
    """US dollars for effective_days."""
    goodput: Goodput | None = None
    recommendation: Recommendation | None = None
    """The fastest configuration, with the cost model's complete estimate."""
    query: dict[str, Any] | None = None
    """A query for `recommend` and `tune` with this training run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingAnswer:
    """Answer of `hp-tool size` and POST /v1/sizings."""

    id: str | None
    """Id of the query."""
    status: Literal["ok"] = "ok"
    sizing: Sizing
