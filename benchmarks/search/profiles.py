"""Constants of the cost model for each cell. If a framework's constants were fitted to the replayed
grid, they are refitted without the runs of the cell's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.fit_nanotron import fit
from benchmarks.accuracy.grid_rows import SHAPES, read_grid_file
from hp_tool.catalog import gpu as catalogue_gpu
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency

REFITTED = "nanotron"
"""Framework whose catalogue constants were fitted to such a grid; they are refitted without the
searched model.
"""


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """Constants by model name."""

    framework: str
    stock: EfficiencyProfile
    """Constants of the catalogue, for models outside its fit."""
    without: Mapping[str, FrameworkEfficiency]
    """Constants fitted to the rows of all other models, by model."""

    def of(self, model: str) -> EfficiencyProfile:
        """Return the constants that a search for this model may use before its first run."""
        if model not in self.without:
            return self.stock
        return EfficiencyProfile(gpu=self.stock.gpu, framework=self.without[model])

    def describe(self) -> str:
        refitted = f"; without {', '.join(self.without)} in turn" if self.without else ""
        return f"constants of {self.framework}{refitted}"


def profiles_without(*, grid: Path, gpu: str, framework: str) -> Profiles:
    """Return the profiles for searching a grid. Each model in the fit of the catalogue's constants
    gets constants fitted without it.
    """
    device = catalogue_gpu(gpu)
    without = {}
    if framework == REFITTED:
        rows = [row for row in read_grid_file(grid) if row["model"] in SHAPES]
        models = sorted({row["model"] for row in rows})
        for model in models:
            others = [row for row in rows if row["model"] != model]
            if others:
                without[model] = fit(rows=others)
    stock = efficiency_profile(gpu=device, framework=framework)
    return Profiles(framework=framework, stock=stock, without=without)
