"""Which layers the pipeline's first and last stage hold. Arrays have shape (2, n): row 0 the first stage, row 1 the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hp_tool.cost.candidates import Candidates, FloatArray
from hp_tool.cost.parameters import moe_layers
from hp_tool.domain.model import ModelSpec

FIRST, LAST = np.array([[True], [False]]), np.array([[False], [True]])
"""Masks of the two rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """Layers by kind on the two ends of the pipeline, multi-token-prediction layers included in the last."""

    total: FloatArray
    moe_fraction: FloatArray | float
    """Share of the layers that have experts."""
    pace_moe_fraction: FloatArray | float
    """The same on the stage that sets the pace; shape (n,)."""


def stage_layers(model: ModelSpec, candidates: Candidates) -> StageLayers:
    """L/p layers each; the leading dense layers of a mixture-of-experts model are on the first stage."""
    p = candidates.pipeline_parallel_size
    each = model.num_hidden_layers / p
    total = each + LAST * float(model.num_nextn_predict_layers) + (FIRST & (p == 1)) * float(model.num_nextn_predict_layers)
    if not model.num_experts:
        return StageLayers(total=total, moe_fraction=0.0, pace_moe_fraction=0.0)
    dense = model.num_hidden_layers - moe_layers(model)
    first = np.minimum(dense, each)
    last = np.maximum(dense - (model.num_hidden_layers - each), 0.0)
    fraction = 1.0 - np.where(FIRST, first, last) / total
    # A stage between the ends, where there is one, holds none of the leading dense layers.
    pace = np.where(p > 2, 1.0 - np.maximum(dense - each, 0.0) * (p <= 2) / each, fraction.max(axis=0))
    return StageLayers(total=total, moe_fraction=fraction, pace_moe_fraction=pace)
