"""The API's answers: typed views of the store's records. They need no web framework, for the
clients read them too.
"""

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
    RunState,
    SearchRecord,
    SearchState,
)
from hp_tool.domain.serving import RunConfig
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
"""Name of an event stream's last event: the search has ended and nothing will follow."""
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
"""HTTP status of an error without one of its own; the clients read the table backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A record as the API shows it: its fields of the same names, and those that the view
    computes.
    """

    @classmethod
    def of(cls, *records: Any, **more: Any) -> Self:
        """The view of `records`, each field from the first one that has it; `more`: fields that
        none of them has.
        """
        values = cls.computed(records[0]) | more
        for record in records:
            values = {
                each.name: getattr(record, each.name)
                for each in fields(cls)
                if hasattr(record, each.name)
            } | values
        return cls(**values)

    @staticmethod
    def computed(record: Any) -> dict[str, Any]:
        """The fields that differ from the record's, or that it has not."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView(Generic[T]):
    """Part of a list, newest first."""

    items: list[T]
    next_cursor: str | None
    """Give it as `cursor` to get what follows; None on the last page."""

    @classmethod
    def of(cls, page: Page[Any], view: Callable[[Any], T]) -> PageView[T]:
        """A page of records as a page of views."""
        return PageView(items=[view(record) for record in page.items], next_cursor=page.next_cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchView(View):
    """One search: its query, its state and its cost."""

    id: str
    state: SearchState
    requested: Literal["cancel", "pause"] | None
    """Action that the worker has yet to carry out."""
    owner: str | None
    """Owner of the key that submitted it; None: the operator, or the service needs no key."""
    label: Label
    """Its name, tags and note."""
    query: dict[str, Any]
    progress: dict[str, Any]
    """Counts and the best so far, as the coordinator last reported them."""
    summary: dict[str, Any] | None
    """Its final cost; None before the end, and in lists."""
    worker: str | None
    """Host and process of the worker that runs it."""
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
    """One profile run: predicted before, predicted after calibration and measured, side by side."""

    run_id: str
    number: int
    """0-based, in order of intent."""
    attempt: int
    state: RunState
    parallel: RunConfig
    fidelity: Fidelity
    predicted: dict[str, Any]
    """Prediction before the run."""
    calibrated: dict[str, Any] | None
    """Prediction after calibration with the search's measurements; None until the search has
    ended.
    """
    measurement: Measurement | None
    measurement_id: str | None
    gpu_seconds: float | None
    cause: str | None
    """Why it was abandoned."""
    account: dict[str, Any] | None
    """What the engine said of its job: seconds that it waited (queue_s) and held its devices
    (wall_s); of one that was given up its nodes (hosts) and the end of its log.
    """
    created_at: datetime
    submitted_at: datetime | None
    finished_at: datetime | None

    @staticmethod
    def computed(record: RunRecord) -> dict[str, Any]:
        return {"run_id": record.id}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsView:
    """Trials of a search, in order of intent by default."""

    search_id: str
    state: SearchState
    trials: list[TrialView]
    next_cursor: str | None = None
    """Give it as `cursor` to get what follows; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookView(View):
    """State of the webhook of one search."""

    search_id: str
    url: str
    state: WebhookState
    attempts: int
    """Attempts begun since the search last ended."""
    next_attempt_at: datetime | None
    """Earliest time of the next attempt; None once delivered or given up."""
    last_error: str | None
    """Why the last attempt failed."""
    delivered_at: datetime | None

    @staticmethod
    def computed(record: WebhookRecord) -> dict[str, Any]:
        pending = record.state is WebhookState.PENDING
        return {"next_attempt_at": record.next_attempt_at if pending else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView(View):
    """One event of a search; `seq` is its id in the event stream."""

    seq: int
    kind: str
    payload: dict[str, Any]
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementView(View):
    """A stored measurement, and the query and configuration it belongs to."""

    id: str
    source: MeasurementSource
    state: MeasurementState
    """Only accepted ones teach."""
    trusted: bool
    """It teaches everybody; else its owner alone."""
    gpu: str
    framework: str
    model: str
    query: dict[str, Any]
    parallel: RunConfig
    predicted: dict[str, Any]
    measurement: Measurement
    warnings: tuple[str, ...]
    """Figures that lie far from the prediction."""
    search_id: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportView(View):
    """What became of a list of reports, each stored or refused by itself."""

    stored: list[MeasurementView]
    refused: list[Refused]

    @staticmethod
    def computed(record: Imported) -> dict[str, Any]:
        return {
            "stored": [MeasurementView.of(each) for each in record.stored],
            "refused": list(record.refused),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationView(View):
    """One version of the calibration of a cluster, its software and a family of models;
    immutable.
    """

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str
    """dense or moe; empty: all families."""
    owner: str
    """Who alone uses it, for their own reports; empty: everybody."""
    num_measurements: int
    measurement_ids: list[str]
    """The measurements it was fitted to."""
    summary: dict[str, Any]
    """Factors by group of parts, overheads, and the remaining error."""
    models: dict[str, int]
    """Measurements by model."""
    accuracy: dict[str, Any]
    """Median error of step time: error_before of the cost model alone, error_after on measurements
    a fit did not see.
    """
    created_at: datetime

    @staticmethod
    def computed(record: CalibrationRecord) -> dict[str, Any]:
        empty: dict[str, Any] = {"measurement_ids": [], "summary": {}, "models": {}, "accuracy": {}}
        fit = {name: record.payload.get(name, default) for name, default in empty.items()}
        return fit | {"summary": fit["summary"] | record.applied}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationView(View):
    """A model or server under a name that queries may use."""

    kind: RegistrationKind
    name: str
    owner: str | None
    """None: everybody's."""
    spec: dict[str, Any]
    """As submitted."""
    created_at: datetime
    updated_at: datetime
