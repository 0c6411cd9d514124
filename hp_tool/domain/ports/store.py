"""The port to the database; `hp_tool.store` holds its adapter."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol, Unpack

from hp_tool.domain.measurement import Fidelity, MeasurementStatus
from hp_tool.domain.measurement_records import (
    DueRefit,
    MeasuredCluster,
    MeasurementQuery,
    MeasurementRecord,
    MeasurementState,
    NewMeasurement,
)
from hp_tool.domain.records import (
    CalibrationRecord,
    EventRecord,
    GpuSecondsLimit,
    Head,
    JsonObject,
    Label,
    Lease,
    OpenRunsLimit,
    Page,
    Paging,
    RegistrationKind,
    RegistrationRecord,
    RunAccount,
    RunFigures,
    RunRecord,
    RunState,
    SearchRecord,
    SearchState,
    WorkerRecord,
)
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.webhooks import WebhookRecord


class Store(Protocol):
    """The one truth about searches, runs and measurements, shared by any number of processes.

    Guarantees:
    - Every method is one transaction: it happened wholly or not at all. Once it returns, no crash
      of a process undoes it (a power loss may take SQLite's last moments, and the local jobs with
      them; PostgreSQL keeps all).
    - One coordinator per search. `claim_search` hands out a lease with a token that grows with
      every claim; methods that take `lease` change nothing and raise ConflictError once another
      claim was made or the search was let go. An expired lease that nobody claimed still writes:
      expiry only opens the search to others.
    - Expiry is judged by the database's clock (PostgreSQL's; for SQLite the one host's), never by a
      client's.
    - Intent before act: `intend_run` is committed before the submit, and answers the same run for
      the same configuration until that run is abandoned. `finish_run` stores measurement, state and
      event together, once.
    - Unknown ids raise NotFoundError, forbidden transitions ConflictError, values that are no JSON
      InputError.
    """

    # Searches: anyone
    def create_search(
        self,
        *,
        query: JsonObject,
        owner: str | None = None,
        priority: int = 0,
        paused: bool = False,
        idempotency_key: str | None = None,
        api_key_id: str | None = None,
        limits: Sequence[GpuSecondsLimit] = (),
        webhook: str | None = None,
        request: JsonObject | None = None,
        edition: int | None = None,
    ) -> SearchRecord:
        """Queue a search. `paused`: only a claim by its id takes it, which is how a process keeps
        its own search to itself. `webhook`: a URL that a worker of a service tells when the search
        has ended.

        The same owner's idempotency key answers the first search again; with another query,
        priority or webhook it is a ConflictError. `request`: the query as it was sent, before names
        were looked up; None: it names nothing. `edition`: of the hp-tool that stores it
        (`queries.edition`), below which no worker takes it; None: every worker may. Where its
        budget passes one of `limits`, nothing is stored and LimitError raised; searches admitted at
        once are counted one after another.
        """

    def earlier_search(
        self,
        *,
        request: JsonObject,
        idempotency_key: str,
        owner: str | None = None,
        priority: int = 0,
        webhook: str | None = None,
        expanded: JsonObject | None = None,
    ) -> SearchRecord | None:
        """What `create_search` made for this key and request; None for a new key. ConflictError
        with another request. `expanded`: the request with its defaults, by which earlier editions
        told requests apart.
        """

    def get_search(self, *, search_id: str) -> SearchRecord: ...

    def list_searches(
        self,
        *,
        state: SearchState | None = None,
        owner: str | None = None,
        kind: str | None = None,
        model: str | None = None,
        words: str | None = None,
        limit: int = 50,
        **paging: Unpack[Paging],
    ) -> Page[SearchRecord]:
        """Newest first unless asked otherwise, without results. `model`: as their queries name it;
        `words`: all of them in its label.
        """

    def label_search(self, *, search_id: str, label: Label) -> SearchRecord:
        """Give it this name, these tags and this note in place of those it has."""

    def request_cancel(self, *, search_id: str) -> SearchRecord:
        """A waiting or failed search without open runs is cancelled at once, any other is asked
        through `requested`.

        Cancelling twice is harmless; a search that succeeded is a ConflictError.
        """

    def request_pause(self, *, search_id: str) -> SearchRecord: ...

    def resume_search(
        self, *, search_id: str, limits: Sequence[GpuSecondsLimit] = ()
    ) -> SearchRecord:
        """Queue a paused or failed search again (its finished runs stay), or take back a pause not
        yet followed.

        What a failed one may still spend is held against `limits` again.
        """

    def change_budget(
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
        limits: Sequence[GpuSecondsLimit] = (),
    ) -> SearchRecord:
        """Let a search that has not ended spend more or less; None leaves a budget as it is. Its
        coordinator follows with its next heartbeat. What it may spend on top is held against
        `limits`; ConflictError where it succeeded or was cancelled.
        """

    def get_webhook(self, *, search_id: str) -> WebhookRecord:
        """NotFoundError where the search has none."""

    # Searches: their coordinator
    def claim_search(
        self,
        *,
        holder: str,
        lease_s: float,
        search_id: str | None = None,
        per_cluster: int | None = None,
        edition: int | None = None,
    ) -> tuple[SearchRecord, Lease] | None:
        """Become coordinator of the next search that is queued or whose lease expired; by id also
        of a paused one.

        Next is the highest priority; among equals the owner with the fewest running searches, then
        the one whose last search was started the longest ago; of an owner's the oldest.
        `per_cluster`: where so many run on a cluster, its others wait. None: nothing to claim. Two
        callers never get the same token. A search over which worker after worker fell silent, with
        no run of it moved on, is not handed out again: it ends as failed, `worker_lost_repeatedly`.

        `edition`: the claimant's. Raises StoreError `older_edition`, with nothing claimed, where a
        newer one stored the search, or, without `search_id`, where the database has a newer schema
        than this hp-tool knows.
        """

    def renew_lease(self, *, lease: Lease, lease_s: float) -> SearchRecord:
        """The heartbeat: lease_s more seconds from now. The record tells whether a pause or cancel
        is requested.
        """

    def release_search(self, *, lease: Lease, paused: bool = False) -> SearchRecord:
        """Let go without an end: back to the queue, or paused."""

    def finish_search(
        self,
        *,
        lease: Lease,
        state: SearchState,
        stopped_because: str | None = None,
        result: JsonObject | None = None,
        error: JsonObject | None = None,
    ) -> SearchRecord:
        """End it as succeeded, failed or cancelled, and let go. A cancel that was requested
        meanwhile is its end, where no run is open.

        Only a failed search may leave open runs behind (for whoever resumes or cancels it);
        otherwise they are a ConflictError.
        """

    def set_progress(self, *, lease: Lease, progress: JsonObject) -> None: ...

    def append_event(self, *, lease: Lease, kind: str, payload: JsonObject) -> EventRecord: ...

    def events(self, *, search_id: str, after: int = 0, limit: int = 200) -> list[EventRecord]:
        """Oldest first, those with seq > after."""

    def heads(self, search_ids: Collection[str]) -> dict[str, Head]:
        """How far each of these searches has come; without those that there are not."""

    # Runs
    def intend_run(
        self,
        *,
        lease: Lease,
        parallel: RunConfig,
        fidelity: Fidelity,
        predicted: JsonObject,
        limit: OpenRunsLimit | None = None,
    ) -> RunRecord:
        """The run of this configuration, stored before it is submitted; a new attempt only where
        the last was abandoned.

        LimitError `cluster_full` where a new run would pass `limit`; runs intended at once are
        counted one after another.
        """

    def mark_submitted(self, *, lease: Lease, run_id: str, handle: str) -> RunRecord: ...

    def abandon_run(
        self,
        *,
        lease: Lease,
        run_id: str,
        cause: str,
        gpu_seconds: float = 0.0,
        account: RunAccount | None = None,
    ) -> RunRecord:
        """It ended and says nothing about the configuration; what it cost still counts."""

    def finish_run(
        self,
        *,
        lease: Lease,
        run_id: str,
        measurement: NewMeasurement,
        gpu_seconds: float,
        account: RunAccount | None = None,
    ) -> RunRecord:
        """Store what came out. A run that is already finished keeps its first measurement and is
        answered as it is.
        """

    def runs(self, *, search_id: str) -> list[RunRecord]:
        """All runs of a search in order of intent, with their measurements."""

    def list_runs(
        self,
        *,
        search_id: str,
        state: RunState | None = None,
        status: MeasurementStatus | None = None,
        limit: int = 100,
        **paging: Unpack[Paging],
    ) -> Page[RunRecord]:
        """A search's runs in pages, oldest first unless asked otherwise; every filter given must
        hold. `status`: of what was measured.
        """

    def count_open_runs(self, *, cluster: str) -> int:
        """Runs that have not ended, of the searches on the registered cluster of this name that
        have not either.
        """

    def run_figures(self, *, search_id: str) -> list[RunFigures]:
        """A search's runs by their figures alone: what a page reads of a search with thousands of
        them.
        """

    def get_run(self, *, search_id: str, run_id: str) -> RunRecord:
        """One of them, whole."""

    # Measurements and what is learnt from them
    def add_measurement(
        self,
        *,
        measurement: NewMeasurement,
        request: JsonObject | None = None,
        idempotency_key: str | None = None,
    ) -> MeasurementRecord:
        """`request`: what came with the idempotency key, where names were looked up since."""

    def earlier_measurement(
        self,
        *,
        request: JsonObject,
        idempotency_key: str,
        owner: str | None = None,
        expanded: JsonObject | None = None,
    ) -> MeasurementRecord | None:
        """The measurement that an owner's request with this key stored; None of a new key.
        ConflictError as in creating one.
        """

    def get_measurement(self, *, measurement_id: str) -> MeasurementRecord: ...

    def measurements(
        self, *, owner: str | None = None, limit: int = 100, **query: Unpack[MeasurementQuery]
    ) -> Page[MeasurementRecord]:
        """Newest first unless asked otherwise; every filter given must hold."""

    def set_measurement_state(
        self, *, measurement_id: str, state: MeasurementState, trusted: bool = True
    ) -> MeasurementRecord:
        """Let it teach, or not; a refit of its cluster's calibrations is due from then on.
        `trusted`: one that is accepted teaches everybody, not its owner alone.
        """

    def due_refits(self) -> list[DueRefit]:
        """Return changes of state that no calibration was fitted to yet, at most MOST_DUE."""

    def drop_due_refits(self, *, refits: Sequence[DueRefit]) -> None:
        """Forget these, which calibrations have been fitted to."""

    def reporters(self, *, cluster_key: str, framework: str) -> list[str]:
        """Owners whom measurements teach that nobody else trusts."""

    def measured_clusters(
        self, *, gpu: str | None = None, framework: str | None = None
    ) -> list[MeasuredCluster]:
        """Every (cluster, framework) that has measurements, by name."""

    def save_calibration(
        self,
        *,
        cluster_key: str,
        framework: str,
        payload: JsonObject,
        num_measurements: int,
        model_family: str = "",
        owner: str = "",
    ) -> CalibrationRecord:
        """Store as the next version; versions are never changed."""

    def latest_calibration(
        self,
        *,
        cluster_key: str,
        framework: str,
        model_family: str = "",
        owner: str = "",
        before: datetime | None = None,
    ) -> CalibrationRecord | None:
        """The newest version, or the newest of those made before."""

    def list_calibrations(
        self,
        *,
        cluster_key: str | None = None,
        framework: str | None = None,
        owners: Collection[str] | None = None,
        limit: int = 50,
        **paging: Unpack[Paging],
    ) -> Page[CalibrationRecord]:
        """Newest first. `owners`: only theirs, the empty one being everybody; None: all."""

    # Registered clusters and models: `owner` None is everybody's
    def put_registration(
        self, *, kind: RegistrationKind, name: str, spec: JsonObject, owner: str | None = None
    ) -> RegistrationRecord:
        """Add, or replace what this owner has under this name. ConflictError `too_many` above what
        a list may hold.
        """

    def get_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> RegistrationRecord | None:
        """What this name means to an owner: their own, else everybody's."""

    def registered_names(self, *, kind: RegistrationKind, owner: str | None = None) -> list[str]:
        """What an owner may name: theirs and everybody's."""

    def list_registrations(
        self,
        *,
        kind: RegistrationKind,
        owner: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[RegistrationRecord]:
        """All of them, or those of `names`, by name; of one name as `get_registration` answers."""

    def remove_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> None:
        """NotFoundError where this owner has none of this name."""

    # Workers
    def live_workers(self) -> list[WorkerRecord]:
        """Workers that announced themselves of late, the longest running first."""

    # The store itself
    def close(self) -> None:
        """Give the connections back; the store is not used afterwards."""
