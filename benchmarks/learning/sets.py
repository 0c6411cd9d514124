"""Published runs, grouped into sets of one GPU and framework, as evidence for calibrations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.grid_rows import grid_rows, groups
from benchmarks.accuracy.runs import (
    b200_cases,
    bloom_cases,
    internevo_cases,
    mlperf_cases,
    mpt_cases,
    mpt_h100_cases,
    release_cases,
    titan_cases,
)
from evidence.cases import Case
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.cost.uncertainty import step_log_sd, unmeasured_features
from hp_tool.loop.calibration import Evidence, allocated_bytes, layer_passes, residual_features
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem

MIN_ROWS = 14
"""Minimum number of runs in a set; the smallest set has 14."""
CARDS = {
    "a100-sxm-40gb": "A100-40",
    "a100-sxm-80gb": "A100-80",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "b200-sxm-180gb": "B200",
    "gb200-nvl72": "GB200",
}


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """n timed runs that one calibration may learn from, with their predictions."""

    name: str
    evidence: Evidence
    uncalibrated_log_sd: NDArray[np.float64]
    """(n,) standard deviation of ln(step time) that the cost model states."""
    labels: dict[str, NDArray[np.object_]]
    """(n,) properties of the runs, between whose values calibrations are transferred: model,
    precision and task as names; size, length and devices as numbers.
    """
    cell: NDArray[np.object_]
    """(n,) key that runs share if they differ only in their layout."""

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def predicted_s(self) -> NDArray[np.float64]:
        """Return the uncalibrated step times in seconds, shape (n,)."""
        return np.sum(list(self.evidence.parts_s.values()), axis=0)


def run_sets(folder: Path) -> list[RunSet]:
    """Return every set of at least MIN_ROWS runs."""
    released, audited = release_cases(folder), mlperf_cases(folder)
    sources: dict[str, Iterable[Case]] = {
        "MPT": [*mpt_cases(folder), *mpt_h100_cases(folder)],
        "torchtitan": titan_cases(folder)[0],
        "Recipes": [case for case in released if not case.has_experts],
        "Experts": [case for case in released if case.has_experts],
        "MLPerf pre-training": [case for case in audited if case.task == "pretrain"],
        "MLPerf LoRA": [case for case in audited if case.task == "lora"],
        "Megatron": [
            case
            for case in (*released, *audited)
            if not case.has_experts and case.card != "h200-sxm-141gb"
        ],
        "Cut models": b200_cases(folder),
        "BLOOM": bloom_cases(folder),
        "InternEvo": internevo_cases(folder),
    }
    sets = [
        build_set(
            f"{source} {CARDS.get(card, card)}", [case for case in cases if case.card == card]
        )
        for source, cases in sources.items()
        for card in dict.fromkeys(case.card for case in cases)
        if sum(case.card == card for case in cases) >= MIN_ROWS
    ]
    return sets + _nanotron(folder)


def build_set(name: str, cases: Sequence[Case]) -> RunSet:
    """Return a set of the given cases."""
    pieces, doubts, labels, cells = [], [], [], []
    for number, case in enumerate(cases):
        resolved = resolve_configuration(case.query)
        problem, config = resolved.problem, resolved.config
        candidates = Candidates.from_configs([config])
        pieces.append(_evidence(f"{name} {number}", problem, candidates, np.array([case.step_s])))
        doubts.append(
            step_log_sd(
                case=problem,
                unmeasured=len(
                    unmeasured_features(case=problem, candidate=Candidates.alone(config))
                ),
            )
        )
        labels.append(_labels(problem, name=case.name))
        cells.append(
            (case.name, case.date, *labels[-1].values(), problem.workload.global_batch_size)
        )
    return _run_set(name, pieces, doubts, labels, cells)


def _nanotron(folder: Path) -> list[RunSet]:
    """Return the successful runs of nanotron's grid, one set per model."""
    sets = []
    rows = [row for row in grid_rows(folder) if row["status"] == "ok"]
    for model in sorted({row["model"] for row in rows}):
        pieces, doubts, labels, cells = [], [], [], []
        for group in groups(row for row in rows if row["model"] == model):
            case = TrainingCase(
                model=group.model,
                cluster=group.cluster,
                workload=group.workload,
                profile=efficiency_profile(gpu=group.cluster.gpu, framework="nanotron"),
            )
            pieces.append(_evidence(f"{model} {len(pieces)}", case, group.candidates, group.step_s))
            count = len(group.rows)
            doubts += [step_log_sd(case=case)] * count
            labels += [_labels(case, name=f"{model} {group.model.kv_heads}")] * count
            cells += [
                (
                    model,
                    group.model.kv_heads,
                    group.cluster.num_gpus,
                    group.workload.global_batch_size,
                )
            ] * count
        sets.append(_run_set(f"nanotron {model}", pieces, doubts, labels, cells))
    return sets


def _evidence(
    name: str, case: TrainingCase, candidates: Candidates, step_s: NDArray[np.float64]
) -> Evidence:
    costs = _costs(case)(candidates)
    rows, unknown = len(step_s), np.full(len(step_s), np.nan)
    return Evidence(
        measurement_ids=tuple(f"{name} {row}" for row in range(rows)),
        parts_s={part: np.broadcast_to(seconds, rows) for part, seconds in costs.parts.items()},
        layer_passes=layer_passes(case=case, candidates=candidates),
        memory_bytes=np.broadcast_to(allocated_bytes(costs), rows),
        capacity_bytes=np.full(rows, float(case.cluster.gpu.memory_bytes)),
        measured_step_s=step_s,
        measured_memory_bytes=unknown,
        out_of_memory=np.zeros(rows, dtype=bool),
        features=residual_features(case=case, candidates=candidates),
    )


def _costs(case: TrainingCase) -> Callable[[Candidates], TrainingCosts]:
    if isinstance(case, TrainingProblem):
        return case.costs
    return lambda candidates: training_costs(case=case, candidates=candidates)


def _labels(case: TrainingCase, *, name: str) -> dict[str, object]:
    model, workload = case.model, case.workload
    return {
        "model": name,
        "size": math.log2(model.hidden_size**2 * model.num_hidden_layers),
        "length": workload.sequence_length,
        "devices": case.cluster.num_gpus,
        "precision": workload.precision,
        "task": workload.task,
    }


def _run_set(
    name: str,
    pieces: Sequence[Evidence],
    doubts: Sequence[float],
    labels: Sequence[dict[str, object]],
    cells: Sequence[object],
) -> RunSet:
    def column(values: Iterable[object]) -> NDArray[np.object_]:
        listed = list(values)
        array = np.empty(len(listed), dtype=object)
        array[:] = listed
        return array

    return RunSet(
        name=name,
        evidence=Evidence.concatenate(pieces),
        uncalibrated_log_sd=np.array(doubts),
        labels={each: column(row[each] for row in labels) for each in labels[0]},
        cell=column(repr(cell) for cell in cells),
    )
