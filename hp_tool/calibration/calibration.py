"""A calibration: what the runs so far say about predictions on this hardware, as a value that can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hp_tool.calibration.evidence import Evidence, FloatArray
from hp_tool.calibration.memory import MemoryFit, MemoryPrediction, fit_memory
from hp_tool.calibration.memory_residual import MemoryResidual
from hp_tool.calibration.prediction import StepPrediction
from hp_tool.calibration.prior import GPU_PRIOR, Prior
from hp_tool.calibration.residual import ResidualFit
from hp_tool.calibration.step_time import StepTimeFit, fit_step_time

PAYLOAD_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Corrections of step time and memory, with the measurements they were fitted from."""

    prior: Prior
    step_time: StepTimeFit
    memory: MemoryFit
    measurement_ids: tuple[str, ...]
    """Sorted; empty: this is the prior."""

    def predict_step(
        self,
        *,
        parts_s: Mapping[str, FloatArray],
        layer_passes: FloatArray,
        features: Mapping[str, FloatArray] | None = None,
    ) -> StepPrediction:
        """n step times from their uncalibrated parts (seconds, each (n,)) and layer passes (n,). With `features` (see
        `residual_features`) also what was learnt about configurations like these; without, the multipliers alone.
        """
        return self.step_time.predict(parts_s=parts_s, layer_passes=layer_passes, features=features)

    def predict_memory(self, *, memory_bytes: FloatArray, features: Mapping[str, FloatArray] | None = None) -> MemoryPrediction:
        """n memory needs from their uncalibrated bytes (n,); with `features` also by what was learnt about configurations like
        these.
        """
        return self.memory.predict(memory_bytes=memory_bytes, features=features)

    def summary(self) -> dict[str, Any]:
        """The few numbers people want to see: factors by group, overheads, remaining error, number of measurements."""
        return {
            "measurements": len(self.measurement_ids),
            "factors": self.step_time.factors,
            "step_overhead_s": self.step_time.step_overhead_s,
            "layer_overhead_s": self.step_time.layer_overhead_s,
            "residual_log_sd": self.step_time.residual_log_sd,
            "memory_factor": self.memory.factor,
            "memory_overhead_bytes": self.memory.overhead_bytes,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready payload, readable by `from_dict` of this and later versions."""
        return {
            "version": PAYLOAD_VERSION,
            "measurement_ids": list(self.measurement_ids),
            "prior": asdict(self.prior),
            "step_time": {
                "x": self.step_time.x.tolist(),
                "covariance": self.step_time.covariance.tolist(),
                "residual_log_sd": self.step_time.residual_log_sd,
                "degrees_of_freedom": self.step_time.degrees_of_freedom,
                "residual": None if self.step_time.residual is None else self.step_time.residual.to_dict(),
            },
            "memory": {
                "factor": self.memory.factor,
                "overhead_bytes": self.memory.overhead_bytes,
                "covariance": self.memory.covariance.tolist(),
                "residual_log_sd": self.memory.residual_log_sd,
                "degrees_of_freedom": self.memory.degrees_of_freedom,
                "residual": None if self.memory.residual is None else self.memory.residual.to_dict(),
            },
            "summary": self.summary(),
        }

    @staticmethod
    def from_dict(payload: Mapping[str, Any]) -> Calibration:
        """Read a stored payload. Raises ValueError for one of a version this code does not know."""
        if payload.get("version") not in READABLE_VERSIONS:
            raise ValueError(f"calibration payload has version {payload.get('version')!r}, expected {PAYLOAD_VERSION}")
        prior = Prior(**payload["prior"])
        step_time, memory = dict(payload["step_time"]), dict(payload["memory"])
        for piece in (step_time, memory):
            piece["covariance"] = np.asarray(piece["covariance"], dtype=np.float64)
        residual = step_time.pop("residual", None)  # payloads of version 1 have none
        step_time["residual"] = None if residual is None else ResidualFit.from_dict(residual)
        alike = memory.pop("residual", None)  # nor those of version 2 of memory
        memory["residual"] = None if alike is None else MemoryResidual.from_dict(alike)
        step_time["x"] = np.asarray(step_time["x"], dtype=np.float64)
        return Calibration(
            prior=prior,
            step_time=StepTimeFit(prior=prior, **step_time),
            memory=MemoryFit(prior=prior, **memory),
            measurement_ids=tuple(payload["measurement_ids"]),
        )


def fit_calibration(*, evidence: Evidence | None = None, prior: Prior = GPU_PRIOR) -> Calibration:
    """Fit everything that is fitted. No evidence gives the prior: predictions equal the cost model's exactly.

    The order of the rows does not matter. The default prior is a GPU's; `prior_for(kind="cpu")` is wider.
    """
    from threadpoolctl import threadpool_limits

    evidence = Evidence.empty() if evidence is None else evidence
    # Thousands of small factorisations: on a busy machine BLAS threads that wait for each other take a hundred times longer.
    with threadpool_limits(limits=1, user_api="blas"):
        return Calibration(
            prior=prior,
            step_time=fit_step_time(evidence=evidence, prior=prior),
            memory=fit_memory(evidence=evidence, prior=prior),
            measurement_ids=tuple(sorted(evidence.measurement_ids)),
        )
