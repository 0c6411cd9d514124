"""What the pages of calibrations and measurements show. Errors are predicted / measured - 1; of many, the median of |error|."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hp_tool.domain.measurement import MeasurementStatus
from service.dashboard.contexts import Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRow:
    """The newest calibration of one cluster, software and family of models."""

    cluster: str
    framework: str
    family: str
    version: int
    measurements: int
    error_before: float | None
    error_after: float | None
    created_at: datetime
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow:
    """A cluster that measurements speak of."""

    cluster: str
    gpu: str
    framework: str
    measurements: int
    href: str
    """Its measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationsPage:
    """All series."""

    title: str
    json_href: str
    series: tuple[SeriesRow, ...]
    clusters: tuple[ClusterRow, ...]
    may_fit: bool
    """The one who looks may have new ones made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One version of a series."""

    version: int
    measurements: int
    error_before: float | None
    error_after: float | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """What was learnt, in one number: a multiple of the cost model's, or an overhead."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonRow:
    """One run, before and after."""

    model: str
    arithmetic: str
    details: str
    source: str
    measured_s: float
    before_s: float
    after_s: float
    error_before: float
    error_after: float
    outlier: bool
    taught: bool
    search_href: str | None
    configuration_href: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPage:
    """One series: its versions, what the newest says, and the runs it comes from."""

    title: str
    json_href: str
    cluster: str
    framework: str
    family: str
    serves: bool
    """Its runs served requests, and were no training steps."""
    newest: VersionRow
    versions: tuple[VersionRow, ...]
    factors: tuple[Factor, ...]
    lessons: tuple[LessonRow, ...]
    outliers: int
    unseen: int
    """Runs that taught it and that are others'."""
    figures: dict[str, Any]
    """For plot.js."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRow:
    """A stored measurement."""

    short_id: str
    model: str
    gpu: str
    framework: str
    arithmetic: str
    details: str
    status: MeasurementStatus
    tone: Tone
    source: str
    predicted_s: float | None
    measured_s: float | None
    error: float | None
    peak_memory_bytes: int | None
    cause: str | None
    search_href: str | None
    configuration_href: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementsPage:
    """Measurements, newest first."""

    title: str
    json_href: str
    gpu: str
    model: str
    status: MeasurementStatus | None
    statuses: tuple[MeasurementStatus, ...]
    rows: tuple[MeasurementRow, ...]
    next_href: str | None
