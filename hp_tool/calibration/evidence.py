"""What the calibration learns from: predictions and what was measured for them, as arrays of n rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """n profile runs. Rows without a step time (out of memory) still teach memory; NaN stands for "not measured"."""

    measurement_ids: tuple[str, ...]
    """Whose numbers these are; kept with the calibration."""
    parts_s: Mapping[str, FloatArray]
    """Uncalibrated exposed seconds by part, each (n,)."""
    layer_passes: FloatArray
    """(n,) forward-and-backward passes of one micro-batch through one layer in a step on one rank, bubble included."""
    memory_bytes: FloatArray
    """(n,) uncalibrated allocated bytes on the worst rank."""
    capacity_bytes: FloatArray
    """(n,) bytes that allocations could take on the device that ran."""
    measured_step_s: FloatArray
    """(n,) seconds, NaN unless the run succeeded."""
    measured_memory_bytes: FloatArray
    """(n,) peak allocated bytes, NaN where not measured."""
    out_of_memory: BoolArray
    """(n,) the run ended because memory did: it needs more than capacity_bytes, how much more is unknown."""

    features: Mapping[str, FloatArray] = field(default_factory=dict)
    """See `features.residual_features`, each (n,); without them only the multipliers learn."""

    def __post_init__(self) -> None:
        arrays = (
            *self.parts_s.values(),
            *self.features.values(),
            self.layer_passes,
            self.memory_bytes,
            self.capacity_bytes,
            self.measured_step_s,
            self.measured_memory_bytes,
            self.out_of_memory,
        )
        if any(array.shape != (len(self),) for array in arrays):
            raise ValueError("every column of Evidence has one value per measurement id")

    def __len__(self) -> int:
        return len(self.measurement_ids)

    def take(self, rows: NDArray[np.intp]) -> Evidence:
        """Some of the rows."""
        columns = (
            "layer_passes",
            "memory_bytes",
            "capacity_bytes",
            "measured_step_s",
            "measured_memory_bytes",
            "out_of_memory",
        )
        return Evidence(
            measurement_ids=tuple(self.measurement_ids[row] for row in rows),
            parts_s={name: seconds[rows] for name, seconds in self.parts_s.items()},
            features={name: values[rows] for name, values in self.features.items()},
            **{name: getattr(self, name)[rows] for name in columns},
        )

    @staticmethod
    def empty() -> Evidence:
        """Nothing has run yet."""
        nothing = np.empty(0)
        return Evidence(
            measurement_ids=(),
            parts_s={},
            layer_passes=nothing,
            memory_bytes=nothing,
            capacity_bytes=nothing,
            measured_step_s=nothing,
            measured_memory_bytes=nothing,
            out_of_memory=nothing.astype(np.bool_),
        )

    @staticmethod
    def concatenate(pieces: Sequence[Evidence]) -> Evidence:
        """All rows of all pieces in order; a part or feature that a piece does not name is zero there."""

        def columns(attribute: str) -> dict[str, FloatArray]:
            names = sorted({name for piece in pieces for name in getattr(piece, attribute)})
            return {
                name: np.concatenate([getattr(piece, attribute).get(name, np.zeros(len(piece))) for piece in pieces])
                for name in names
            }

        def column(attribute: str) -> NDArray[np.generic]:
            return np.concatenate([getattr(piece, attribute) for piece in (Evidence.empty(), *pieces)])

        return Evidence(
            measurement_ids=tuple(i for piece in pieces for i in piece.measurement_ids),
            parts_s=columns("parts_s"),
            layer_passes=column("layer_passes").astype(np.float64),
            memory_bytes=column("memory_bytes").astype(np.float64),
            capacity_bytes=column("capacity_bytes").astype(np.float64),
            measured_step_s=column("measured_step_s").astype(np.float64),
            measured_memory_bytes=column("measured_memory_bytes").astype(np.float64),
            out_of_memory=column("out_of_memory").astype(np.bool_),
            features=columns("features"),
        )
