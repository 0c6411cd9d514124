"""Stored records: searches, runs, measurements, calibrations, registrations and events.

Timestamps are timezone-aware UTC. JSON values contain no infinity and no NaN.
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
"""Value of `api_key_id` in a limit that covers all searches together."""
REUSED = "reused_measurement_id"
"""Key, in a run's prediction, of the id of the earlier measurement that replaces the run."""
SET = "set"
"""Key, in a run's prediction, of query values that the search chose besides `parallel`, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Right of a worker to coordinate a search. Writes with an older `token` are rejected; an
    expired lease only allows another claim.
    """

    search_id: str
    holder: str
    """Host, process and start time of the worker."""
    token: int
    """Grows with every claim; writes with an older token are rejected."""
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
    """The query with registered names replaced by their specifications."""
    edition: int | None = None
    """Edition of the hp-tool that stored it (`queries.edition`); None: unknown, so that every
    worker may run it.
    """
    owner: str | None = None
    api_key_id: str | None = None
    """Key that it was submitted with and whose quota it uses."""
    cluster: str | None = None
    """Launcher and cluster that it occupies; None for old records."""
    priority: int = 0
    """Higher is claimed first."""
    lost_claims: int = 0
    """Workers lost in a row without progress of a run."""
    requested: Literal["cancel", "pause"] | None = None
    """Request for its coordinator, read with every heartbeat."""
    lease: Lease | None = None
    progress: JsonObject = field(default_factory=dict)
    result: JsonObject | None = None
    """None in lists, because of its size."""
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
    """Maximum for one job."""
    profiler: bool = True
    """False if torch or megatron-core is missing, so only a query's own `trainer` can run."""


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
    """Seconds for which the job used its devices."""
    hosts: list[str]
    """Nodes of an abandoned job; for others see the measurement."""
    log_tail: str
    """End of an abandoned job's log."""
    suspects: list[str]
    """Nodes that may have caused its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A profile run of a search."""

    id: str
    search_id: str
    number: int
    """Position in order of intent, from 0."""
    digest: str
    """digests.configuration_digest of parallel and fidelity."""
    attempt: int
    """From 0; earlier attempts were abandoned."""
    state: RunState
    parallel: RunConfig
    """Complete configuration; of a serving configuration, one replica runs."""
    fidelity: Fidelity
    predicted: JsonObject
    """Predictions before the run: `step_s` (the minimized seconds), memory and others."""
    job_name: str
    """Search, number, fencing token and random run id, so that no name is used twice."""
    token: int
    handle: str | None = None
    """Engine's id of the job."""
    gpu_seconds: float | None = None
    """Devices x wall seconds."""
    cause: str | None = None
    """Why it was abandoned."""
    account: JsonObject | None = None
    """Times, nodes and log of its job (`RunAccount`)."""
    measurement_id: str | None = None
    measurement: Measurement | None = None
    created_at: datetime
    submitted_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def set(self) -> ChosenValues:
        """Query values that the search chose besides `parallel`, by path."""
        return dict(self.predicted.get(SET, {}))

    @property
    def status(self) -> MeasurementStatus | None:
        """Status of its measurement; None without one."""
        return None if self.measurement is None else self.measurement.status

    @property
    def shown_state(self) -> RunState | Outcome:
        """State shown to users: the run's outcome, or its own state without a measurement."""
        return Outcome(self.status) if self.status else self.state

    @property
    def objective_s(self) -> float | None:
        """`Measurement.objective_s`, which a search minimizes; None without a measurement."""
        return None if self.measurement is None else self.measurement.objective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run's figures without logs and step lists, for long lists and charts."""

    id: str
    number: int
    state: RunState
    parallel: RunConfig
    fidelity: Fidelity
    predicted_step_s: float | None
    """Predicted by the cost model alone."""
    expected_step_s: float | None
    """Predicted with all measurements known when the run was chosen."""
    expected_step_s_interval: tuple[float, float] | None
    predicted_memory_bytes: float | None
    """Allocated on the worst rank, predicted by the cost model."""
    chosen_by: str | None
    status: MeasurementStatus | None
    """None without a measurement."""
    objective_s: float | None
    """As `Measurement.objective_s`."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None
    latencies: Latencies | None
    """Latencies of a serving run under the whole load."""
    cause: str | None
    """Why it was abandoned or failed."""
    gpu_seconds: float | None
    finished_at: datetime | None

    @property
    def shown_state(self) -> RunState | Outcome:
        """As `RunRecord.shown_state`."""
        return Outcome(self.status) if self.status else self.state


class Paging(TypedDict, total=False):
    """Range and order of a list. A cursor is valid only for the same order and filters."""

    since: datetime | None
    """Created at this time or later."""
    until: datetime | None
    """Created before this time."""
    oldest_first: bool
    cursor: str | None
    """`Page.next_cursor` of the previous page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """A version of a calibration, numbered from 1 per cluster, framework, family and owner."""

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str = ""
    """Empty for all families."""
    owner: str = ""
    """Only this owner's predictions use it, because it includes their own untrusted reports; empty
    for everybody.
    """
    payload: JsonObject
    num_measurements: int
    created_at: datetime

    @property
    def applied(self) -> dict[str, float]:
        """Fractions of the correction that hold for held-out runs and held-out models, by name."""
        fit = self.payload.get("step_time") or {}
        return {name: fit[name] for name in ("applied", "applied_elsewhere") if name in fit}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationRecord:
    """A named cluster, model or trace that a user registered."""

    kind: RegistrationKind
    name: str
    spec: JsonObject
    owner: str | None = None
    """None if shared with everybody."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """State and last event of a search."""

    state: SearchState
    seq: int
    """Number of its last event; 0 if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event of a search. `seq` has no gaps and follows commit order, so readers miss nothing."""

    search_id: str
    seq: int
    """From 1."""
    kind: str
    """`state` or `run` (from the store), or a coordinator's own kind."""
    payload: JsonObject
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list."""

    items: tuple[T, ...]
    next_cursor: str | None
    """Opaque; None on the last page."""


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
