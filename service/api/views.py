"""Response views of stored records. Clients use them too, so they do not need the web framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Generic, Literal, Self, TypeVar

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.measurement_records import (
    Imported,
    MeasurementSource,
    MeasurementState,
    Refused,
)
from hp_tool.domain.records import (
    CalibrationRecord,
    Label,
    Page,
    RegistrationKind,
    RunRecord,
    SearchRecord,
)
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.states import RunState, SearchState
from hp_tool.domain.webhooks import WebhookRecord, WebhookState
from hp_tool.errors import (
    ConflictError,
    HpToolError,
    InputError,
    LauncherError,
    LimitError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)

T = TypeVar("T")
NDJSON = "application/x-ndjson"
STREAM_END = "end"
"""Name of a stream's last event, which means that the search has ended."""
STATUS_BY_CLASS: tuple[tuple[type[HpToolError], int], ...] = (
    (InputError, 422),
    (NotFoundError, 404),
    (ConflictError, 409),
    (LimitError, 429),
    (LauncherError, 502),
    (StoreError, 503),
    (MissingExtraError, 501),
    (HpToolError, 500),
)
"""HTTP status by error class, for codes without their own status. Clients invert the table.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An API representation of a record: its fields of the same names, and computed fields."""

    @classmethod
    def of(cls, *records: Any, **more: Any) -> Self:
        """Return a view with fields from `more`, or else from the first record that has them."""
        values = cls.computed(records[0]) | more
        for record in records:
            values = {
                field.name: getattr(record, field.name)
                for field in fields(cls)
                if hasattr(record, field.name)
            } | values
        return cls(**values)

    @staticmethod
    def computed(record: Any) -> dict[str, Any]:
        """Return the fields that the record lacks, or whose values differ from the record's."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView(Generic[T]):
    """A page of a list, newest first."""

    items: list[T]
    next_cursor: str | None
    """Pass it as `cursor` to get the next page; null on the last page."""

    @classmethod
    def of(cls, page: Page[Any], view: Callable[[Any], T]) -> PageView[T]:
        """Convert a page of records to views."""
        return PageView(items=[view(record) for record in page.items], next_cursor=page.next_cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchView(View):
    """One search: its query, its state and its cost."""

    id: str
    state: SearchState
    requested: Literal["cancel", "pause"] | None
    """Action that was requested and that the worker has not carried out yet."""
    owner: str | None
    """Owner of the key that submitted it; null for the operator or a service without keys."""
    label: Label
    """Name, tags and note."""
    query: dict[str, Any]
    progress: dict[str, Any]
    """Counts and best configuration so far, as last reported."""
    summary: dict[str, Any] | None
    """Final cost; null in lists and before the search has ended."""
    worker: str | None
    """Host and process ID of the worker that runs the search."""
    error: dict[str, Any] | None
    """{code, message, field} of a failed search."""
    stopped_because: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @staticmethod
    def computed(record: SearchRecord) -> dict[str, Any]:
        return {
            "summary": (record.result or {}).get("search"),
            "worker": record.lease.holder if record.lease else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView(View):
    """A profile run with its predictions before and after calibration, and its measurement."""

    run_id: str
    number: int
    """Number from 0, in the order in which the runs were chosen."""
    attempt: int
    state: RunState
    parallel: RunConfig
    fidelity: Fidelity
    predicted: dict[str, Any]
    """Prediction before the run."""
    calibrated: dict[str, Any] | None
    """Prediction calibrated with the search's measurements; null until the search has ended."""
    measurement: Measurement | None
    measurement_id: str | None
    gpu_seconds: float | None
    cause: str | None
    """Why the run was abandoned."""
    account: dict[str, Any] | None
    """The engine's record of the job: seconds queued (queue_s) and running (wall_s); for an
    abandoned run, also its nodes (hosts) and the end of its log.
    """
    created_at: datetime
    submitted_at: datetime | None
    finished_at: datetime | None

    @staticmethod
    def computed(record: RunRecord) -> dict[str, Any]:
        return {"run_id": record.id}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsView:
    """Trials of a search, by default in order of intent."""

    search_id: str
    state: SearchState
    trials: list[TrialView]
    next_cursor: str | None = None
    """Pass it as `cursor` to get the next page; null on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookView(View):
    """Delivery state of a search's webhook."""

    search_id: str
    url: str
    state: WebhookState
    attempts: int
    """Number of attempts since the search last ended."""
    next_attempt_at: datetime | None
    """Earliest time of the next attempt; null if delivered or failed."""
    last_error: str | None
    """Error of the last attempt."""
    delivered_at: datetime | None

    @staticmethod
    def computed(record: WebhookRecord) -> dict[str, Any]:
        pending = record.state is WebhookState.PENDING
        return {"next_attempt_at": record.next_attempt_at if pending else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView(View):
    """An event of a search; `seq` is its id in the event stream."""

    seq: int
    kind: str
    payload: dict[str, Any]
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementView(View):
    """A stored measurement with its query and configuration."""

    id: str
    source: MeasurementSource
    state: MeasurementState
    """Only accepted measurements calibrate predictions."""
    trusted: bool
    """Whether it calibrates everybody's predictions, or only its owner's."""
    gpu: str
    framework: str
    model: str
    query: dict[str, Any]
    parallel: RunConfig
    predicted: dict[str, Any]
    measurement: Measurement
    warnings: tuple[str, ...]
    """Values that differ greatly from their predictions."""
    search_id: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportView(View):
    """Result of a list of reports, each stored or rejected on its own."""

    stored: list[MeasurementView]
    refused: list[Refused]

    @staticmethod
    def computed(record: Imported) -> dict[str, Any]:
        return {
            "stored": [MeasurementView.of(measurement) for measurement in record.stored],
            "refused": list(record.refused),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationView(View):
    """An immutable version of a calibration for a cluster, its software and a model family."""

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str
    """dense or moe; empty for all families."""
    owner: str
    """Owner whose predictions it corrects; empty if it corrects everybody's."""
    num_measurements: int
    measurement_ids: list[str]
    """IDs of the measurements that it was fitted to."""
    summary: dict[str, Any]
    """Factors by group of step parts, overheads, and the residual error."""
    models: dict[str, int]
    """Number of measurements by model."""
    accuracy: dict[str, Any]
    """Median step-time error: `error_before` without calibration; `error_after` with it, on
    measurements that the fit did not use.
    """
    created_at: datetime

    @staticmethod
    def computed(record: CalibrationRecord) -> dict[str, Any]:
        empty: dict[str, Any] = {"measurement_ids": [], "summary": {}, "models": {}, "accuracy": {}}
        fit = {name: record.payload.get(name, default) for name, default in empty.items()}
        return fit | {"summary": fit["summary"] | record.applied}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationView(View):
    """A model, cluster or trace registered under a name."""

    kind: RegistrationKind
    name: str
    owner: str | None
    """Null if shared with everybody."""
    spec: dict[str, Any]
    """Specification as submitted."""
    created_at: datetime
    updated_at: datetime
