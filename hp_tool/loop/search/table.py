"""Candidates of a search as columns: axis values, uncalibrated costs and features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import (
    DISPATCHERS,
    RECOMPUTE_COLUMNS,
    SCHEDULE_NAMES,
    Candidates,
    recompute_from_codes,
)
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.parallel import recompute_name
from hp_tool.loop.calibration import (
    Calibration,
    MemoryPrediction,
    StepPrediction,
    allocated_bytes,
    layer_passes,
    residual_features,
)
from hp_tool.loop.calibration.evidence import Evidence, FloatArray
from hp_tool.loop.calibration.prediction import JointSteps

AxisValue = int | bool | str
_NOT_AXES = {
    "data_parallel_size",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "sequence_parallel",
}


@dataclass(frozen=True, kw_only=True)
class CandidateTable:
    """n candidates, identified by their axis values.

    Row indices are valid only within one process.
    """

    axes: Mapping[str, tuple[AxisValue, ...]]
    """Values of all rows by axis (tensor_parallel_size, recompute, ...). A row's values identify
    it.
    """
    parts_s: Mapping[str, FloatArray]
    """Uncalibrated exposed seconds by part without allocator retries, each of shape (n,)."""
    layer_passes: FloatArray
    """(n,) see `calibration.Evidence`."""
    memory_bytes: FloatArray
    """(n,) uncalibrated allocated bytes on the rank that needs most."""
    usable_bytes: FloatArray
    """(n,) bytes available to a recommended configuration: device memory minus headroom and
    overheads.
    """
    device_bytes: FloatArray
    """(n,) device memory minus overheads, in bytes."""
    features: Mapping[str, FloatArray] = field(default_factory=dict)
    """See `calibration.residual_features`."""
    retry_chance: FloatArray | float = 0.0
    """(n,) fraction of steps that wait for the allocator of a nearly full device."""
    retry_slowdown: FloatArray | float = 1.0
    """(n,) slowdown of these steps; see `cost.memory`."""

    def __post_init__(self) -> None:
        if len(self.rows) != len(self):
            raise ValueError("two candidates have the same values on all axes")

    def __len__(self) -> int:
        return len(self.layer_passes)

    @cached_property
    def rows(self) -> dict[tuple[AxisValue, ...], int]:
        """Row indices by axis values, in the order of `axes`."""
        return {values: row for row, values in enumerate(zip(*self.axes.values(), strict=True))}

    @cached_property
    def choices(self) -> dict[str, tuple[AxisValue, ...]]:
        """Sorted distinct values of each axis: the choices of its categorical distribution."""
        return {name: tuple(sorted(set(values))) for name, values in self.axes.items()}

    def params(self, row: int) -> dict[str, AxisValue]:
        """Return the axis values of a row."""
        return {name: values[row] for name, values in self.axes.items()}

    def row_of(self, params: Mapping[str, AxisValue]) -> int | None:
        """Return the row with these values; None if there is none or if an axis is missing."""
        if any(name not in params for name in self.axes):
            return None
        return self.rows.get(tuple(params[name] for name in self.axes))

    def take(self, rows: NDArray[np.intp]) -> CandidateTable:
        """Return a table of some rows. It keeps axes on which these rows do not differ."""

        def some(columns: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
            return {name: values[rows] for name, values in columns.items()}

        return CandidateTable(
            axes={name: tuple(values[row] for row in rows) for name, values in self.axes.items()},
            parts_s=some(self.parts_s),
            layer_passes=self.layer_passes[rows],
            memory_bytes=self.memory_bytes[rows],
            usable_bytes=self.usable_bytes[rows],
            device_bytes=self.device_bytes[rows],
            features=some(self.features),
            retry_chance=(self.retry_chance + np.zeros(len(self)))[rows],
            retry_slowdown=(self.retry_slowdown + np.zeros(len(self)))[rows],
        )

    def evidence(
        self,
        *,
        rows: NDArray[np.intp],
        measurement_ids: tuple[str, ...],
        step_s: FloatArray,
        memory_bytes: FloatArray,
        out_of_memory: NDArray[np.bool_],
    ) -> Evidence:
        """Return measurements of the given rows (NaN if not measured) with their predictions."""
        return Evidence(
            measurement_ids=measurement_ids,
            parts_s={name: seconds[rows] for name, seconds in self.parts_s.items()},
            layer_passes=self.layer_passes[rows],
            memory_bytes=self.memory_bytes[rows],
            capacity_bytes=self.device_bytes[rows],
            measured_step_s=step_s,
            measured_memory_bytes=memory_bytes,
            out_of_memory=out_of_memory,
            features={name: values[rows] for name, values in self.features.items()},
        )

    def predict_step(self, calibration: Calibration) -> StepPrediction:
        """Return the calibrated step times of all rows.

        Allocator retries count by the mean of the logarithm.
        """
        step = self.predict_without_retries(calibration)
        return replace(step, regular_s=step.regular_s * self.retry_slowdown**self.retry_chance)

    def predict_without_retries(self, calibration: Calibration) -> StepPrediction:
        """Return the calibrated step times of all rows without allocator retries."""
        return calibration.step_time.predict(
            parts_s=self.parts_s, layer_passes=self.layer_passes, features=self.features
        )

    def joint_steps(self, calibration: Calibration, *, rows: NDArray[np.intp]) -> JointSteps:
        """Return the joint distribution of some rows' step times, without allocator retries."""
        some = self.take(rows)
        return calibration.step_time.joint(
            parts_s=some.parts_s, layer_passes=some.layer_passes, features=some.features
        )

    def predict_memory(self, calibration: Calibration) -> MemoryPrediction:
        """Return the calibrated memory needs of all rows."""
        return calibration.memory.predict(memory_bytes=self.memory_bytes, features=self.features)


def candidate_table(
    *, case: TrainingCase, candidates: Candidates, costs: TrainingCosts
) -> CandidateTable:
    """Return a table of candidates whose costs are known."""
    overhead = costs.memory_parts["overhead"]
    return CandidateTable(
        axes=candidate_axes(candidates),
        parts_s=costs.parts_without_retries,
        layer_passes=layer_passes(case=case, candidates=candidates),
        memory_bytes=allocated_bytes(costs),
        usable_bytes=costs.capacity_bytes - overhead,
        device_bytes=costs.device_bytes - overhead,
        features=residual_features(case=case, candidates=candidates),
        retry_chance=costs.retry_chance,
        retry_slowdown=costs.retry_slowdown,
    )


def candidate_axes(candidates: Candidates) -> dict[str, tuple[AxisValue, ...]]:
    """Return the values of the candidates on each axis in which they differ.

    data_parallel_size is derived, so it is not an axis.
    """
    columns: dict[str, tuple[AxisValue, ...]] = {
        f.name: tuple(getattr(candidates, f.name).tolist())
        for f in fields(candidates)
        if f.name not in _NOT_AXES
    }
    columns["pipeline_schedule"] = tuple(
        SCHEDULE_NAMES[code] or "1f1b" for code in candidates.pipeline_schedule.tolist()
    )
    columns["moe_token_dispatcher_type"] = tuple(
        DISPATCHERS[code] or "usual" for code in candidates.moe_token_dispatcher_type.tolist()
    )
    columns["sequence_parallel"] = tuple(bool(value) for value in candidates.sequence_parallel)
    codes = zip(*(getattr(candidates, name).tolist() for name in RECOMPUTE_COLUMNS), strict=True)
    columns["recompute"] = tuple(recompute_name(recompute_from_codes(*each)) for each in codes)
    varied = {name: values for name, values in columns.items() if len(set(values)) > 1}
    return varied or {"tensor_parallel_size": columns["tensor_parallel_size"]}
