"""What earlier measurements teach a search, and which of them may stand for its runs."""

from __future__ import annotations

from hp_tool.calibration import Evidence
from hp_tool.domain.ports import Store
from hp_tool.learning.evidence import MAX_MEASUREMENTS, stored_evidence
from hp_tool.search.problem import Question
from hp_tool.tuning.problem import TuningProblem
from hp_tool.tuning.serving import ServingTuning
from hp_tool.tuning.serving_evidence import stored_lessons


def earlier_evidence(store: Store, problem: TuningProblem | ServingTuning, *, without_search: str | None = None) -> Evidence:
    """What stored runs like these taught."""
    if isinstance(problem, ServingTuning):
        return stored_lessons(store=store, series=problem.series, without_search=without_search).round
    return stored_evidence(store=store, series=problem.series, without_search=without_search)


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
