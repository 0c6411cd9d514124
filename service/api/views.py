"""What the API answers with: typed views over the store's records. Knows no web framework; the client reads them too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.records import (
    CalibrationRecord,
    EventRecord,
    MeasurementRecord,
    MeasurementSource,
    RegistrationKind,
    RegistrationRecord,
    RunRecord,
    RunState,
    SearchRecord,
    SearchState,
)
from hp_tool.domain.serving import Configuration
from hp_tool.domain.webhooks import WebhookRecord, WebhookState

T = TypeVar("T")
STREAM_END = "end"
"""Name of an event stream's last event: the search has ended and nothing will follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageView(Generic[T]):
    """Part of a list, newest first."""

    items: list[T]
    next_cursor: str | None
    """Give it as `cursor` to get what follows; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchView:
    """One search: what was asked, where it stands, what it has cost."""

    id: str
    state: SearchState
    requested: Literal["cancel", "pause"] | None
    """What its worker was asked to do and has not yet done."""
    owner: str | None
    """Whose key submitted it; None: the operator's, or no key was asked for."""
    query: dict[str, Any]
    progress: dict[str, Any]
    """Counts and the best so far, as the coordinator last said them."""
    summary: dict[str, Any] | None
    """What it cost in the end; None before that, and in lists."""
    worker: str | None
    """Who works on it: host and process."""
    error: dict[str, Any] | None
    """{code, message, field} of a failed search."""
    stopped_because: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, record: SearchRecord) -> SearchView:
        return cls(
            id=record.id,
            state=record.state,
            requested=record.requested,
            owner=record.owner,
            query=record.query,
            progress=record.progress,
            summary=(record.result or {}).get("search"),
            worker=record.lease.holder if record.lease else None,
            error=record.error,
            stopped_because=record.stopped_because,
            created_at=record.created_at,
            started_at=record.started_at,
            finished_at=record.finished_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """One profile run: predicted before, predicted after calibration and measured, side by side."""

    run_id: str
    number: int
    """0-based, in order of intent."""
    attempt: int
    state: RunState
    parallel: Configuration
    fidelity: Fidelity
    predicted: dict[str, Any]
    """Before the run."""
    calibrated: dict[str, Any] | None
    """After the search's measurements were learnt from; None until it has ended."""
    measurement: Measurement | None
    measurement_id: str | None
    gpu_seconds: float | None
    cause: str | None
    """Why it was abandoned."""
    created_at: datetime
    submitted_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, run: RunRecord, *, calibrated: dict[str, Any] | None) -> TrialView:
        return cls(
            run_id=run.id,
            number=run.number,
            attempt=run.attempt,
            state=run.state,
            parallel=run.parallel,
            fidelity=run.fidelity,
            predicted=run.predicted,
            calibrated=calibrated,
            measurement=run.measurement,
            measurement_id=run.measurement_id,
            gpu_seconds=run.gpu_seconds,
            cause=run.cause,
            created_at=run.created_at,
            submitted_at=run.submitted_at,
            finished_at=run.finished_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsView:
    """Trials of a search, in order of intent unless asked otherwise."""

    search_id: str
    state: SearchState
    trials: list[TrialView]
    next_cursor: str | None = None
    """Give it as `cursor` to get what follows; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookView:
    """How far the telling of a search's end has come."""

    search_id: str
    url: str
    state: WebhookState
    attempts: int
    """Begun so far, since the search last ended."""
    next_attempt_at: datetime | None
    """At the earliest; None once it is delivered or given up."""
    last_error: str | None
    """Why the last attempt failed."""
    delivered_at: datetime | None

    @classmethod
    def of(cls, record: WebhookRecord) -> WebhookView:
        return cls(
            search_id=record.search_id,
            url=record.url,
            state=record.state,
            attempts=record.attempts,
            next_attempt_at=record.next_attempt_at if record.state is WebhookState.PENDING else None,
            last_error=record.last_error,
            delivered_at=record.delivered_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """One thing that happened to a search; `seq` is the event stream's id."""

    seq: int
    kind: str
    payload: dict[str, Any]
    at: datetime

    @classmethod
    def of(cls, record: EventRecord) -> EventView:
        return cls(seq=record.seq, kind=record.kind, payload=record.payload, at=record.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementView:
    """A stored measurement and what it was measured on."""

    id: str
    source: MeasurementSource
    trust: float
    gpu: str
    framework: str
    model: str
    query: dict[str, Any]
    parallel: Configuration
    predicted: dict[str, Any]
    measurement: Measurement
    search_id: str | None
    created_at: datetime

    @classmethod
    def of(cls, record: MeasurementRecord) -> MeasurementView:
        return cls(
            id=record.id,
            source=record.source,
            trust=record.trust,
            gpu=record.gpu,
            framework=record.framework,
            model=record.model,
            query=record.query,
            parallel=record.parallel,
            predicted=record.predicted,
            measurement=record.measurement,
            search_id=record.search_id,
            created_at=record.created_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationView:
    """One version of what was learnt about a cluster, its software and a family of models; never changed."""

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str
    """dense or moe; empty: all families."""
    num_measurements: int
    measurement_ids: list[str]
    """Which measurements made it."""
    summary: dict[str, Any]
    """Factors by group of parts, overheads, and the error that remains."""
    accuracy: dict[str, Any]
    """Median error of step time: error_before of the cost model alone, error_after on measurements a fit did not see."""
    created_at: datetime

    @classmethod
    def of(cls, record: CalibrationRecord) -> CalibrationView:
        payload = record.payload
        return cls(
            id=record.id,
            version=record.version,
            cluster_key=record.cluster_key,
            framework=record.framework,
            model_family=record.model_family,
            num_measurements=record.num_measurements,
            measurement_ids=payload.get("measurement_ids", []),
            summary=payload.get("summary", {}),
            accuracy=payload.get("accuracy", {}),
            created_at=record.created_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationView:
    """A model or server under a name that queries may use."""

    kind: RegistrationKind
    name: str
    owner: str | None
    """None: everybody's."""
    spec: dict[str, Any]
    """As it was sent."""
    created_at: datetime
    updated_at: datetime

    @classmethod
    def of(cls, record: RegistrationRecord) -> RegistrationView:
        return cls(
            kind=record.kind,
            name=record.name,
            owner=record.owner,
            spec=record.spec,
            created_at=record.created_at,
            updated_at=record.updated_at,
        )
