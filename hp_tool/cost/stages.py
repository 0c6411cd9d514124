"""Which layers the pipeline's first and last stage hold."""

from __future__ import annotations

from dataclasses import dataclass

from hp_tool.cost.block import Column
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.elementwise import maximum, minimum, where
from hp_tool.cost.parameters import moe_layers
from hp_tool.domain.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Layers on one end of the pipeline; shape (n,)."""

    layers: Column
    """Multi-token-prediction layers of the last stage included."""
    moe_fraction: Column
    """Share of the layers that have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """L/p layers on each stage; the leading dense layers of a mixture-of-experts model are on the first."""

    first: End
    last: End
    pace_moe_fraction: Column
    """Share of layers with experts on the stage that sets the pace."""


def stage_layers(model: ModelSpec, candidates: Candidates) -> StageLayers:
    """The layers of both ends."""
    p = candidates.pipeline_parallel_size
    each = model.num_hidden_layers / p
    extra = model.num_nextn_predict_layers
    first, last = each + (p == 1) * extra, each + extra
    if not model.num_experts:
        return StageLayers(
            first=End(layers=first, moe_fraction=0.0), last=End(layers=last, moe_fraction=0.0), pace_moe_fraction=0.0
        )
    dense = model.num_hidden_layers - moe_layers(model)
    on_first = minimum(dense, each)
    on_last = maximum(dense - (model.num_hidden_layers - each), 0.0)
    ends = [End(layers=n, moe_fraction=1.0 - d / n) for n, d in ((first, on_first), (last, on_last))]
    # A stage between the ends holds the fewest of the leading dense layers.
    between = 1.0 - maximum(dense - each, 0.0) / each
    pace = where(p > 2, maximum(between, 0.0), maximum(ends[0].moe_fraction, ends[1].moe_fraction))
    return StageLayers(first=ends[0], last=ends[1], pace_moe_fraction=pace)
