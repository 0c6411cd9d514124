"""What the store keeps: searches, their profile runs, measurements, calibrations, registrations and
events.

Instants are timezone-aware UTC. JSON values hold no infinity and no NaN.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar

from annotated_types import MaxLen, MinLen

from hp_tool.domain.fields import ChosenValues, Strict
from hp_tool.domain.measurement import Fidelity, Latencies, Measurement, MeasurementStatus
from hp_tool.domain.serving import RunConfig

JsonObject = dict[str, Any]
RegistrationKind = Literal["cluster", "model", "trace"]
T = TypeVar("T")
ANY_KEY = None
"""In a limit: it holds for all searches together."""
REUSED = "reused_measurement_id"
"""In a run's prediction: the earlier measurement that stands for it; nothing was run."""
SET = "set"
"""In a run's prediction: values of the search's query that the search chose beside `parallel`, by
path.
"""


class SearchState(StrEnum):
    """Where a search stands; succeeded, failed and cancelled are final (failed may be resumed or
    cancelled).
    """

    QUEUED = "queued"
    """Waiting for a coordinator."""
    RUNNING = "running"
    """A coordinator holds its lease, or held it and died: an expired lease may be claimed by
    another.
    """
    PAUSED = "paused"
    """Nobody works on it until it is resumed, or claimed by its id."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (SearchState.SUCCEEDED, SearchState.FAILED, SearchState.CANCELLED)


class RunState(StrEnum):
    """Where a profile run stands."""

    INTENDED = "intended"
    """Stored before the submit: after a crash its job, if there is one, is found by its name."""
    SUBMITTED = "submitted"
    """The engine has it; `handle` is the engine's."""
    FINISHED = "finished"
    """Its measurement is stored, whatever came out; never run again."""
    ABANDONED = "abandoned"
    """Ended without telling anything about the configuration (preempted, lost, cancelled); may be
    tried again.
    """

    @property
    def ended(self) -> bool:
        return self in (RunState.FINISHED, RunState.ABANDONED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to coordinate one search. Fencing is by `token`; expiry only decides when another
    may take over.
    """

    search_id: str
    holder: str
    """Who, for people: host, process and start."""
    token: int
    """Grows by one with every claim; a write with an older one is refused."""
    expires_at: datetime
    heartbeat_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Strict):
    """What people call a search, to find it again by its words."""

    name: Annotated[str, MaxLen(200)] = ""
    tags: Annotated[tuple[Annotated[str, MinLen(1), MaxLen(64)], ...], MaxLen(20)] = ()
    note: Annotated[str, MaxLen(4000)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """One search: what was asked, who works on it, what came out."""

    id: str
    state: SearchState
    query: JsonObject
    """The query as it was asked, with what is registered in place of its names."""
    edition: int | None = None
    """Of the hp-tool that stored it (`queries.edition`). None: stored before this was kept, for
    every worker.
    """
    owner: str | None = None
    api_key_id: str | None = None
    """The key it was submitted with, whose quota it uses."""
    cluster: str | None = None
    """What it keeps busy: launcher and cluster. None: stored before this was kept."""
    priority: int = 0
    """Higher is claimed first."""
    lost_claims: int = 0
    """Workers in a row that fell silent while they held it, with no run of it moved on."""
    requested: Literal["cancel", "pause"] | None = None
    """What its coordinator should do next; read with every heartbeat."""
    lease: Lease | None = None
    progress: JsonObject = field(default_factory=dict)
    result: JsonObject | None = None
    """Left out (None) in lists, which would grow large."""
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
    """Devices that a worker can run a search on."""

    launcher: str
    gpu: str
    num_gpus: int
    """At most, for one job."""
    profiler: bool = True
    """False: on this host nothing but a query's own `trainer` runs, because torch or megatron-core
    is missing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A live worker."""

    holder: str
    """Host and process id."""
    offers: tuple[Offer, ...]
    started_at: datetime
    seen_at: datetime


class RunAccount(TypedDict, total=False):
    """What became of a run's job besides its measurement."""

    queue_s: float
    """Seconds between submission and start, which cost nothing."""
    wall_s: float
    """Seconds that it held its devices."""
    hosts: list[str]
    """Nodes of a job that was given up; those of others are in the measurement."""
    log_tail: str
    """The end of its log, likewise."""
    suspects: list[str]
    """Those of its nodes whose fault its end may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One profile run of a search, from intent to measurement."""

    id: str
    search_id: str
    number: int
    """0-based, in order of intent, within the search."""
    digest: str
    """digests.configuration_digest of parallel and fidelity."""
    attempt: int
    """0-based; above 0 the earlier ones were abandoned."""
    state: RunState
    parallel: RunConfig
    """The whole configuration; of serving one replica of it runs."""
    fidelity: Fidelity
    predicted: JsonObject
    """Predictions made before the run: `step_s` (the seconds that the search minimises), memory and
    the like.
    """
    job_name: str
    """Search, number, the fencing token that intended it, and the run's id: unlike the others never
    made twice.
    """
    token: int
    handle: str | None = None
    """The engine's name for the job."""
    gpu_seconds: float | None = None
    """Devices x wall seconds: what it cost."""
    cause: str | None = None
    """Why it was abandoned."""
    account: JsonObject | None = None
    """What the engine said of its job, as `RunAccount`."""
    measurement_id: str | None = None
    measurement: Measurement | None = None
    created_at: datetime
    submitted_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def set(self) -> ChosenValues:
        """Values of the search's query that it chose beside `parallel`, by path; they were
        predicted, and run.
        """
        return dict(self.predicted.get(SET, {}))

    @property
    def status(self) -> MeasurementStatus | None:
        """Its measurement's; None: no measurement (yet)."""
        return None if self.measurement is None else self.measurement.status

    @property
    def objective_s(self) -> float | None:
        """The seconds that a search minimises (`Measurement.objective_s`); None: no measurement
        (yet).
        """
        return None if self.measurement is None else self.measurement.objective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run as a list or a chart of ten thousand needs it: its figures, without logs and lists of
    steps.
    """

    id: str
    number: int
    state: RunState
    parallel: RunConfig
    fidelity: Fidelity
    predicted_step_s: float | None
    """By the cost model alone."""
    expected_step_s: float | None
    """By all that was known when the run was chosen."""
    expected_step_s_interval: tuple[float, float] | None
    predicted_memory_bytes: float | None
    """Allocated on the worst rank, by the cost model."""
    chosen_by: str | None
    status: MeasurementStatus | None
    """None: no measurement (yet)."""
    objective_s: float | None
    """As `Measurement.objective_s`."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None
    latencies: Latencies | None
    """Of a run that serves, under the whole load."""
    cause: str | None
    """Why it was abandoned or failed."""
    gpu_seconds: float | None
    finished_at: datetime | None


class Paging(TypedDict, total=False):
    """Which part of a list, and in which order. A cursor belongs to the order and the filters it
    was answered with.
    """

    since: datetime | None
    """Created at this instant or later."""
    until: datetime | None
    """Created before this instant."""
    oldest_first: bool
    cursor: str | None
    """`Page.next_cursor` of the page before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """One version of what was learnt from measurements; versions count from 1 within (cluster_key,
    framework, model_family, owner).
    """

    id: str
    version: int
    cluster_key: str
    framework: str
    model_family: str = ""
    """Empty: all families."""
    owner: str = ""
    """Who alone uses it, because it learnt from reports of theirs that others need not trust;
    empty: everybody.
    """
    payload: JsonObject
    num_measurements: int
    created_at: datetime

    @property
    def applied(self) -> dict[str, float]:
        """Shares of the correction that the fit found to hold for runs, and for models, that it
        left out; by name.
        """
        fit = self.payload.get("step_time") or {}
        return {name: fit[name] for name in ("applied", "applied_elsewhere") if name in fit}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationRecord:
    """A cluster or model that someone added to the catalogue under a name."""

    kind: RegistrationKind
    name: str
    spec: JsonObject
    owner: str | None = None
    """Whose it is; None: everybody's."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Head:
    """How far a search has come."""

    state: SearchState
    seq: int
    """Of its last event; 0: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to a search. `seq` has no gaps and follows commit order, so a reader
    after n misses nothing.
    """

    search_id: str
    seq: int
    """From 1."""
    kind: str
    """state, run (the store's own), or a coordinator's word."""
    payload: JsonObject
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """Part of a list, newest first."""

    items: tuple[T, ...]
    next_cursor: str | None
    """Opaque; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSecondsLimit:
    """GPU-seconds that profile runs may take in one day (UTC)."""

    per_day: float
    api_key_id: str | None = ANY_KEY
    """Whose searches count; ANY_KEY: everybody's."""
    cluster: str | None = None
    """Only those on this registered cluster; None: wherever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRunsLimit:
    """Profile runs that may be open at a time, of all searches on a registered cluster."""

    cluster: str
    runs: int
