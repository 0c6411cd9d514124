"""The table of deployments of a search, its evidence, and calibrated TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import legality
from hp_tool.domain.measurement_records import MeasurementRecord
from hp_tool.domain.ports import Store
from hp_tool.domain.serving import RunConfig, ServingConfig
from hp_tool.loop.calibration import Calibration, Evidence, Prior, StepPrediction, fit_calibration
from hp_tool.loop.learning.evidence import group_by_problem, newest_measurements
from hp_tool.loop.learning.series import Series
from hp_tool.loop.search.serving import penalty
from hp_tool.loop.search.table import CandidateTable
from hp_tool.questions.serving.estimates import bounded_values
from hp_tool.questions.serving.problem import CostedRows, ServingProblem, resolve_serving


def serving_candidates(
    problem: ServingProblem, configs: Sequence[ServingConfig]
) -> ServingCandidates:
    """Return the deployments for the problem's load."""
    return ServingCandidates.from_configs(
        configs, concurrency=[problem.concurrency or 1] * len(configs)
    )


def legality_codes(problem: ServingProblem, candidates: ServingCandidates) -> IntArray:
    """Return the code of the rule that each deployment violates, shape (n,); 0 if it is legal."""
    return legality(
        model=problem.model,
        num_gpus=problem.cluster.num_gpus,
        candidates=candidates,
        longest_request=problem.longest_request,
    )


def serving_table(rows: CostedRows) -> CandidateTable:
    """Return the cost model's predictions of deployments.

    They are the parts of the penalised latency in seconds, and memory.
    """
    problem, candidates, costs = rows.problem, rows.candidates, rows.costs
    parts = {
        **costs.parts,
        "beyond_targets": costs.request_latency_s * penalty(bounded_values(rows)),
    }
    memory = costs.bytes
    per_replica = np.maximum(in_flight_of(rows) / candidates.schedulers, 1.0)
    passes = problem.output_length + np.ceil(
        costs.running * problem.input_length / candidates.max_num_batched_tokens
    )
    occupied = memory.capacity - memory.kv_capacity
    occupied = (
        occupied
        + costs.running * (problem.input_length + problem.output_length) * memory.kv_per_token
    )
    return CandidateTable(
        axes={
            "tensor_parallel_size": tuple(candidates.tensor_parallel_size.tolist()),
            "max_num_seqs": tuple(candidates.max_num_seqs.tolist()),
        },
        parts_s=parts,
        layer_passes=per_replica / costs.running * passes * problem.model.num_hidden_layers,
        memory_bytes=occupied - memory.overhead,
        usable_bytes=memory.capacity - memory.overhead,
        device_bytes=problem.cluster.gpu.memory_bytes - memory.overhead,
        features=_features(problem, candidates),
    )


def in_flight_of(rows: CostedRows) -> FloatArray:
    """Return the number of requests in flight over all devices, shape (n,).

    For a closed load it is given; for a request rate, it follows from Little's law.
    """
    return (
        rows.candidates.concurrency.astype(np.float64) if rows.in_flight is None else rows.in_flight
    )


def _features(problem: ServingProblem, candidates: ServingCandidates) -> dict[str, Any]:
    """Return the features for the residual model.

    Quantities that training also has use the same names and scales.
    """
    same = np.ones(len(candidates))
    return {
        "tensor_parallel": np.log2(candidates.tensor_parallel_size),
        "micro_batch": np.log2(candidates.max_num_seqs),
        "devices": same * np.log2(problem.cluster.num_gpus),
        "hidden_size": same * np.log2(problem.model.hidden_size),
        "layers": same * np.log2(problem.model.num_hidden_layers),
    }


@dataclass(frozen=True, slots=True)
class ServingEvidence:
    """Evidence from search runs: the penalised latency, TTFT and TPOT."""

    objective: Evidence
    ttft: Evidence
    tpot: Evidence


def serving_evidence(
    *, store: Store, series: Series, without_search: str | None = None
) -> ServingEvidence:
    """Return the newest runs of a series with new predictions, for all models and loads.

    Runs that cannot be predicted are skipped.
    """
    records = newest_measurements(
        store,
        cluster_key=series.cluster_key,
        framework=series.framework,
        owner=series.owner,
        without_search=without_search,
    )
    parts = [
        _evidence_of(same, problem=problem)
        for problem, same in group_by_problem(records, resolve=resolve_serving)
    ]
    columns = (
        Evidence.concatenate([getattr(part, f.name) for part in parts])
        for f in fields(ServingEvidence)
    )
    return ServingEvidence(*columns)


def _evidence_of(
    records: Sequence[MeasurementRecord], *, problem: ServingProblem
) -> ServingEvidence:
    """Return the evidence from one problem's runs. Repeated runs of a configuration are one row."""
    configs = list(
        dict.fromkeys(
            record.parallel for record in records if isinstance(record.parallel, ServingConfig)
        )
    )
    candidates = serving_candidates(problem, configs)
    costed = problem.cost_candidates(candidates)
    costs = costed.costs
    row_of: dict[RunConfig, int] = {config: row for row, config in enumerate(configs)}
    rows = np.array([row_of[record.parallel] for record in records], dtype=np.intp)
    outcomes = [record.measurement for record in records]
    evidence = serving_table(costed).evidence(
        rows=rows,
        measurement_ids=tuple(record.id for record in records),
        step_s=np.array([outcome.objective_s for outcome in outcomes], dtype=np.float64),
        memory_bytes=np.array(
            [outcome.peak_memory_bytes for outcome in outcomes], dtype=np.float64
        ),
        out_of_memory=np.array([outcome.status == "oom" for outcome in outcomes], dtype=np.bool_),
    )

    def of(predicted: FloatArray, name: str) -> Evidence:
        measured = np.array(
            [
                np.nan if outcome.load is None else getattr(outcome.load, name)
                for outcome in outcomes
            ]
        )
        return replace(
            evidence,
            parts_s={name: predicted[rows]},
            measured_step_s=np.where(measured > 0.0, measured, np.nan),
        )

    return ServingEvidence(
        objective=evidence, ttft=of(costs.ttft_s, "ttft_s"), tpot=of(costs.tpot_s, "tpot_s")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCalibration:
    """Corrections of TTFT and TPOT, fitted to runs."""

    ttft: Calibration
    tpot: Calibration

    @classmethod
    def fitted(cls, evidence: ServingEvidence, *, prior: Prior) -> LatencyCalibration:
        return cls(
            ttft=fit_calibration(evidence=evidence.ttft, prior=prior),
            tpot=fit_calibration(evidence=evidence.tpot, prior=prior),
        )

    def predict(
        self, table: CandidateTable, costs: ServingCosts
    ) -> tuple[StepPrediction, StepPrediction]:
        """Return (TTFT, TPOT) for all rows of the table."""
        passes, features = table.layer_passes, table.features
        return (
            self.ttft.step_time.predict(
                parts_s={"ttft_s": costs.ttft_s}, layer_passes=passes, features=features
            ),
            self.tpot.step_time.predict(
                parts_s={"tpot_s": costs.tpot_s}, layer_passes=passes, features=features
            ),
        )
