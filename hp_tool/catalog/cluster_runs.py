"""How profile runs reach a cluster: `runs` of its entry in one's own catalogue.

Kept apart from what a query needs to know of the cluster. It names programs, folders and shell lines of the operator's, so it
comes from files alone, never from a query or a registration over HTTP.
"""

from __future__ import annotations

from hp_tool.catalog import library, records
from hp_tool.domain.hardware import ClusterQuery, ClusterRuns
from hp_tool.errors import InputError, NotFoundError

RUNS = "runs"
"""The key of an entry."""


def cluster_name(cluster: str | ClusterQuery) -> str | None:
    """The registered cluster that a query means, whole or in part; None where it describes one."""
    return cluster if isinstance(cluster, str) else cluster.node_type


def cluster_runs(cluster: str | ClusterQuery) -> ClusterRuns | None:
    """What its entry says; None where it says nothing, or there is none. Raises InputError for a mistake in it."""
    name = cluster_name(cluster)
    if name is None:
        return None
    try:
        entry = library.entry("clusters", name, field="cluster")
    except NotFoundError:
        return None
    if RUNS not in entry.fields:
        return None
    given = entry.fields[RUNS]
    if not isinstance(given, dict):
        raise InputError(f"{entry.path}: runs must be a mapping of launcher, options and limits", field="cluster.runs")
    found = records.build(ClusterRuns, given, field="cluster.runs", origin=entry.path)
    if found.launcher == "local" and found.options:
        raise InputError(f"{entry.path}: launcher local takes no options", field="cluster.runs.options")
    return found
