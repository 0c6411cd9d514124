"""The part of a pipeline that one kind of GPU holds, where a cluster has two kinds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import Candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Candidates):
    """Candidates of which only `stages` neighbouring pipeline stages are looked at, each with `layers` layers."""

    stages_before: Column
    layers_before: Column
    stages: Column
    layers: Column
    holds_embedding: bool
    """Its first stage is the pipeline's."""
    holds_output: bool
    """Its last stage is the pipeline's."""


def section(candidates: Candidates, **said: Any) -> Section:
    """The section of each candidate."""
    columns = {f.name: getattr(candidates, f.name) for f in fields(Candidates)}
    return Section(**columns, **said)
