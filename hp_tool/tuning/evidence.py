"""Knowledge that a search starts from: stored measurements as its sampler's evidence, as runs it need not repeat, and as how
long jobs take to start; what lasts beyond a search is made by `learning`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hp_tool.calibration import Calibration, Evidence, Prior, StepPrediction, fit_calibration
from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.records import REUSED, JsonObject
from hp_tool.domain.serving import RunConfig, ServingConfig
from hp_tool.errors import HpToolError
from hp_tool.learning.evidence import MAX_MEASUREMENTS, newest, stored_evidence
from hp_tool.learning.series import Series
from hp_tool.queries.schema import parse_query
from hp_tool.search.account import seen_startup_s
from hp_tool.search.problem import Question
from hp_tool.search.table import CandidateTable
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.tuning.problem import TuningProblem
from hp_tool.tuning.serving import ServingTuning, serving_candidates, serving_table

STARTS = 20
"""Runs whose start-up is looked at."""


def earlier_evidence(
    store: Store, problem: TuningProblem | ServingTuning, *, without_search: str | None = None, owner: str = ""
) -> Evidence:
    """What stored runs like these taught everybody, and reports of `owner`'s them."""
    series = replace(problem.series, owner=owner)
    if isinstance(problem, ServingTuning):
        return serving_evidence(store=store, series=series, without_search=without_search).objective
    release = problem.training.workload.framework_version
    return stored_evidence(store=store, series=series, release=release, without_search=without_search)


def reusable_measurements(*, store: Store, problem: Question) -> dict[str, str]:
    """Measurement id by configuration digest: whole runs of this very problem that may stand for new ones, newest first."""
    page = store.measurements(
        cluster_key=problem.cluster_key,
        problem_digest=problem.problem_digest,
        source="profile",
        state="accepted",
        limit=MAX_MEASUREMENTS,
    )
    reusable: dict[str, str] = {}
    for record in page.items:
        row = problem.row(record.parallel)
        alike = _arrangement(record.query, parallel=record.parallel) == _arrangement(problem.query, parallel=record.parallel)
        if row is not None and alike and record.measurement.fidelity.is_whole and record.measurement.status in ("ok", "oom"):
            reusable.setdefault(problem.digest(row), record.id)
    return reusable


def _arrangement(query: JsonObject, *, parallel: RunConfig) -> tuple[Any, ...]:
    """What a run's digest leaves to its query: the contents of stages, and how ranks exchange a sequence that they split."""
    fixed = query.get("parallel") or {}
    layout = fixed.get("pipeline_layout")
    if not isinstance(parallel, ParallelConfig) or parallel.context_parallel_size == 1:
        return (layout,)
    levels, dynamic = fixed.get("hierarchical_context_parallel_sizes"), bool(fixed.get("dynamic_context_parallel"))
    return layout, fixed.get("context_parallel_communication") or "p2p", levels, dynamic


def known_startup_s(*, store: Store, problem: Question) -> float:
    """Median seconds from a job's start to its first step, of the newest runs on this cluster; an assumption without any."""
    page = store.measurements(cluster_key=problem.cluster_key, source="profile", status="ok", limit=STARTS)
    own = [record.measurement for record in page.items if REUSED not in record.predicted]
    seen = [each for one in own if (each := seen_startup_s(one, settings=problem.settings)) is not None]
    return statistics.median(seen) if seen else problem.assumed_startup_s


@dataclass(frozen=True, slots=True)
class ServingEvidence:
    """What a search's runs showed: the penalised latency, and the two latencies it is made of."""

    objective: Evidence
    ttft: Evidence
    tpot: Evidence


def serving_evidence(*, store: Store, series: Series, without_search: str | None = None) -> ServingEvidence:
    """The newest runs of a series, of whatever model and load, predicted again; one that can no longer be is passed over."""
    by_query: dict[str, list[MeasurementRecord]] = {}
    for record in newest(store, cluster_key=series.cluster_key, framework=series.framework, owner=series.owner):
        counts = without_search is None or record.search_id != without_search
        if counts and isinstance(record.parallel, ServingConfig):
            by_query.setdefault(json_digest(record.query), []).append(record)
    parts = []
    for records in by_query.values():
        try:
            problem = resolve_serving(parse_query(records[0].query))
        except HpToolError:
            continue
        parts.append(_evidence_of(records, problem=problem))
    columns = (Evidence.concatenate([getattr(part, f.name) for part in parts]) for f in fields(ServingEvidence))
    return ServingEvidence(*columns)


def _evidence_of(records: Sequence[MeasurementRecord], *, problem: ServingProblem) -> ServingEvidence:
    """Return what runs of one problem showed; a configuration that ran twice is one row of the table."""
    configs = list(dict.fromkeys(record.parallel for record in records if isinstance(record.parallel, ServingConfig)))
    candidates = serving_candidates(problem, configs)
    costed = problem.costed(candidates)
    costs = costed.costs
    row_of: dict[RunConfig, int] = {config: row for row, config in enumerate(configs)}
    rows = np.array([row_of[record.parallel] for record in records], dtype=np.intp)
    outcomes = [record.measurement for record in records]
    evidence = serving_table(costed).evidence(
        rows=rows,
        measurement_ids=tuple(record.id for record in records),
        step_s=np.array([outcome.objective_s for outcome in outcomes], dtype=np.float64),
        memory_bytes=np.array([outcome.peak_memory_bytes for outcome in outcomes], dtype=np.float64),
        out_of_memory=np.array([outcome.status == "oom" for outcome in outcomes], dtype=np.bool_),
    )

    def of(predicted: FloatArray, name: str) -> Evidence:
        measured = np.array([np.nan if outcome.load is None else getattr(outcome.load, name) for outcome in outcomes])
        return replace(evidence, parts_s={name: predicted[rows]}, measured_step_s=np.where(measured > 0.0, measured, np.nan))

    return ServingEvidence(objective=evidence, ttft=of(costs.ttft_s, "ttft_s"), tpot=of(costs.tpot_s, "tpot_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCalibration:
    """Both latencies as runs correct them."""

    ttft: Calibration
    tpot: Calibration

    @classmethod
    def fitted(cls, evidence: ServingEvidence, *, prior: Prior) -> LatencyCalibration:
        return cls(
            ttft=fit_calibration(evidence=evidence.ttft, prior=prior), tpot=fit_calibration(evidence=evidence.tpot, prior=prior)
        )

    def predict(self, table: CandidateTable, costs: ServingCosts) -> tuple[StepPrediction, StepPrediction]:
        """(TTFT, TPOT) of all rows of the table."""
        passes, features = table.layer_passes, table.features
        return (
            self.ttft.step_time.predict(parts_s={"ttft_s": costs.ttft_s}, layer_passes=passes, features=features),
            self.tpot.step_time.predict(parts_s={"tpot_s": costs.tpot_s}, layer_passes=passes, features=features),
        )
