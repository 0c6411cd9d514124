"""The part of a pipeline that one kind of GPU holds, where a cluster has two kinds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import Column


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Candidates):
    """Candidates of which only `stages` neighbouring pipeline stages are looked at, each with `layers` layers."""

    stages_before: Column
    layers_before: Column
    stages: Column
    layers: Column
    holds_embedding: Column
    """Its first stage is the pipeline's."""
    holds_output: Column
    """Its last stage is the pipeline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Section):
    """A section of one stage, of a pipeline that is laid out by hand."""

    dense_layers: Column
    """Of `layers`, those without experts in a model that has them."""
    extra_layers: Column
    """Multi-token-prediction layers, beside `layers`."""
    embeddings: Column
    """Copies of the embedding: multi-token prediction wants one on its own stage too (Megatron Core, gpt_model.py)."""
    chunk_layers: Column
    """Layers a model chunk, the mean over those whose activations the stage holds at its fullest."""


def section(candidates: Candidates, **said: Any) -> Section:
    """The section of each candidate."""
    columns = {f.name: getattr(candidates, f.name) for f in fields(Candidates)}
    return Section(**columns, **said)
