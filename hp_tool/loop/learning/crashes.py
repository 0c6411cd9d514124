"""Configurations that crashed, as recorded in a stored calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import JsonObject
from hp_tool.loop.assumptions import assumed


def crashes(records: Iterable[MeasurementRecord]) -> JsonObject:
    """Return, by problem, the configurations that crashed and never succeeded.

    Only whole runs count, at least `Learning.crashes` of them.
    """
    runs: dict[tuple[str, str], list[MeasurementRecord]] = {}
    for record in records:
        if record.problem_digest and record.measurement.fidelity.is_whole:
            runs.setdefault((record.problem_digest, record.digest), []).append(record)
    by_problem: JsonObject = {}
    enough = assumed().learning.crashes
    for (problem, _), same in sorted(runs.items()):
        outcomes, config = [record.measurement.status for record in same], same[0].parallel
        if (
            outcomes.count("crashed") >= enough
            and "ok" not in outcomes
            and isinstance(config, ParallelConfig)
        ):
            row = Candidates.alone(config)
            columns = {each.name: int(getattr(row, each.name)) for each in fields(row)}
            by_problem.setdefault(problem, []).append(
                {"runs": outcomes.count("crashed"), "columns": columns}
            )
    return by_problem
