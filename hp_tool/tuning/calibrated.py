"""An estimate after calibration: the same fields, corrected by what runs on this cluster taught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.calibration import Calibration
from hp_tool.domain.result import Estimate, Intervals, TimeEstimate
from hp_tool.search.table import CandidateTable

CONFIDENCE = 0.9


def calibrated_estimate(estimate: Estimate, *, table: CandidateTable, row: int, calibration: Calibration) -> Estimate:
    """The estimate after what was learnt: parts and memory corrected, rates and costs in proportion, intervals from the fit."""
    if estimate.time is None or estimate.memory is None:
        return estimate
    one = np.array([row])
    uncalibrated, passes = {name: seconds[one] for name, seconds in table.parts_s.items()}, table.layer_passes[one]
    step = calibration.predict_step(parts_s=uncalibrated, layer_passes=passes)
    parts = calibration.step_time.calibrated_parts(parts_s=uncalibrated, layer_passes=passes)
    step_s = float(step.median_s[0])
    slower = step_s / estimate.time.step_s
    rates: dict[str, Any] = {
        name: None if (value := getattr(estimate, name)) is None else value / slower
        for name in ("tokens_per_second", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "mfu", "hfu", "hfu_paper")
    }
    totals: dict[str, Any] = {
        name: None if (value := getattr(estimate, name)) is None else value * slower
        for name in ("days", "gpu_hours", "cost", "energy")
    }
    allocated = calibration.predict_memory(memory_bytes=table.memory_bytes[one])
    factor, extra = calibration.memory.factor, calibration.memory.overhead_bytes
    memory = estimate.memory
    scaled = {
        f"{name}_bytes": getattr(memory, f"{name}_bytes") * factor
        for name in ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "layer_activations")
    }
    outside = memory.overhead_bytes + extra
    low, high = step.interval(confidence=CONFIDENCE)
    memory_low, memory_high = allocated.interval(confidence=CONFIDENCE)
    return replace(
        estimate,
        time=TimeEstimate(step_s=step_s, parts_s={name: float(seconds[0]) for name, seconds in parts.items()}),
        memory=replace(
            memory,
            total_bytes=memory.allocated_bytes * factor + outside,
            overhead_bytes=outside,
            allocated_bytes=memory.allocated_bytes * factor + extra,
            **scaled,
        ),
        intervals=Intervals(
            confidence=CONFIDENCE,
            step_s=(float(low[0]), float(high[0])),
            memory_total_bytes=(
                float(memory_low[0]) + memory.overhead_bytes,
                float(memory_high[0]) + memory.overhead_bytes,
            ),
            source=f"{len(calibration.measurement_ids)} measurements on this cluster",
        ),
        provenance={**estimate.provenance, "calibration": calibration.summary()},
        **rates,
        **totals,
    )
