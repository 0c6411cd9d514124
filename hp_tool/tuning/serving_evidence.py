"""What inference runs teach: the latencies they showed beside today's predictions for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_tool.calibration import Calibration, Evidence, Prior, StepPrediction, fit_calibration
from hp_tool.calibration.evidence import FloatArray
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.digests import json_digest
from hp_tool.domain.ports import Store
from hp_tool.domain.records import MeasurementRecord
from hp_tool.errors import HpToolError
from hp_tool.learning.evidence import MAX_MEASUREMENTS, teaching
from hp_tool.learning.series import Series
from hp_tool.queries.schema import parse_query
from hp_tool.search.serving import Load, observed
from hp_tool.search.table import CandidateTable
from hp_tool.serving.problem import resolve_serving
from hp_tool.tuning.serving import batched_tokens, load_of, serving_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The same runs by what they showed: a round of the load, and the two latencies it is made of."""

    round: Evidence
    ttft: Evidence
    tpot: Evidence

    @staticmethod
    def together(parts: Sequence[Lessons]) -> Lessons:
        """All of them; of none, nothing."""
        return Lessons(
            round=Evidence.concatenate([part.round for part in parts]),
            ttft=Evidence.concatenate([part.ttft for part in parts]),
            tpot=Evidence.concatenate([part.tpot for part in parts]),
        )


def stored_lessons(*, store: Store, series: Series, without_search: str | None = None) -> Lessons:
    """The newest runs of a series, of whatever model and load, predicted again; one that can no longer be is passed over."""
    page = store.measurements(cluster_key=series.cluster_key, framework=series.framework, limit=MAX_MEASUREMENTS)
    by_query: dict[str, list[MeasurementRecord]] = {}
    for record in teaching(page.items):
        if without_search is None or record.search_id != without_search:
            by_query.setdefault(json_digest(record.query), []).append(record)
    found = []
    for records in by_query.values():
        try:
            query = parse_query(records[0].query)
            problem = resolve_serving(query)
        except HpToolError:
            continue
        configs = list(dict.fromkeys(record.parallel for record in records))
        table, costs = serving_table(problem, configs, max_num_batched_tokens=batched_tokens(query, problem))
        rows = np.array([configs.index(record.parallel) for record in records], dtype=np.intp)
        found.append(_lessons(table, costs, records, rows=rows, load=load_of(problem)))
    return Lessons.together(found)


def _lessons(
    table: CandidateTable,
    costs: ServingCosts,
    records: Sequence[MeasurementRecord],
    *,
    rows: NDArray[np.intp],
    load: Load,
) -> Lessons:
    """`rows`: the table's row of each record; a configuration that ran twice is one row."""
    outcomes = [record.measurement for record in records]
    latencies = [
        observed(outcome.serving, record.parallel, load=load)
        if outcome.status == "ok" and outcome.serving is not None
        else None
        for record, outcome in zip(records, outcomes, strict=True)
    ]
    evidence = table.evidence(
        rows=rows,
        measurement_ids=tuple(record.id for record in records),
        step_s=np.array([_number(outcome.step_s) for outcome in outcomes]),
        memory_bytes=np.array([_number(outcome.peak_memory_bytes) for outcome in outcomes]),
        out_of_memory=np.array([outcome.status == "oom" for outcome in outcomes], dtype=np.bool_),
    )

    def of(predicted: FloatArray, name: str) -> Evidence:
        measured = np.array([np.nan if one is None else getattr(one, name) for one in latencies])
        return replace(evidence, parts_s={name: predicted[rows]}, measured_step_s=np.where(measured > 0.0, measured, np.nan))

    return Lessons(round=evidence, ttft=of(costs.ttft_s, "ttft_s"), tpot=of(costs.tpot_s, "tpot_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCalibration:
    """Both latencies as runs correct them."""

    ttft: Calibration
    tpot: Calibration

    @classmethod
    def fitted(cls, lessons: Lessons, *, prior: Prior) -> LatencyCalibration:
        return cls(
            ttft=fit_calibration(evidence=lessons.ttft, prior=prior), tpot=fit_calibration(evidence=lessons.tpot, prior=prior)
        )

    def predict(self, table: CandidateTable, costs: ServingCosts) -> tuple[StepPrediction, StepPrediction]:
        """(TTFT, TPOT) of all rows of the table."""
        passes, features = table.layer_passes, table.features
        return (
            self.ttft.predict_step(parts_s={"ttft_s": costs.ttft_s}, layer_passes=passes, features=features),
            self.tpot.predict_step(parts_s={"tpot_s": costs.tpot_s}, layer_passes=passes, features=features),
        )


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
