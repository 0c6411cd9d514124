"""Read the stored result of a search."""

from typing import Any

from hp_tool.domain.records import SearchRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, RunConfig, ServingRecommendation
from hp_tool.questions import schema
from hp_tool.store.columns import decode_configuration


def search_answer(record: SearchRecord) -> dict[str, Any]:
    """Return the answer of a search that has ended: its result, or why there is none."""
    if record.result is not None:
        return record.result
    error = record.error or {
        "code": str(record.state),
        "message": f"the search was {record.state}",
        "field": None,
    }
    return {
        "id": record.query.get("id"),
        "status": "error",
        "error": error,
        "search": {
            "id": record.id,
            "state": str(record.state),
            "stopped_because": record.stopped_because,
        },
    }


def first_recommendation(record: SearchRecord) -> Recommendation | ServingRecommendation | None:
    """Return the first row of a search's result; None without a result."""
    rows = (record.result or {}).get("recommendations")
    if not rows:
        return None
    kind = ServingRecommendation if "max_num_seqs" in rows[0]["parallel"] else Recommendation
    row: Recommendation | ServingRecommendation = schema.adapter(kind).validate_python(rows[0])
    return row


def complete_rows(record: SearchRecord) -> list[Recommendation | ServingRecommendation]:
    """Return the result rows of a search that have a complete calibrated estimate."""
    rows = (record.result or {}).get("recommendations", ())
    kinds = (
        ServingRecommendation if "max_num_seqs" in row["parallel"] else Recommendation
        for row in rows
    )
    parsed = [
        schema.adapter(kind).validate_python(row) for kind, row in zip(kinds, rows, strict=True)
    ]
    return [
        row
        for row in parsed
        if row.calibrated_estimate is not None and row.calibrated_estimate.memory is not None
    ]


def complete_estimates(record: SearchRecord) -> dict[RunConfig, Estimate | InferenceEstimate]:
    """Return the complete calibrated estimates in a search's result, by configuration."""
    return {
        row.parallel: estimate
        for row in complete_rows(record)
        if (estimate := row.calibrated_estimate) is not None
    }


def calibrated_predictions(record: SearchRecord) -> dict[RunConfig, dict[str, Any]]:
    """Return the calibrated predictions in a search's result, by configuration."""
    return {
        decode_configuration(row["parallel"]): _prediction(row["calibrated_estimate"])
        for row in (record.result or {}).get("recommendations", ())
        if row.get("calibrated_estimate")
    }


def _prediction(estimate: dict[str, Any]) -> dict[str, Any]:
    memory, intervals = estimate.get("memory") or {}, estimate.get("intervals") or {}
    return {
        "step_s": (estimate.get("time") or {}).get("step_s") or estimate.get("request_latency_s"),
        "step_s_interval": intervals.get("step_s"),
        "tokens_per_second_per_gpu": estimate.get("tokens_per_second_per_gpu")
        or estimate.get("output_tokens_per_second_per_gpu"),
        "memory_bytes": memory.get("total_bytes"),
    }
