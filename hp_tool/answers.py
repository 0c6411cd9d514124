"""From a query to the object that answers it: the same for a command, a batch line and a request body."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hp_tool import app, schema, serving
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation, SpaceSummary
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.errors import HpToolError

log = logging.getLogger(__name__)

Task = Literal["estimate", "recommend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateAnswer:
    """What one configuration needs. One that does not fit is `ok` too: `feasible: false` with its reasons."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    estimate: Estimate | InferenceEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendAnswer:
    """The best configurations by the cost model, best first."""

    id: str | None
    """The query's."""
    status: Literal["ok"] = "ok"
    recommendations: tuple[Recommendation, ...] | tuple[ServingRecommendation, ...]
    space: SpaceSummary
    rejections: dict[str, int]
    """How many candidates each reason ruled out."""


def estimate_answer(query: Query, *, with_mends: bool = True) -> EstimateAnswer:
    """The answer to a query of one configuration. Raises HpToolError."""
    found: Estimate | InferenceEstimate
    found = serving.estimate(query=query) if query.kind == "inference" else app.estimate(query=query, with_mends=with_mends)
    return EstimateAnswer(id=query.id, estimate=found)


def recommend_answer(query: Query, *, top: int) -> RecommendAnswer:
    """The answer to a query of many. Raises HpToolError."""
    found: app.RecommendationResult | serving.ServingRecommendations
    found = serving.recommend(query=query, top=top) if query.kind == "inference" else app.recommend(query=query, top=top)
    return RecommendAnswer(id=query.id, recommendations=found.recommendations, space=found.space, rejections=found.rejections)


def answer_line(line: bytes, *, task: Task, top: int, check: Callable[[Query], None] = lambda query: None) -> str:
    """One line of a batch, answered on one line. Whatever is wrong with it, or `check` raises, stays in it.

    Estimates come without mends, which would cost more than the rest of a batch together.
    """
    try:
        query = schema.parse_query(line)
        check(query)
        single = task == "estimate"
        return schema.to_json(estimate_answer(query, with_mends=False) if single else recommend_answer(query, top=top))
    except HpToolError as error:
        return error_line(line, error)
    except Exception:  # a bug that one query finds must not take the answers of all others with it
        log.exception("unhandled error on a batch line")
        return error_line(line, HpToolError("an internal error occurred; it has been logged"))


def error_line(line: bytes, error: HpToolError) -> str:
    """The answer of a line that cannot be answered, with the id it came with if that can be read."""
    try:
        data = json.loads(line)
        identity = data.get("id") if isinstance(data, dict) else None
    except (ValueError, RecursionError):
        identity = None
    return json.dumps({"id": identity if isinstance(identity, str) else None, "status": "error", "error": error.as_dict()})
