"""What the catalogue's pages show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.dashboard.configuration.contexts import Fact

Section = Literal["models", "gpus", "clusters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model's shape in a line."""

    name: str
    href: str
    parameters: float
    active_parameters: float | None
    """A token's; None of a dense model."""
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    num_experts: int | None
    registered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """A datasheet in a line."""

    name: str
    href: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    bf16_flops_per_second: float | None
    fp8_flops_per_second: float | None
    nvlink_bandwidth_bytes_per_second: float | None
    network_bandwidth_bytes_per_second: float
    power_w: float
    price_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """A server or cluster in a line."""

    name: str
    href: str
    gpu: str
    gpus_per_node: int
    num_gpus: int | None
    network_bandwidth_bytes_per_second: float
    fabric: str
    price_per_gpu_hour: float | None
    registered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """The form that adds one, as it was last sent."""

    name: str
    text: str
    example: str
    error: dict[str, str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPage:
    """All models."""

    title: str
    json_href: str
    rows: tuple[ModelRow, ...]
    new: NewEntry | None
    """None for who may not add any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusPage:
    """All GPUs."""

    title: str
    json_href: str
    rows: tuple[GpuRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersPage:
    """All servers and clusters."""

    title: str
    json_href: str
    rows: tuple[ClusterRow, ...]
    new: NewEntry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPage:
    """One model, GPU or cluster with everything that is known of it."""

    title: str
    json_href: str
    section: Section
    facts: tuple[Fact, ...]
    source: str
    explorer_href: str | None
    remove_href: str | None
    """Where its owner, and nobody else, can have it forgotten."""
