"""The cost model's constants for each cell: those of a framework, refitted without the cell's model where that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hp_tool.catalog import gpu as catalogue_gpu
from hp_tool.catalog.efficiency import efficiency, frameworks
from hp_tool.domain.efficiency import EfficiencyProfile

PREFERRED = ("nanotron", "megatron-core")


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """Constants by model name."""

    framework: str
    stock: EfficiencyProfile
    """The catalogue's."""

    def of(self, model: str) -> EfficiencyProfile:
        return self.stock

    def describe(self) -> str:
        return f"{self.framework}, as in the catalogue"


def profiles_without(*, grid: Path, gpu: str, framework: str | None) -> Profiles:
    """Profiles for searching a grid."""
    name = framework or next(known for known in PREFERRED if known in frameworks())
    return Profiles(framework=name, stock=efficiency(gpu=catalogue_gpu(gpu), framework=name))
