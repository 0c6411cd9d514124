"""What the explorer asks for and shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import AttentionKind
from service.dashboard.configuration.contexts import ConfigurationView
from service.dashboard.figures import Stack

Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The controls as they stand, under the names they have in the address."""

    model: str
    gpu: str
    num_gpus: int
    sequence_length: int
    global_batch_size: int
    precision: str
    attention: AttentionKind
    tp: int | None = None
    """None, like what follows: as in the fastest configuration."""
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    mbs: int | None = None
    recompute: Recomputation | None = None
    sp: Literal["on", "off"] | None = None
    zero: int | None = None

    def workload(self) -> dict[str, Any]:
        """What is asked, without a configuration: the mapping of a query."""
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
        """The configuration; what is None is left out."""
        said = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            # Without a pipeline there is nothing to interleave, wherever the control stands.
            "virtual_pipeline_parallel_size": None if self.pp == 1 else self.vpp,
            "context_parallel_size": self.cp,
            "expert_parallel_size": self.ep,
            "micro_batch_size": self.mbs,
            "recompute": self.recompute,
            "sequence_parallel": None if self.sp is None else self.sp == "on",
            "zero_stage": self.zero,
        }
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One value of a control."""

    value: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice, drawn as a slider over its options where they are in order."""

    name: str
    label: str
    value: str
    options: tuple[Option, ...]
    slider: bool
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastRow:
    """The fastest configuration of one layout, or one that comes nearest where none fits."""

    rank: int
    arithmetic: str
    details: str
    chosen: bool
    """The one the controls show."""
    step_s: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory_total_bytes: float | None
    reasons: tuple[str, ...]
    parallel: ParallelConfig
    href: str
    configuration_href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerPage:
    """The explorer."""

    title: str
    json_href: str
    settings: Settings
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    controls: tuple[Control, ...]
    view: ConfigurationView | None
    configuration_href: str | None
    fastest: tuple[FastRow, ...]
    nothing_fits: bool
    """Then `fastest` is what comes nearest."""
    legal: int
    feasible: int
    effect_memory: Stack | None
    """Sequence parallelism and selective recomputation switched on and off."""
    effect_time: Stack | None
    error: dict[str, str | None] | None
