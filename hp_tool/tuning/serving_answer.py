"""The answer of a serving search: what its first recommendation serves, and what it wins over the baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.legality import legality, rejection_counts
from hp_tool.domain.answer import BaselineSource, ServingAnswer, ServingBaseline
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import InferenceEstimate, ServingConfig, ServingRecommendation
from hp_tool.errors import InputError
from hp_tool.search.fidelity import repeats
from hp_tool.serving.evaluate import resolve_config
from hp_tool.serving.problem import ServingProblem
from hp_tool.tuning.answer import FIELD
from hp_tool.tuning.known import gain_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDeployment:
    """What an answer is compared with, by the same estimate."""

    row: ServingRecommendation
    source: BaselineSource
    known: tuple[float, float]
    """(seconds, log_sd) of a request."""


def baseline_config(query: Query, problem: ServingProblem) -> ServingConfig | None:
    """The deployment that `search.baseline` describes; None where the query has none. Raises InputError if it is illegal."""
    if query.search.baseline is None:
        return None
    try:
        config = resolve_config(query.search.baseline, problem=problem)
    except InputError as error:
        raise InputError(error.message, field=(error.field or "").replace("parallel", FIELD, 1) or FIELD) from None
    one = ServingCandidates.from_configs([config], concurrency=[problem.concurrency or 1])
    if reasons := rejection_counts(legality(model=problem.model, num_gpus=problem.cluster.num_gpus, candidates=one)):
        message = f"the baseline is not legal: {', '.join(reasons).replace('_', ' ')}"
        raise InputError(message, field=FIELD, code="illegal_baseline")
    return config


def serving_answer(
    best: ServingRecommendation,
    *,
    known: tuple[float, float],
    runs: Sequence[RunRecord],
    as_good: int,
    baseline: KnownDeployment | None,
) -> ServingAnswer:
    """The answer whose configuration is the first row of the result; `known`: (seconds, log_sd) of its requests."""
    gain = None
    if baseline is not None:
        same = baseline.row.parallel == best.parallel
        gain = gain_of(known, baseline=baseline.known, against=baseline.source, same=same)
    return replace(
        _figures(best, runs=runs, as_good=as_good),
        gain=gain,
        clearly_better=None if gain is None else gain.clear,
        baseline=None if baseline is None else _baseline(_known(best), baseline),
    )


def _figures(best: ServingRecommendation, *, runs: Sequence[RunRecord], as_good: int) -> ServingAnswer:
    known = _known(best)
    assert known.ttft_s is not None and known.tpot_s is not None and known.request_latency_s is not None
    assert known.output_tokens_per_second_per_gpu is not None
    succeeded = sum(run.status == "ok" for run in runs)
    return ServingAnswer(
        parallel=best.parallel,
        ttft_s=known.ttft_s,
        ttft_s_interval=known.intervals.ttft_s if known.intervals else None,
        tpot_s=known.tpot_s,
        tpot_s_interval=known.intervals.tpot_s if known.intervals else None,
        request_latency_s=known.request_latency_s,
        output_tokens_per_second_per_gpu=known.output_tokens_per_second_per_gpu,
        users=known.users,
        cost_per_million_output_tokens=known.cost_per_million_output_tokens,
        source="measured" if best.measurement else "calibrated" if succeeded else "predicted",
        known_from_runs=succeeded,
        measured=repeats(runs).get(best.parallel) if best.measurement else None,
        as_good=as_good,
        baseline=None,
    )


def _baseline(best: InferenceEstimate, baseline: KnownDeployment) -> ServingBaseline:
    known = _known(baseline.row)
    rate, best_rate = known.output_tokens_per_second_per_gpu, best.output_tokens_per_second_per_gpu
    assert rate is not None and best_rate is not None
    cost, best_cost = known.cost_per_million_output_tokens, best.cost_per_million_output_tokens
    parts, best_parts = known.parts_s or {}, best.parts_s or {}
    return ServingBaseline(
        parallel=baseline.row.parallel,
        source=baseline.source,
        output_tokens_per_second_per_gpu=rate,
        speedup=best_rate / rate,
        saved_cost_per_million_output_tokens=None if cost is None or best_cost is None else cost - best_cost,
        saved_parts_s={name: parts.get(name, 0.0) - best_parts.get(name, 0.0) for name in {**parts, **best_parts}},
    )


def _known(row: ServingRecommendation) -> InferenceEstimate:
    return row.calibrated_estimate or row.estimate
