"""Earlier measurements that may stand for runs of a search."""

from __future__ import annotations

from hp_tool.domain.ports import Store
from hp_tool.learning.evidence import MAX_MEASUREMENTS
from hp_tool.search.problem import Question


def reusable_measurements(*, store: Store, problem: Question) -> dict[str, str]:
    """Measurement id by configuration digest: whole runs of this very problem that may stand for new ones, newest first."""
    page = store.measurements(
        cluster_key=problem.cluster_key, problem_digest=problem.problem_digest, source="profile", limit=MAX_MEASUREMENTS
    )
    usable = (
        record for record in page.items if record.measurement.fidelity.is_whole and record.measurement.status in ("ok", "oom")
    )
    found: dict[str, str] = {}
    for record in usable:
        row = problem.row(record.parallel)
        if row is not None:
            found.setdefault(problem.digest(row), record.id)
    return found
