"""Sizing: from a budget to a model, its tokens, starting hyperparameters, and the days they
take.
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
    """Experts in place of dense MLPs; a token's share of them is as wide as the dense MLP would
    be.
    """

    num_experts: Annotated[int, Interval(ge=2, le=4096)]
    """Routed experts per layer."""
    num_experts_per_tok: Annotated[int, Interval(ge=1, le=4096)]
    """Experts each token is sent to (top-k)."""
    num_shared_experts: Annotated[int, Interval(ge=0, le=64)] = 0
    """Experts every token passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingQuery(Strict):
    """A budget. What is left out follows from a scaling law, from the cluster, or from both.

    `model` or `parameters`, `tokens` and `flops`: any two of the three fix the training, any one
    fixes it with the law; with `days` the answer is then the fewest devices of the cluster that
    meet this deadline. `days` alone: the training that the whole cluster does in this time.
    """

    id: str | None = None
    """Your name for the query, repeated in the answer."""
    cluster: str | ClusterQuery | None = None
    """As in any query; None: shape and hyperparameters alone, without days."""
    days: Annotated[float, Interval(ge=1e-3, le=1e5)] | None = None
    """Calendar days, time lost to failures included."""
    model: str | ModelSpec | dict[str, Any] | None = None
    """A given model, as in any query; None: its shape follows from the budget."""
    parameters: Annotated[float, Interval(ge=1e6, le=1e15)] | None = None
    """Active parameters: all of a dense model's; of a mixture of experts those that a token
    passes.
    """
    tokens: Annotated[float, Interval(ge=1e3, le=1e18)] | None = None
    """Tokens of the training."""
    flops: Annotated[float, Interval(ge=1e12, le=1e32)] | None = None
    """Compute by the laws' own count, 6 x parameters x tokens."""
    law: LawName = "chinchilla-corrected"
    """How compute is divided between parameters and tokens."""
    tokens_per_parameter: Annotated[float, Interval(ge=1e-3, le=1e6)] | None = None
    """Over-training: this ratio instead of the law's."""
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
    """Limits the parallelism, as in any query."""
    reliability: ReliabilitySpec = ReliabilitySpec()
    """Failures and checkpoints; fields left out take published values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A value, the rule that gives it, and who published the rule."""

    name: str
    value: float | int | str | tuple[float, ...]
    unit: str = ""
    rule: str
    source: str
    extrapolated: bool = False
    """Outside the range in which the rule was fitted."""
    alternatives: dict[str, float] | None = None
    """What other published rules give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The training a budget buys."""

    feasible: bool
    reasons: tuple[Reason, ...] = ()
    model: ModelSpec
    parameters: float
    """All of the model's."""
    active_parameters: float
    """Those a token passes; the same for a dense model."""
    tokens: float
    tokens_per_parameter: float
    """Active ones."""
    flops: float
    """Model FLOPs of the training as the cost model counts them (attention and output layer
    included).
    """
    law: Choice
    """What divided compute between parameters and tokens."""
    loss: Choice
    """Predicted by the corrected Chinchilla fit, on its data and tokenizer."""
    compute_overhead: float
    """0.2: the same loss, trained compute-optimally by that fit, would take 1 / 1.2 of the
    compute.
    """
    shape: tuple[Choice, ...]
    """Why the model looks as it does; empty where it was given."""
    hyperparameters: tuple[Choice, ...]
    num_gpus: int | None = None
    days: float | None = None
    """Of uninterrupted training."""
    effective_days: float | None = None
    """days / goodput."""
    gpu_hours: float | None = None
    """Of effective_days."""
    cost: float | None = None
    """US dollars, of effective_days."""
    goodput: Goodput | None = None
    recommendation: Recommendation | None = None
    """The fastest configuration, with the cost model's whole estimate."""
    query: dict[str, Any] | None = None
    """Valid input of `recommend` and `tune`: the way on from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingAnswer:
    """What `hp-tool size` and POST /v1/sizings answer."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    sizing: Sizing
