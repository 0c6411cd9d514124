"""The cost model's constants for each cell: a framework's, fitted without the runs of the cell's
model where it was fitted on such a grid.
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
"""The framework whose catalogue constants come from a grid of this kind, and are therefore not
shown its models' cells.
"""


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """Constants by model name."""

    framework: str
    stock: EfficiencyProfile
    """The catalogue's: for models that its fit has not seen."""
    without: Mapping[str, FrameworkEfficiency]
    """By model: constants that the other models' rows give."""

    def of(self, model: str) -> EfficiencyProfile:
        """What a search for this model may know before its first run."""
        if model not in self.without:
            return self.stock
        return EfficiencyProfile(gpu=self.stock.gpu, framework=self.without[model])

    def describe(self) -> str:
        refitted = f"; without {', '.join(self.without)} in turn" if self.without else ""
        return f"constants of {self.framework}{refitted}"


def profiles_without(*, grid: Path, gpu: str, framework: str) -> Profiles:
    """Profiles for searching a grid, leaving out one model at a time of those that the catalogue's
    constants were fitted on.
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
