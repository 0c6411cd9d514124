"""Calibrations: fitted corrections of predictions on one kind of hardware, which can be stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from hp_tool.loop.calibration.evidence import Evidence
from hp_tool.loop.calibration.fitting import Prior, prior_for
from hp_tool.loop.calibration.memory import MemoryFit, fit_memory
from hp_tool.loop.calibration.parts import part_factors
from hp_tool.loop.calibration.repeats import limit_repeats
from hp_tool.loop.calibration.step_time import StepTimeFit, fit_step_time

PAYLOAD_VERSION = 7
"""Version of the stored payload. Earlier versions store fits in another format, so their
measurements are fitted again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Corrections of step time and memory, with the ids of the underlying measurements."""

    prior: Prior
    step_time: StepTimeFit
    memory: MemoryFit
    measurement_ids: tuple[str, ...]
    """Sorted ids of the measurements; empty for the prior."""

    def summary(self) -> dict[str, Any]:
        """Return factors by group, overheads, residual error and number of measurements."""
        return {
            "measurements": len(self.measurement_ids),
            "factors": self.step_time.factors,
            "step_overhead_s": self.step_time.step_overhead_s,
            "layer_overhead_s": self.step_time.layer_overhead_s,
            "residual_log_sd": self.step_time.residual_log_sd,
            "memory_factor": self.memory.factor,
            "memory_overhead_bytes": self.memory.overhead_bytes,
        } | (
            {"part_factors": factors} if (factors := part_factors(self.step_time.part_logs)) else {}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready payload that `from_dict` of this and later versions can read."""
        payload = _payload(self)
        if not len(self.step_time.part_logs):  # Written by versions without this field.
            del payload["step_time"]["part_logs"]
        return {
            "version": PAYLOAD_VERSION,
            **payload,
            "prior": asdict(self.prior),
            "summary": self.summary(),
        }

    @staticmethod
    def from_dict(payload: Mapping[str, Any]) -> Calibration:
        """Restore a calibration from its stored payload.

        Raises:
            ValueError: The payload has another version.
        """
        if payload.get("version") != PAYLOAD_VERSION:
            raise ValueError(
                f"calibration payload has version {payload.get('version')!r}, expected "
                f"{PAYLOAD_VERSION}"
            )
        prior = Prior(**payload["prior"])
        return Calibration(
            prior=prior,
            step_time=_read(StepTimeFit, {**payload["step_time"], "prior": prior}),
            memory=_read(MemoryFit, {**payload["memory"], "prior": prior}),
            measurement_ids=tuple(payload["measurement_ids"]),
        )


def _payload(value: Any) -> Any:
    """Convert a fit to JSON: arrays and tuples to lists, dataclasses to mappings.

    The prior is omitted, because all fits share it.
    """
    if is_dataclass(value):
        return {
            each.name: _payload(getattr(value, each.name))
            for each in fields(value)
            if each.name != "prior"
        }
    return (
        value.tolist()
        if isinstance(value, np.ndarray)
        else list(value)
        if isinstance(value, tuple)
        else value
    )


def _read(kind: Any, payload: Mapping[str, Any]) -> Any:
    """Restore a dataclass of type `kind` from a payload written by `_payload`.

    Missing fields get their defaults.
    """
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in payload.items()})


def _value(hint: Any, value: Any) -> Any:
    if get_origin(hint) is np.ndarray:
        return np.asarray(value, dtype=np.float64)
    if isinstance(value, Mapping):
        return _read(next(each for each in (hint, *get_args(hint)) if is_dataclass(each)), value)
    return tuple(value) if isinstance(value, list) else value


def fit_calibration(*, evidence: Evidence | None = None, prior: Prior | None = None) -> Calibration:
    """Fit step time and memory to the evidence.

    Without evidence, the result is the prior, and predictions equal the cost model's exactly. The
    order of the rows does not matter. If a configuration ran many times, only a few of its runs are
    used (see `repeats`). The default prior is that of a GPU; `prior_for(kind="cpu")` is wider.
    """
    from threadpoolctl import threadpool_limits

    evidence = Evidence.empty() if evidence is None else evidence
    prior = prior_for(kind="gpu") if prior is None else prior
    runs = limit_repeats(evidence)
    # On a busy machine, BLAS threads that wait for each other make a fit a hundred times slower.
    with threadpool_limits(limits=1, user_api="blas"):
        return Calibration(
            prior=prior,
            step_time=fit_step_time(evidence=runs, prior=prior),
            memory=fit_memory(evidence=runs, prior=prior),
            measurement_ids=tuple(sorted(evidence.measurement_ids)),
        )
