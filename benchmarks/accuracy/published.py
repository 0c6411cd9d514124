"""Compare predictions with published training and serving of large MoE models: `python -m
benchmarks.accuracy.published [--json]`. No constant was fitted to these runs.

Reads evidence/published_mixtures.yaml; needs no folder of measured figures.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from benchmarks.accuracy.data import print_report
from evidence.table import FOLDER
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.questions import serving
from hp_tool.questions.schema import parse_query, set_paths
from hp_tool.questions.training import estimate, recommend

Query = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published figure of a run that no constant was fitted to, and its prediction."""

    what: str
    source: str
    assumed: str
    """Settings that the publication does not state."""
    unit: str
    published: float
    predicted: float
    tolerance: str
    within: bool
    feasible: bool = True
    factor: float | None = None
    """Ratio of an end of the 90% interval to the prediction."""


def estimate_query(query: Mapping[str, Any]) -> Estimate:
    """Return the estimate for a training query; it has a step time."""
    prediction = estimate(query=parse_query({"kind": "training", **query}), with_fixes=False)
    assert prediction.time is not None, prediction.reasons
    return prediction


def best_recommendation(query: Mapping[str, Any]) -> Recommendation:
    """Return the first recommendation for a training query."""
    found = recommend(query=parse_query({"kind": "training", **query}), top=1).recommendations
    if not found:
        raise RuntimeError(f"no layout fits in memory: {query['model']}")
    return found[0]


def with_values(query: Query, values: Mapping[str, Any]) -> Query:
    """Return the query with these values at their dotted paths."""
    return set_paths(copy.deepcopy(query), values)


def evaluate() -> list[Check]:
    """Return every check."""
    text = (FOLDER / "published_mixtures.yaml").read_text(encoding="utf-8")
    return [_check(each) for each in yaml.safe_load(text)]


def _check(of: Mapping[str, Any]) -> Check:
    query, published, words = with_values(of["query"], of.get("set", {})), of["published"], {}
    feasible, factor = True, None
    if "pool" in of:
        (pools,) = serving.rank_pools(query=parse_query(query))
        predicted = getattr(pools.estimate, f"{of['pool']}_tokens_per_second_per_gpu")
    else:
        found = estimate_query(query)
        predicted, feasible = found.tokens_per_second_per_gpu, found.feasible
        assert predicted and found.intervals and found.time and found.parallel
        words = {"pipeline_layout": found.parallel.pipeline_layout, "predicted": predicted}
        if "widest" in of:
            factor = found.intervals.step_s[1] / found.time.step_s
    if "before" in of:
        base = estimate_query(with_values(of["query"], of["before"])).tokens_per_second_per_gpu
        before, words["level"] = published
        predicted, published = (
            100.0 * (rate / old - 1.0)
            for rate, old in ((predicted, base), (words["level"], before))
        )
        feasible, off = True, abs(predicted - published)
    else:
        off = abs(predicted / published - 1.0)
    return Check(
        **{name: of[name] for name in ("what", "source", "unit", "tolerance")},
        assumed=of["assumed"].format(**words),
        published=published,
        predicted=predicted,
        within=off <= of["within"] and (factor is None or factor <= of["widest"]),
        feasible=feasible,
        factor=factor,
    )


if __name__ == "__main__":
    print_report(
        description=__doc__,
        evaluate=evaluate,
        as_dict=lambda found: [asdict(one) for one in found],
        needs_data=False,
    )
