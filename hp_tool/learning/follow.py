"""Calibrations that follow what trainings report: made between searches by a worker, never while a request waits."""

from __future__ import annotations

from hp_tool.domain.ports import Store
from hp_tool.domain.records import MeasuredCluster
from hp_tool.learning.make import MadeCalibration, calibrate_cluster


class Follower:
    """Keeps calibrations up with measurements. Several may follow one store: who comes later finds nothing left to do."""

    def __init__(self, *, store: Store) -> None:
        self._store = store
        self._seen: str | None = None
        """The newest measurement when it last looked."""

    def catch_up(self) -> tuple[MadeCalibration, ...]:
        """Calibrate every cluster and framework that was measured since its newest calibration; the versions that are new."""
        newest = self._store.measurements(limit=1).items
        if not newest or newest[0].id == self._seen:
            return ()
        made = [
            each
            for cluster in self._store.measured_clusters()
            if self._behind(cluster)
            for each in calibrate_cluster(store=self._store, cluster=cluster)
        ]
        self._seen = newest[0].id
        return tuple(each for each in made if each.new)

    def _behind(self, cluster: MeasuredCluster) -> bool:
        key, framework = cluster.cluster_key, cluster.framework
        measured = self._store.measurements(cluster_key=key, framework=framework, limit=1).items
        known = self._store.list_calibrations(cluster_key=key, framework=framework, limit=1).items
        return bool(measured) and (not known or known[0].created_at < measured[0].created_at)
