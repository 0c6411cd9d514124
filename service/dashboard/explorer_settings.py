"""The explorer's controls: their values, which are its address, and the options of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, cast

from fastapi import Query as QueryParameter

from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.query import Query
from hp_tool.domain.workload import AttentionKind
from service.dashboard.page import address

MAX_SIZE = 64
"""Largest tensor, pipeline and context parallel size offered; the address accepts any."""
MAX_CHUNKS = 16
LENGTHS = tuple(1024 * 2**k for k in range(11))
RECOMPUTATION = {"none": "none", "selective": "selective (attention core)", "full": "full"}
SWITCH = {"off": "off", "on": "on"}
ZERO = {"0": "0, nothing", "1": "1, optimizer", "2": "2, and gradients", "3": "3, and weights"}

Name = Annotated[str, QueryParameter(max_length=100)]
Count = Annotated[int, QueryParameter(ge=1, le=1 << 20)]
Size = Annotated[int | None, QueryParameter(ge=1, le=1 << 20)]
Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of the controls, under their names in the address."""

    model: Name = "llama-3-70b"
    gpu: Name = "h100-sxm-80gb"
    num_gpus: Count = 64
    sequence_length: Annotated[int, QueryParameter(ge=1, le=1 << 24)] = 8192
    global_batch_size: Count = 512
    precision: Annotated[str, QueryParameter(max_length=20)] = "bf16"
    attention: AttentionKind = "flash"
    tp: Size = None
    """None, here and below: the value of the fastest configuration."""
    pp: Size = None
    vpp: Size = None
    cp: Size = None
    ep: Size = None
    mbs: Size = None
    recompute: Recomputation | None = None
    sp: Literal["on", "off"] | None = None
    zero: Annotated[int | None, QueryParameter(ge=0, le=3)] = None

    def workload(self) -> dict[str, Any]:
        """Mapping of a query without a configuration."""
        return {
            "kind": "training",
            "model": self.model,
            "cluster": {"gpu": self.gpu, "num_gpus": self.num_gpus},
            "training": {
                "sequence_length": self.sequence_length,
                "global_batch_size": self.global_batch_size,
                "precision": self.precision,
                "attention": self.attention,
            },
        }

    def parallel(self) -> dict[str, Any]:
        """Mapping of the configuration, without the values that are None."""
        values = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            # Without a pipeline there is nothing to interleave, whatever the control says.
            "virtual_pipeline_parallel_size": None if self.pp == 1 else self.vpp,
            "context_parallel_size": self.cp,
            "expert_parallel_size": self.ep,
            "micro_batch_size": self.mbs,
            "recompute": self.recompute,
            "sequence_parallel": None if self.sp is None else self.sp == "on",
            "zero_stage": self.zero,
        }
        return {name: value for name, value in values.items() if value is not None}

    def at(self, config: ParallelConfig) -> Settings:
        """These settings with the controls at `config`."""
        return replace(
            self,
            tp=config.tensor_parallel_size,
            pp=config.pipeline_parallel_size,
            vpp=config.virtual_pipeline_parallel_size,
            cp=config.context_parallel_size,
            ep=config.expert_parallel_size,
            mbs=config.micro_batch_size,
            recompute=cast(Recomputation, recompute_name(config.recompute).split()[0]),
            sp="on" if config.sequence_parallel else "off",
            zero=config.zero_stage,
        )

    @property
    def href(self) -> str:
        """The explorer's page at these settings."""
        return address("/explorer", asdict(self))


def explorer_href(query: Query, parallel: ParallelConfig | None) -> str | None:
    """Explorer at this configuration; None if its controls cannot express the query's model or cluster."""
    cluster, training = query.cluster, query.training
    if training is None or not isinstance(query.model, str) or isinstance(cluster, str):
        return None
    if not isinstance(cluster.gpu, str) or cluster.num_gpus is None or training.sequence_length is None:
        return None
    settings = Settings(
        model=query.model,
        gpu=cluster.gpu,
        num_gpus=cluster.num_gpus,
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        precision=training.precision,
        attention=training.attention,
    )
    return settings.href if parallel is None else settings.at(parallel).href


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One value of a control."""

    value: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice; ordered options are drawn as a slider."""

    name: str
    label: str
    value: str
    options: tuple[Option, ...]
    slider: bool
    help: str = ""


def controls(settings: Settings, *, model: ModelSpec, config: ParallelConfig) -> tuple[Control, ...]:
    """A control for each axis, set to its value in `config`."""
    n, c = settings.num_gpus, config
    layers = model.num_hidden_layers
    sizes = [size for size in _powers(MAX_SIZE) if size <= n]
    stages = [size for size in _divisors(layers) if size <= min(n, MAX_SIZE)]
    layers_per_rank = layers // c.pipeline_parallel_size if layers % c.pipeline_parallel_size == 0 else layers
    chunks = [size for size in _divisors(layers_per_rank) if size <= MAX_CHUNKS]
    heads = [size for size in sizes if size <= model.num_attention_heads]
    axes = [
        _numbers("sequence_length", "Sequence length", settings.sequence_length, LENGTHS, help="tokens"),
        _numbers("tp", "Tensor parallel (TP)", c.tensor_parallel_size, heads),
        _numbers("pp", "Pipeline parallel (PP)", c.pipeline_parallel_size, stages),
        _numbers("vpp", "Model chunks per rank", c.virtual_pipeline_parallel_size, chunks),
        _numbers("cp", "Context parallel (CP)", c.context_parallel_size, sizes),
    ]
    if model.num_experts:
        experts = [size for size in _divisors(model.num_experts) if size <= n]
        axes.append(_numbers("ep", "Expert parallel (EP)", c.expert_parallel_size, experts))
    return (
        *axes,
        _numbers("mbs", "Micro-batch", c.micro_batch_size, _powers(16), help="sequences"),
        _choice("recompute", "Recomputation", recompute_name(c.recompute).split()[0], RECOMPUTATION),
        _choice("sp", "Sequence parallel (SP)", "on" if c.sequence_parallel else "off", SWITCH, slider=False),
        _choice("zero", "ZeRO stage", str(c.zero_stage), ZERO, slider=False),
    )


def _numbers(name: str, label: str, value: int, known: Iterable[int], *, help: str = "") -> Control:
    return _choice(name, label, str(value), {str(number): f"{number:,}" for number in sorted({*known, value})}, help=help)


def _choice(name: str, label: str, value: str, labels: dict[str, str], *, slider: bool = True, help: str = "") -> Control:
    options = tuple(Option(value=option, label=option_label) for option, option_label in labels.items())
    return Control(name=name, label=label, value=value, options=options, slider=slider, help=help)


def _powers(largest: int) -> list[int]:
    return [2**k for k in range(largest.bit_length())]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
