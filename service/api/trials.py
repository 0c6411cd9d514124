"""Trials: the runs of a search with what was predicted before, what is predicted after calibration, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_tool.domain.records import RunRecord, SearchRecord
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import Configuration, ServingRecommendation
from hp_tool.queries import schema
from hp_tool.store.codec import decode_configuration
from service.api.views import TrialView


def trials_of(record: SearchRecord, runs: Sequence[RunRecord]) -> list[TrialView]:
    """One view per run, in order of intent. Calibrated predictions are the result's: they appear when the search has ended."""
    calibrated = calibrated_predictions(record)
    return [TrialView.of(run, calibrated=calibrated.get(run.parallel)) for run in runs]


def calibrated_predictions(record: SearchRecord) -> dict[Configuration, dict[str, Any]]:
    """What the result of a search predicts of its configurations, after all that was learnt."""
    return {
        decode_configuration(row["parallel"]): _prediction(row["calibrated_estimate"])
        for row in (record.result or {}).get("recommendations", ())
        if row.get("calibrated_estimate")
    }


def recommended(record: SearchRecord) -> Recommendation | ServingRecommendation | None:
    """The first row of a search's result; None where there is none (yet)."""
    rows = (record.result or {}).get("recommendations")
    if not rows:
        return None
    kind = ServingRecommendation if "max_num_seqs" in rows[0]["parallel"] else Recommendation
    row: Recommendation | ServingRecommendation = schema.adapter(kind).validate_python(rows[0])
    return row


def _prediction(estimate: dict[str, Any]) -> dict[str, Any]:
    """The figures of an estimate that a run is compared by."""
    memory, intervals = estimate.get("memory") or {}, estimate.get("intervals") or {}
    return {
        "step_s": (estimate.get("time") or {}).get("step_s") or estimate.get("request_latency_s"),
        "step_s_interval": intervals.get("step_s"),
        "tokens_per_second_per_gpu": estimate.get("tokens_per_second_per_gpu")
        or estimate.get("output_tokens_per_second_per_gpu"),
        "memory_bytes": memory.get("total_bytes"),
    }
