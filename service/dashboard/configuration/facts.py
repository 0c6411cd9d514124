"""Where the numbers of an estimate come from, line by line."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from service.dashboard import formats
from service.dashboard.configuration.contexts import Fact


def facts_of(found: Estimate | InferenceEstimate, learnt: Estimate | None = None) -> tuple[Fact, ...]:
    """Its provenance and what that of the calibrated one adds."""
    known = dict(found.provenance)
    if learnt is not None:
        known |= {name: value for name, value in learnt.provenance.items() if name not in known}
    if found.intervals is not None and found.intervals.source:
        known["intervals"] = found.intervals.source
    said = {name: _calibration(value) if name == "calibration" else _said(value) for name, value in known.items()}
    return tuple(Fact(name=formats.words(name), value=text) for name, text in said.items() if text)


def _calibration(value: Any) -> str:
    """Which stored one, from how many runs, and what it multiplies."""
    if not isinstance(value, dict):
        return _said(value)
    rest = dict(value)
    number, measurements, cluster, made = (
        rest.pop(name, None) for name in ("version", "measurements", "cluster_key", "created_at")
    )
    for name in ("id", "framework", "model_family"):  # said elsewhere on the page
        rest.pop(name, None)
    when = f" of {formats.moment(datetime.fromisoformat(made))}" if isinstance(made, str) else ""
    return f"version {number}{when}, from {measurements} runs on {cluster}; {_said(rest)}"


def _said(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_said(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{formats.words(name)} {_said(each)}" for name, each in value.items() if each is not None)
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
