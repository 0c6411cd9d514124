"""Port to the database. The adapter is in `hp_tool.store`."""

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
    SearchRecord,
    WorkerRecord,
)
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.states import RunState, SearchState
from hp_tool.domain.webhooks import WebhookRecord


class Store(Protocol):
    """Searches, runs and measurements, shared by any number of processes.

    Guarantees:
    - Every method is one transaction. Once it returns, its effect survives a process crash. (A
      power failure may lose SQLite's last transactions, and with them the local jobs; PostgreSQL
      loses none.)
    - Each search has one coordinator. `claim_search` returns a lease with a token that grows with
      every claim. Methods with a `lease` raise ConflictError and change nothing if the search was
      claimed again or released. A lease that expired but was not claimed again can still write:
      expiry only allows others to claim.
    - Leases expire by the database's clock (SQLite: the host's), never by a client's.
    - Intent before action: `intend_run` commits before the job is submitted. It returns the same
      run for the same configuration until that run is abandoned. `finish_run` stores measurement,
      state and event together, once.
    - Unknown ids raise NotFoundError, forbidden transitions ConflictError, and values that are not
      JSON InputError.
    """

    # Searches: methods for any caller
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
        """Queue a search.

        Args:
            query: The query, with registered names resolved.
            owner: Owner of the search.
            priority: Searches with higher priority are claimed first.
            paused: Allow only claims by id, so that a process can reserve its own search.
            idempotency_key: Repeating the owner's key returns the first search. With another query,
                priority or webhook, it raises ConflictError.
            api_key_id: Key whose quota the search uses.
            limits: Raise LimitError and store nothing if the search's budget exceeds a limit.
                Concurrent searches are admitted one at a time.
            webhook: URL that a service worker notifies when the search ends.
            request: The query as sent, before names were resolved; None if it has no names.
            edition: Edition of this hp-tool (`queries.edition`). Older workers do not claim the
                search; None: every worker may.
        """

    def earlier_search(
        self,
        *,
        request: JsonObject,
        idempotency_key: str,
        owner: str | None = None,
        priority: int = 0,
        webhook: str | None = None,
    ) -> SearchRecord | None:
        """Return the search that `create_search` stored for this key and request; None for a new
        key.

        Args:
            request: The query as sent.
            idempotency_key: The key.
            owner: Owner of the key.
            priority: As in the request.
            webhook: As in the request.

        Raises:
            ConflictError: The key was used for a different request.
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
        """List searches without their results, newest first by default.

        `model` matches the name in the query. All `words` must occur in the label.
        """

    def label_search(self, *, search_id: str, label: Label) -> SearchRecord:
        """Replace a search's name, tags and note."""

    def request_cancel(self, *, search_id: str) -> SearchRecord:
        """Cancel a search.

        A waiting or failed search without open runs is cancelled at once. Otherwise, the
        coordinator is asked to cancel. Repeating the request has no effect. For a succeeded search,
        ConflictError is raised.
        """

    def request_pause(self, *, search_id: str) -> SearchRecord: ...

    def resume_search(
        self, *, search_id: str, limits: Sequence[GpuSecondsLimit] = ()
    ) -> SearchRecord:
        """Queue a paused or failed search again, or withdraw a requested pause.

        Finished runs are kept. The remaining budget of a failed search is checked against `limits`.
        """

    def change_budget(
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
        limits: Sequence[GpuSecondsLimit] = (),
    ) -> SearchRecord:
        """Change the budget of an unfinished search; None leaves a value unchanged.

        The coordinator applies the change at its next heartbeat. An increase is checked against
        `limits`. For a succeeded or cancelled search, ConflictError is raised.
        """

    def get_webhook(self, *, search_id: str) -> WebhookRecord:
        """Return a search's webhook; raise NotFoundError if it has none."""

    # Searches: methods for their coordinator
    def claim_search(
        self,
        *,
        holder: str,
        lease_s: float,
        search_id: str | None = None,
        per_cluster: int | None = None,
        edition: int | None = None,
    ) -> tuple[SearchRecord, Lease] | None:
        """Become the coordinator of the next search that is queued or has an expired lease.

        Searches are ordered by priority (highest first), then by the owner's number of running
        searches (fewest first), then by the time at which the owner's last search started, then by
        age (oldest first). No two callers get the same token. A search that lost several workers in
        a row without progress of a run fails with `worker_lost_repeatedly` instead.

        Args:
            holder: The claiming worker.
            lease_s: Duration of the lease in seconds.
            search_id: Claim this search, even if it is paused.
            per_cluster: Maximum number of running searches per cluster.
            edition: Edition of the claiming hp-tool.

        Returns:
            The search and its lease; None if there is nothing to claim.

        Raises:
            StoreError: A newer edition stored the search, or (without `search_id`) the database has
                a newer schema; nothing is claimed (`older_edition`).
        """

    def renew_lease(self, *, lease: Lease, lease_s: float) -> SearchRecord:
        """Extend the lease to `lease_s` seconds from now. The returned record contains requested
        pauses and cancellations.
        """

    def release_search(self, *, lease: Lease, paused: bool = False) -> SearchRecord:
        """Release a search that has not ended: back to the queue, or paused."""

    def finish_search(
        self,
        *,
        lease: Lease,
        state: SearchState,
        stopped_because: str | None = None,
        result: JsonObject | None = None,
        error: JsonObject | None = None,
    ) -> SearchRecord:
        """End a search as succeeded, failed or cancelled, and release its lease.

        A requested cancellation takes precedence. Only a failed search may have open runs, which a
        later resume or cancel handles. Otherwise, open runs raise ConflictError.
        """

    def set_progress(self, *, lease: Lease, progress: JsonObject) -> None: ...

    def append_event(self, *, lease: Lease, kind: str, payload: JsonObject) -> EventRecord: ...

    def events(self, *, search_id: str, after: int = 0, limit: int = 200) -> list[EventRecord]:
        """Return the events with seq > `after`, oldest first."""

    def heads(self, search_ids: Collection[str]) -> dict[str, Head]:
        """Return the state and the last event of each of these searches; unknown ids are
        omitted.
        """

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
        """Return the run of this configuration, which is stored before it is submitted.

        Creates a new attempt only if the last one was abandoned. Raises LimitError `cluster_full`
        if a new run would exceed `limit`. Concurrent runs are admitted one at a time.
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
        """End a run without a result for its configuration. Its cost still counts."""

    def finish_run(
        self,
        *,
        lease: Lease,
        run_id: str,
        measurement: NewMeasurement,
        gpu_seconds: float,
        account: RunAccount | None = None,
    ) -> RunRecord:
        """Store a run's measurement. A run that is already finished is returned unchanged."""

    def runs(self, *, search_id: str) -> list[RunRecord]:
        """Return all runs of a search with their measurements, in order of intent."""

    def list_runs(
        self,
        *,
        search_id: str,
        state: RunState | None = None,
        status: MeasurementStatus | None = None,
        limit: int = 100,
        **paging: Unpack[Paging],
    ) -> Page[RunRecord]:
        """List a search's runs that match all filters, oldest first by default.

        `status` is that of the measurement.
        """

    def count_open_runs(self, *, cluster: str) -> int:
        """Count open runs of unfinished searches on a registered cluster."""

    def run_figures(self, *, search_id: str) -> list[RunFigures]:
        """Return a search's runs without logs and lists of steps."""

    def get_run(self, *, search_id: str, run_id: str) -> RunRecord:
        """Return a run with all its data."""

    # Measurements and calibrations
    def add_measurement(
        self,
        *,
        measurement: NewMeasurement,
        request: JsonObject | None = None,
        idempotency_key: str | None = None,
    ) -> MeasurementRecord:
        """Store a measurement. `request` is the request that was sent with the idempotency key."""

    def earlier_measurement(
        self, *, request: JsonObject, idempotency_key: str, owner: str | None = None
    ) -> MeasurementRecord | None:
        """Return the measurement that a request with this key stored; None for a new key.

        Raises:
            ConflictError: The key was used for a different request.
        """

    def get_measurement(self, *, measurement_id: str) -> MeasurementRecord: ...

    def measurements(
        self, *, owner: str | None = None, limit: int = 100, **query: Unpack[MeasurementQuery]
    ) -> Page[MeasurementRecord]:
        """List measurements that match all filters, newest first by default."""

    def set_measurement_state(
        self, *, measurement_id: str, state: MeasurementState, trusted: bool = True
    ) -> MeasurementRecord:
        """Change whether a measurement calibrates predictions. This makes a refit due.

        `trusted`: whether an accepted measurement counts for everybody, not only for its owner.
        """

    def due_refits(self) -> list[DueRefit]:
        """Return at most MAX_DUE_REFITS state changes to which no calibration was fitted yet."""

    def drop_due_refits(self, *, refits: Sequence[DueRefit]) -> None:
        """Delete due refits after calibrations have been fitted."""

    def reporters(self, *, cluster_key: str, framework: str) -> list[str]:
        """Return owners whose accepted measurements calibrate only their own predictions."""

    def measured_clusters(
        self, *, gpu: str | None = None, framework: str | None = None
    ) -> list[MeasuredCluster]:
        """Return every (cluster, framework) with measurements, by name."""

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
        """Store a calibration as the next version. Stored versions never change."""

    def latest_calibration(
        self,
        *,
        cluster_key: str,
        framework: str,
        model_family: str = "",
        owner: str = "",
        before: datetime | None = None,
    ) -> CalibrationRecord | None:
        """Return the newest calibration, or the newest one created before `before`."""

    def list_calibrations(
        self,
        *,
        cluster_key: str | None = None,
        framework: str | None = None,
        owners: Collection[str] | None = None,
        limit: int = 50,
        **paging: Unpack[Paging],
    ) -> Page[CalibrationRecord]:
        """List calibrations, newest first. `owners` filters by owner ("": everybody's; None: all
        owners).
        """

    # Registered clusters and models; `owner` None means shared.
    def put_registration(
        self, *, kind: RegistrationKind, name: str, spec: JsonObject, owner: str | None = None
    ) -> RegistrationRecord:
        """Add a registration, or replace the owner's registration of this name.

        Raises:
            ConflictError: The owner has too many registrations (`too_many`).
        """

    def get_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> RegistrationRecord | None:
        """Return the owner's registration of this name, else the shared one."""

    def registered_names(self, *, kind: RegistrationKind, owner: str | None = None) -> list[str]:
        """Return the names that an owner may use: their own and shared ones."""

    def list_registrations(
        self,
        *,
        kind: RegistrationKind,
        owner: str | None = None,
        names: Collection[str] | None = None,
    ) -> list[RegistrationRecord]:
        """List all registrations, or those with `names`, sorted by name. Each is the one that
        `get_registration` returns.
        """

    def remove_registration(
        self, *, kind: RegistrationKind, name: str, owner: str | None = None
    ) -> None:
        """Delete an owner's registration. Raise NotFoundError if it does not exist."""

    # Workers
    def live_workers(self) -> list[WorkerRecord]:
        """Return workers with a recent heartbeat, longest running first."""

    # The store itself
    def close(self) -> None:
        """Close all connections. The store cannot be used afterwards."""
