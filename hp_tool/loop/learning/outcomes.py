"""Configurations that crashed or ran successfully, as recorded in a stored calibration."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.digests import strategy_digest
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import JsonObject
from hp_tool.loop.assumptions import assumed
from hp_tool.questions.training.problem import TrainingProblem

Group = tuple[TrainingProblem, Sequence[MeasurementRecord]]
"""A problem with its stored measurements."""


def find_crashes(groups: Iterable[Group]) -> JsonObject:
    """Return the configurations that crashed and never succeeded, by problem.

    Only complete runs count. A configuration must have crashed at least `Learning.crashes` times.
    """
    found: JsonObject = {}
    for problem, layout, same in _configurations(groups):
        outcomes = [record.measurement.status for record in same]
        crashed = outcomes.count("crashed")
        if crashed >= assumed().learning.crashes and "ok" not in outcomes:
            found.setdefault(problem, []).append({"runs": crashed, **layout})
    return found


def find_successes(groups: Iterable[Group]) -> JsonObject:
    """Return the configurations with successful complete runs, by problem.

    Each entry has the number of these runs and their median step time in seconds.
    """
    found: JsonObject = {}
    for problem, layout, same in _configurations(groups):
        steps_s = [
            record.measurement.step_s
            for record in same
            if record.measurement.status == "ok" and record.measurement.step_s is not None
        ]
        if steps_s:
            figures = {"runs": len(steps_s), "step_s": statistics.median(steps_s)}
            found.setdefault(problem, []).append({**figures, **layout})
    return found


def _configurations(
    groups: Iterable[Group],
) -> Iterator[tuple[str, JsonObject, list[MeasurementRecord]]]:
    """Yield the complete runs of each configuration of each problem, in the order of their digests.

    The second value identifies the configuration among the problem's candidates.
    """
    runs: dict[tuple[str, str, str], list[MeasurementRecord]] = {}
    for problem, records in groups:
        strategy = strategy_digest(problem.strategy)
        for record in records:
            if record.problem_digest and record.measurement.fidelity.is_whole:
                key = record.problem_digest, record.digest, strategy
                runs.setdefault(key, []).append(record)
    for (problem_digest, _, strategy), same in sorted(runs.items(), key=lambda item: item[0]):
        config = same[0].parallel
        if isinstance(config, ParallelConfig):
            row = Candidates.alone(config)
            columns = {each.name: int(getattr(row, each.name)) for each in fields(row)}
            yield problem_digest, {"strategy": strategy, "columns": columns}, same
