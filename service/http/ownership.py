"""The store restricted to one caller. Routes have no other store, so none can skip the owner check.

Searches, runs and measurements are visible to their owner and to administrators. Calibrations are
visible to everybody, unless they use reports that only their owner trusts. Another owner's search
is reported as missing, so that its existence is not disclosed.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from hp_tool.domain.access import AccessStore, Scope
from hp_tool.domain.measurement_records import MeasurementRecord, MeasurementState, NewMeasurement
from hp_tool.domain.records import (
    CalibrationRecord,
    GpuSecondsLimit,
    JsonObject,
    Page,
    RegistrationKind,
    RegistrationRecord,
    SearchRecord,
)
from hp_tool.domain.watch_records import WatchRecord
from hp_tool.errors import ConflictError, HpToolError, NotFoundError
from hp_tool.loop.tuning import check_offered, daily_limits, within_limits
from hp_tool.questions.schema import parse_query
from service.http.sample import READING, SAMPLE, sample_store
from service.keys import Principal
from service.settings import Settings

SHARED = frozenset({"live_workers", "measured_clusters"})
"""Store methods whose results contain no owner's data."""


class PrincipalStore:
    """A `Store` limited to what its caller may see and spend. New records belong to the caller."""

    def __init__(self, *, store: AccessStore, principal: Principal, settings: Settings) -> None:
        self._store = store
        self._principal = principal
        self._settings = settings

    def create_search(self, *, query: JsonObject, **options: Any) -> SearchRecord:
        """Queue a search that belongs to the caller.

        If budgets are limited, a query without a GPU-second budget receives one.

        Raises:
            InputError: No live worker can run the search (`launcher_mismatch`), or its budget is
                above the limit (`gpu_seconds_ceiling`).
            LimitError: Today's quota is used up.
            HpToolError: The priority is reserved for administrators (`forbidden`).
        """
        principal = self._principal
        if options.get("priority", 0) > 0 and principal.scope < Scope.ADMIN:
            raise HpToolError(
                "A priority above 0 requires scope admin. Use 0 or less.", code="forbidden"
            )
        check_offered(parse_query(query), self._store.live_workers())
        return self._store.create_search(
            query=within_limits(query, ceiling=self._ceiling()),
            owner=principal.owner,
            api_key_id=principal.key_id,
            limits=(*self._limits(), *daily_limits(query)),
            **options,
        )

    def earlier_search(self, **sent: Any) -> SearchRecord | None:
        return self._store.earlier_search(owner=self._principal.owner, **sent)

    def resume_search(self, *, search_id: str) -> SearchRecord:
        query = self.get_search(search_id=search_id).query
        return self._store.resume_search(
            search_id=search_id, limits=(*self._limits(), *daily_limits(query))
        )

    def change_budget(
        self,
        *,
        search_id: str,
        budget_runs: int | None = None,
        budget_gpu_seconds: float | None = None,
    ) -> SearchRecord:
        """Change the budget of a search.

        Raises:
            InputError: The budget is above the limit (`gpu_seconds_ceiling`).
            LimitError: Today's quota is used up.
        """
        query = self.get_search(search_id=search_id).query
        if budget_gpu_seconds is not None:
            search = {**(query.get("search") or {}), "budget_gpu_seconds": budget_gpu_seconds}
            within_limits({**query, "search": search}, ceiling=self._ceiling())
        return self._store.change_budget(
            search_id=search_id,
            budget_runs=budget_runs,
            budget_gpu_seconds=budget_gpu_seconds,
            limits=(*self._limits(), *daily_limits(query)),
        )

    def get_search(self, *, search_id: str) -> SearchRecord:
        if search_id == SAMPLE:
            return sample_store().get_search(search_id=search_id)
        record = self._store.get_search(search_id=search_id)
        if not self._may_see(record.owner):
            raise NotFoundError(f"No search {search_id!r}.", field="search_id")
        return record

    def add_measurement(self, *, measurement: NewMeasurement, **options: Any) -> MeasurementRecord:
        """Store the caller's measurement. Trusted reporters' calibrate all predictions."""
        everybody = (
            self._settings.trusted_reports == "everybody" or self._principal.scope >= Scope.ADMIN
        )
        owned = replace(measurement, owner=self._principal.owner, trusted=everybody)
        return self._store.add_measurement(measurement=owned, **options)

    def earlier_measurement(self, **sent: Any) -> MeasurementRecord | None:
        return self._store.earlier_measurement(owner=self._principal.owner, **sent)

    def get_measurement(self, *, measurement_id: str) -> MeasurementRecord:
        record = self._store.get_measurement(measurement_id=measurement_id)
        if not self._may_see(record.owner):
            raise NotFoundError(f"No measurement {measurement_id!r}.", field="measurement_id")
        return record

    def set_measurement_state(
        self, *, measurement_id: str, state: MeasurementState
    ) -> MeasurementRecord:
        """Change a measurement's state.

        If an administrator accepts it, it calibrates all predictions. If its owner accepts it, it
        calibrates the owner's predictions.
        """
        record = self.get_measurement(measurement_id=measurement_id)
        everybody = (
            self._settings.trusted_reports == "everybody" or self._principal.scope >= Scope.ADMIN
        )
        if record.state == state and (state != "accepted" or record.trusted or not everybody):
            return record
        return self._store.set_measurement_state(
            measurement_id=measurement_id, state=state, trusted=everybody
        )

    def get_watch(self, *, watch_id: str) -> WatchRecord:
        record = self._store.get_watch(watch_id=watch_id)
        if not self._may_see(record.owner):
            raise NotFoundError(f"No watched job {watch_id!r}.", field="watch_id")
        return record

    def change_watch(self, *, watch_id: str, **change: Any) -> WatchRecord:
        """Update a watch; raise ConflictError `too_many` if the owner has too many processes."""
        max_processes = self._settings.max_watch_processes
        return self._store.change_watch(
            watch_id=self.get_watch(watch_id=watch_id).id, max_processes=max_processes, **change
        )

    def list_calibrations(self, **which: Any) -> Page[CalibrationRecord]:
        """Return the shared calibrations and the caller's own; all of them for administrators."""
        owners = None if self._principal.scope >= Scope.ADMIN else ("", self._principal.owner or "")
        return self._store.list_calibrations(owners=owners, **which)

    def put_registration(
        self, *, owner: str | None = None, **registration: Any
    ) -> RegistrationRecord:
        """Register a name for `owner` (None: everybody). Names of others require scope admin."""
        return self._store.put_registration(owner=self._registrant(owner), **registration)

    def get_registration(self, *, kind: RegistrationKind, name: str) -> RegistrationRecord | None:
        return self._store.get_registration(kind=kind, name=name, owner=self._principal.owner)

    def registered_names(self, *, kind: RegistrationKind) -> list[str]:
        return self._store.registered_names(kind=kind, owner=self._principal.owner)

    def list_registrations(
        self, *, kind: RegistrationKind, **which: Any
    ) -> list[RegistrationRecord]:
        return self._store.list_registrations(kind=kind, owner=self._principal.owner, **which)

    def remove_registration(self, *, owner: str | None = None, **registration: Any) -> None:
        self._store.remove_registration(owner=self._registrant(owner), **registration)

    def __getattr__(self, name: str) -> Any:
        """Return any other store method, with its parameters restricted to the caller's data.

        A method that cannot be restricted requires scope admin.
        """
        method = getattr(self._store, name)
        parameters = _parameters(getattr(type(self._store), name))
        if name not in READING and (self._principal.scope >= Scope.ADMIN or name in SHARED):
            return method
        if "owner" in parameters:
            return lambda **arguments: method(**arguments | {"owner": self._principal.owner})
        if "watch_id" in parameters:
            return lambda *, watch_id, **arguments: method(
                watch_id=self.get_watch(watch_id=watch_id).id, **arguments
            )
        if "search_id" in parameters:
            return lambda *, search_id, **arguments: getattr(self._store_of(search_id, name), name)(
                search_id=search_id, **arguments
            )
        raise HpToolError(f"{name} requires scope admin", code="forbidden")

    def _store_of(self, search_id: str, method: str) -> AccessStore:
        """Return the store that contains the search; raise if it is not visible to the caller."""
        if search_id == SAMPLE:
            if method not in READING:
                raise ConflictError(
                    "The sample cannot be changed. Start your own search at /searches/new."
                )
            return sample_store()
        if self._principal.scope < Scope.ADMIN:
            self.get_search(search_id=search_id)
        return self._store

    def _registrant(self, owner: str | None) -> str | None:
        if not self._may_see(owner):
            raise HpToolError(
                "Shared entries and those of other owners require scope admin.", code="forbidden"
            )
        return owner

    def _may_see(self, owner: str | None) -> bool:
        return self._principal.scope >= Scope.ADMIN or owner == self._principal.owner

    def _limits(self) -> tuple[GpuSecondsLimit, ...]:
        key = self._principal.key
        limits = []
        if self._settings.max_gpu_seconds_per_day is not None:
            limits.append(GpuSecondsLimit(per_day=self._settings.max_gpu_seconds_per_day))
        if key is not None and key.gpu_seconds_per_day is not None:
            limits.append(GpuSecondsLimit(per_day=key.gpu_seconds_per_day, api_key_id=key.id))
        return tuple(limits)

    def _ceiling(self) -> float | None:
        bounds = [limit.per_day for limit in self._limits()]
        if self._settings.max_gpu_seconds_per_search is not None:
            bounds.append(self._settings.max_gpu_seconds_per_search)
        return min(bounds, default=None)


@cache
def _parameters(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)
