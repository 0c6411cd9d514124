"""Stored records: searches, runs, calibrations, registrations, workers and events.

Timestamps are timezone-aware UTC. JSON values contain neither infinity nor NaN.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

from annotated_types import MaxLen, MinLen

from hp_tool.domain.fields import ChosenValues, Strict
from hp_tool.domain.measurement import Fidelity, Latencies, Measurement, MeasurementStatus
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.states import Outcome, RunState, SearchState

JsonObject = dict[str, Any]
RegistrationKind = Literal["cluster", "model", "trace"]
T = TypeVar("T")
ANY_KEY = None
"""`api_key_id` of a limit that covers all searches together."""
REUSED = "reused_measurement_id"
"""Key in a run's prediction: the id of the earlier measurement that replaces the run."""
SET = "set"
"""Key in a run's prediction: query values other than `parallel` that the search chose, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A worker's right to coordinate a search. Writes with an older `token` are rejected. An
    expired lease only allows another claim.
    """

    search_id: str
    holder: str
    """Host, process id and start time of the worker."""
    token: int
    """Fencing token, which grows with every claim. Writes with an older token are rejected."""
    expires_at: datetime
    heartbeat_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Strict):
    """Name, tags and note of a search."""

    name: Annotated[str, MaxLen(200)] = ""
    tags: Annotated[tuple[Annotated[str, MinLen(1), MaxLen(64)], ...], MaxLen(20)] = ()
    note: Annotated[str, MaxLen(4000)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """A search: its query, state and result."""

    id: str
    state: SearchState
    query: JsonObject
    """The query, with registered names replaced by their specifications."""
    edition: int | None = None
    """Edition of the hp-tool that stored the search (`queries.edition`); None: unknown, so every
    worker may run it.
    """
    owner: str | None = None
    api_key_id: str | None = None
    """API key that submitted the search and whose quota it uses."""
    cluster: str | None = None
    """Launcher and cluster that the search uses; None for old records."""
    priority: int = 0
    """Searches with higher priority are claimed first."""
    lost_claims: int = 0
    """Number of workers lost in a row without progress of a run."""
    requested: Literal["cancel", "pause"] | None = None
    """Request to the coordinator, which reads it with every heartbeat."""
    lease: Lease | None = None
    progress: JsonObject = field(default_factory=dict)
    result: JsonObject | None = None
    """Omitted (None) in lists because of its size."""
    error: JsonObject | None = None
    """{code, message, field} of a failed search."""
    stopped_because: str | None = None
    label: Label = field(default_factory=Label)
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Devices on which a worker can run searches."""

    launcher: str
    gpu: str
    num_gpus: int
    """Maximum number of devices per job."""
    profiler: bool = True
    """False if torch or megatron-core is missing. Then only a query's own `trainer` can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker with a recent heartbeat."""

    holder: str
    """Host and process id."""
    offers: tuple[Offer, ...]
    started_at: datetime
    seen_at: datetime


class RunAccount(TypedDict, total=False):
    """Times, nodes and log of a run's job, as the cluster engine reports them."""

    queue_s: float
    """Seconds from submission to start."""
    wall_s: float
    """Seconds during which the job used its devices."""
    hosts: list[str]
    """Nodes of an abandoned job. For other jobs, the measurement contains the nodes."""
    log_tail: str
    """End of an abandoned job's log."""
    suspects: list[str]
    """Nodes that may have caused the end of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A profile run of a search."""

    id: str
    search_id: str
    number: int
    """Index in order of intent, from 0."""
    digest: str
    """digests.configuration_digest of parallel and fidelity."""
    attempt: int
    """Attempt number, from 0. Earlier attempts were abandoned."""
    state: RunState
    parallel: RunConfig
    """Complete configuration. For serving, one replica of it runs."""
    fidelity: Fidelity
    predicted: JsonObject
    """Predictions before the run: `step_s` (the objective value in seconds), memory and others."""
    job_name: str
    """Search, run number, fencing token and random run id, so that no name is used twice."""
    token: int
    handle: str | None = None
    """Engine's id of the job."""
    gpu_seconds: float | None = None
    """Devices x seconds of wall time."""
    cause: str | None = None
    """Reason why the run was abandoned."""
    account: JsonObject | None = None
    """Times, nodes and log of the job (`RunAccount`)."""
    measurement_id: str | None = None
    measurement: Measurement | None = None
    created_at: datetime
    submitted_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def set(self) -> ChosenValues:
        """Query values other than `parallel` that the search chose, by path."""
        return dict(self.predicted.get(SET, {}))

    @property
    def status(self) -> MeasurementStatus | None:
        """Status of the measurement; None without a measurement."""
        return None if self.measurement is None else self.measurement.status

    @property
    def shown_state(self) -> RunState | Outcome:
        """State to show: the outcome, or the run's own state if it has no measurement."""
        return Outcome(self.status) if self.status else self.state

    @property
    def objective_s(self) -> float | None:
        """Objective value that the search minimizes (`Measurement.objective_s`); None without a
        measurement.
        """
        return None if self.measurement is None else self.measurement.objective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run's metrics, without logs or per-step data, for long lists and charts."""

    id: str
    number: int
    state: RunState
    parallel: RunConfig
    fidelity: Fidelity
    predicted_step_s: float | None
    """Step time predicted by the cost model alone."""
    expected_step_s: float | None
    """Step time predicted with all measurements that were available when the run was chosen."""
    expected_step_s_interval: tuple[float, float] | None
    predicted_memory_bytes: float | None
    """Memory allocated on the fullest rank, predicted by the cost model."""
    chosen_by: str | None
    status: MeasurementStatus | None
    """None without a measurement."""
    objective_s: float | None
    """As `Measurement.objective_s`."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None
    latencies: Latencies | None
    """Latencies of a serving run under the full load."""
    cause: str | None
    """Reason why the run was abandoned or failed."""
    gpu_seconds: float | None
    finished_at: datetime | None

    @property
    def shown_state(self) -> RunState | Outcome:
        """As `RunRecord.shown_state`."""
        return Outcome(self.status) if self.status else self.state


class Paging(TypedDict, total=False):
    """Range and order of a list. A cursor is valid only with the same order and filters."""

    since: datetime | None
    """Created at this time or later."""
    until: datetime | None
    """Created before this time."""
    oldest_first: bool
    cursor: str | None
    """`Page.next_cursor` of the previous page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """One version of a calibration. Versions are numbered from 1 per cluster, framework, model
    family and owner.
    """

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str = ""
    """Empty for all families."""
    owner: str = ""
    """Owner whose predictions use the calibration, because it includes their untrusted reports;
    empty: everybody's predictions use it.
    """
    payload: JsonObject
    num_measurements: int
    created_at: datetime

    @property
    def applied(self) -> dict[str, float]:
        """Fractions of the correction that are applied to measured and to other models, by name."""
        fit = self.payload.get("step_time") or {}
        return {name: fit[name] for name in ("applied", "applied_elsewhere") if name in fit}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationRecord:
    """A named cluster, model or trace that a user registered."""

    kind: RegistrationKind
    name: str
    spec: JsonObject
    owner: str | None = None
    """None if shared by all owners."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """State and last event of a search."""

    state: SearchState
    seq: int
    """Sequence number of the last event; 0 without events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event of a search. `seq` has no gaps and follows commit order, so readers miss no
    event.
    """

    search_id: str
    seq: int
    """Sequence number, from 1."""
    kind: str
    """`state` or `run` if stored by the store, else a kind defined by the coordinator."""
    payload: JsonObject
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list."""

    items: tuple[T, ...]
    next_cursor: str | None
    """Opaque cursor; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSecondsLimit:
    """Limit on the GPU-seconds of profile runs per day (UTC)."""

    per_day: float
    api_key_id: str | None = ANY_KEY
    """Key whose searches count; ANY_KEY for all."""
    cluster: str | None = None
    """Only searches on this registered cluster; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRunsLimit:
    """Limit on open profile runs on a registered cluster."""

    cluster: str
    runs: int
