"""The store as one caller may use it. Routes get no other store, so none of them can forget to
check whose a search is.

A search, run or measurement is visible to its owner and to administrators. A calibration is visible
to everybody, but for one that learnt from reports which only their owner trusts. Another owner's
search is answered as if it did not exist, so that nobody can probe for it.
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
"""Methods whose answers show nobody's data."""


class PrincipalStore:
    """A `Store` that shows what its principal may see, marks what it writes as theirs, and keeps to
    their limits.
    """

    def __init__(self, *, store: AccessStore, principal: Principal, settings: Settings) -> None:
        self._store = store
        self._principal = principal
        self._settings = settings

    def create_search(self, *, query: JsonObject, **options: Any) -> SearchRecord:
        """Queue a search as the principal's. Under a ceiling, a missing budget of GPU-seconds is
        filled in.

        Raises InputError `launcher_mismatch` where no live worker could run it,
        `gpu_seconds_ceiling` for a budget above the ceiling, LimitError where today's quota is used
        up, and HpToolError `forbidden` for an administrator's priority.
        """
        principal = self._principal
        if options.get("priority", 0) > 0 and principal.scope < Scope.ADMIN:
            raise HpToolError("only administrators may give a priority above 0", code="forbidden")
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
        """Raises InputError `gpu_seconds_ceiling` above a search's ceiling, LimitError where
        today's quota is used up.
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
            raise NotFoundError(f"no search {search_id!r}", field="search_id")
        return record

    def add_measurement(self, *, measurement: NewMeasurement, **options: Any) -> MeasurementRecord:
        """Store it as the principal's; it teaches others where they trust its reporter."""
        everybody = (
            self._settings.trusted_reports == "everybody" or self._principal.scope >= Scope.ADMIN
        )
        own = replace(measurement, owner=self._principal.owner, trusted=everybody)
        return self._store.add_measurement(measurement=own, **options)

    def earlier_measurement(self, **sent: Any) -> MeasurementRecord | None:
        return self._store.earlier_measurement(owner=self._principal.owner, **sent)

    def get_measurement(self, *, measurement_id: str) -> MeasurementRecord:
        record = self._store.get_measurement(measurement_id=measurement_id)
        if not self._may_see(record.owner):
            raise NotFoundError(f"no measurement {measurement_id!r}", field="measurement_id")
        return record

    def set_measurement_state(
        self, *, measurement_id: str, state: MeasurementState
    ) -> MeasurementRecord:
        """Change a measurement's state. Who accepts one vouches for it: an administrator for
        everybody, an owner for their own answers.
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
            raise NotFoundError(f"no watched job {watch_id!r}", field="watch_id")
        return record

    def change_watch(self, *, watch_id: str, **change: Any) -> WatchRecord:
        """Raises ConflictError `too_many` where the owner's jobs have all the processes that they
        may have.
        """
        most = self._settings.max_watch_processes
        return self._store.change_watch(
            watch_id=self.get_watch(watch_id=watch_id).id, max_processes=most, **change
        )

    def list_calibrations(self, **which: Any) -> Page[CalibrationRecord]:
        """A page of everybody's calibrations and the principal's own; administrators get all."""
        owners = None if self._principal.scope >= Scope.ADMIN else ("", self._principal.owner or "")
        return self._store.list_calibrations(owners=owners, **which)

    def put_registration(
        self, *, owner: str | None = None, **registration: Any
    ) -> RegistrationRecord:
        """Register as `owner`'s; None: everybody's. Only administrators may register for anyone but
        themselves.
        """
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
        """Every other method, restricted by its parameters to one's own data or search; the rest is
        for administrators.
        """
        method = getattr(self._store, name)
        takes = _parameters(getattr(type(self._store), name))
        if name not in READING and (self._principal.scope >= Scope.ADMIN or name in SHARED):
            return method
        if "owner" in takes:
            return lambda **arguments: method(**arguments | {"owner": self._principal.owner})
        if "watch_id" in takes:
            return lambda *, watch_id, **arguments: method(
                watch_id=self.get_watch(watch_id=watch_id).id, **arguments
            )
        if "search_id" in takes:
            return lambda *, search_id, **arguments: getattr(self._of(search_id, name), name)(
                search_id=search_id, **arguments
            )
        raise HpToolError(f"{name} needs a key of scope admin", code="forbidden")

    def _of(self, search_id: str, method: str) -> AccessStore:
        """The store that has this search, which the principal may see."""
        if search_id == SAMPLE:
            if method not in READING:
                raise ConflictError(
                    "the sample cannot be changed; run it again as a search of your own"
                )
            return sample_store()
        if self._principal.scope < Scope.ADMIN:
            self.get_search(search_id=search_id)
        return self._store

    def _registrant(self, owner: str | None) -> str | None:
        if not self._may_see(owner):
            raise HpToolError(
                "what is everybody's or another's is for keys of scope admin", code="forbidden"
            )
        return owner

    def _may_see(self, owner: str | None) -> bool:
        return self._principal.scope >= Scope.ADMIN or owner == self._principal.owner

    def _limits(self) -> tuple[GpuSecondsLimit, ...]:
        """Today's quotas: the service's, and the key's."""
        key = self._principal.key
        limits = []
        if self._settings.max_gpu_seconds_per_day is not None:
            limits.append(GpuSecondsLimit(per_day=self._settings.max_gpu_seconds_per_day))
        if key is not None and key.gpu_seconds_per_day is not None:
            limits.append(GpuSecondsLimit(per_day=key.gpu_seconds_per_day, api_key_id=key.id))
        return tuple(limits)

    def _ceiling(self) -> float | None:
        """The largest budget of one search."""
        bounds = [limit.per_day for limit in self._limits()]
        if self._settings.max_gpu_seconds_per_search is not None:
            bounds.append(self._settings.max_gpu_seconds_per_search)
        return min(bounds, default=None)


@cache
def _parameters(method: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(method).parameters)
