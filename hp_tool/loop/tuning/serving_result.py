"""The deployments of a serving search after its runs: ranking, answer, comparison with the
baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import legality, rejection_counts
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import ServingAnswer, ServingBaseline, get_verdict
from hp_tool.domain.measurement import Latencies, Measurement, Tail, Tails
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import (
    InferenceEstimate,
    ServingConfig,
    ServingIntervals,
    ServingRecommendation,
)
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.calibration.posterior import ratio, step_posterior
from hp_tool.loop.search.account import spent_by
from hp_tool.loop.search.fidelity import repeats
from hp_tool.loop.search.noise import measured_steps, spread_of
from hp_tool.loop.search.serving import EndpointSearch, bounded, meets, penalised_latency_s
from hp_tool.loop.tuning.answer import (
    KnownBaseline,
    compared_with,
    described_baseline,
    gains_of,
    saved_parts,
)
from hp_tool.loop.tuning.known import own_runs
from hp_tool.loop.tuning.latencies import LatencyCalibration
from hp_tool.loop.tuning.result import Ranked, outcome_of_rows, rank
from hp_tool.loop.tuning.serving_table import serving_candidates, serving_table
from hp_tool.questions.serving.estimates import (
    QUANTILES,
    estimate_row,
    latency_quantiles,
    target_reasons,
)
from hp_tool.questions.serving.evaluate import resolve_config
from hp_tool.questions.serving.intervals import CONFIDENCE
from hp_tool.questions.serving.problem import ServingProblem
from hp_tool.questions.training.ranking.rank import group_numbers

if TYPE_CHECKING:
    from hp_tool.loop.tuning.serving import ServingTuning


def baseline_config(query: Query, problem: ServingProblem) -> ServingConfig | None:
    """Return the deployment in `search.baseline`; None if the query has none.

    Raises:
        InputError: It is illegal.
    """

    def reasons(config: ServingConfig) -> str:
        one = ServingCandidates.from_configs([config], concurrency=[problem.concurrency or 1])
        codes = legality(
            model=problem.model,
            num_gpus=problem.cluster.num_gpus,
            candidates=one,
            longest_request=problem.longest_request,
        )
        return ", ".join(rejection_counts(codes)).replace("_", " ")

    return described_baseline(
        query, resolve=partial(resolve_config, problem=problem), reasons=reasons
    )


@dataclass(frozen=True, kw_only=True)
class RowLatencies:
    """Posterior latencies of each row from calibration and own runs; arrays of shape (n,)."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    log_sd: FloatArray
    """Standard deviation of the request latency's logarithm; errors of both latencies are assumed
    equal.
    """
    intervals: dict[str, tuple[FloatArray, FloatArray]]
    measured: dict[int, Measurement]
    failed: Set[int]
    tails: dict[int, Tails]
    """Quantiles of single requests by row; empty if runs do not measure them."""

    def row(self, row: int, *, output_length: int) -> Latencies:
        ttft, tpot = float(self.ttft_s[row]), float(self.tpot_s[row])
        latency = ttft + (output_length - 1) * tpot
        return Latencies(
            ttft_s=ttft, tpot_s=tpot, request_latency_s=latency, tails=self.tails.get(row)
        )

    def known(self, row: int, *, output_length: int) -> tuple[float, float]:
        """Return (seconds, log_sd) of a request."""
        return self.row(row, output_length=output_length).request_latency_s, float(self.log_sd[row])

    def alike(self, row: int, first: int, *, output_length: int) -> bool:
        """Return whether the 90% interval of the ratio of two rows' request latencies
        contains 1.
        """
        one, other = (self.known(each, output_length=output_length) for each in (row, first))
        _, low, high = ratio(one, other, quantile=NORMAL_QUANTILE)
        return bool(low <= 1.0 <= high)


def ranked_deployments(
    tuning: ServingTuning, *, calibration: LatencyCalibration, runs: Sequence[RunRecord]
) -> Ranked:
    """Return the candidates of a serving search; those whose latencies miss a target are not
    acceptable.
    """
    latencies = _latencies(tuning, runs, calibration)
    rows, targets, output = (
        range(len(tuning.search.table)),
        tuning.problem.targets,
        tuning.problem.output_length,
    )
    seen = {
        row: latencies.row(row, output_length=output)
        for row in rows
        if row in latencies.measured or (row not in latencies.failed and tuning.costs.fits[row])
    }
    good = [row for row in seen if meets(seen[row], targets=targets)]
    latency_s = np.array([seen[row].request_latency_s if row in seen else np.inf for row in rows])
    order = rank(
        median_s=latency_s,
        log_sd=latencies.log_sd,
        eligible=[row for row in good if row not in latencies.measured],
        measured_s={row: float(latency_s[row]) for row in good if row in latencies.measured},
    )
    spent = spent_by(runs)
    return Ranked(
        order=order,
        near=sorted(seen, key=lambda row: penalised_latency_s(seen[row], targets=targets)),
        front=[],
        measured=latencies.measured,
        seconds=latency_s,
        legal=len(rows),
        feasible=len(good),
        rejections=tuning.rejections,
        grid_gpu_seconds=spent.gpu_seconds / spent.profile_runs * len(rows)
        if spent.profile_runs
        else None,
        describe=partial(_describe, tuning, latencies=latencies),
        answer=partial(
            _answer, tuning, order=order, latencies=latencies, calibration=calibration, runs=runs
        ),
    )


def _latencies(
    tuning: ServingTuning, runs: Sequence[RunRecord], calibration: LatencyCalibration
) -> RowLatencies:
    """Return calibrated predictions with the rows' own runs."""
    kind, following = tuning.problem.cluster.gpu.kind, tuning.problem.output_length - 1
    ttft, tpot = (
        step_posterior(
            prediction,
            runs=own_runs(tuning.search, runs, shown=partial(_latency, name=name)),
            kind=kind,
        )
        for name, prediction in zip(
            ("ttft_s", "tpot_s"),
            calibration.predict(tuning.search.table, tuning.costs),
            strict=True,
        )
    )
    ttft_s, tpot_s = ttft.median_s, tpot.median_s if following else np.zeros_like(tpot.median_s)
    latency_s = ttft_s + following * tpot_s
    outcomes = outcome_of_rows(tuning.search, runs)
    measured = {row: outcome for row, outcome in outcomes.items() if outcome.load is not None}
    return RowLatencies(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        log_sd=(ttft_s * ttft.log_sd + following * tpot_s * tpot.log_sd) / latency_s,
        intervals={
            "ttft_s": ttft.interval(confidence=CONFIDENCE),
            "tpot_s": tpot.interval(confidence=CONFIDENCE),
        },
        measured=measured,
        failed=outcomes.keys() - measured.keys(),
        tails=_tails(
            tuning, {"ttft_s": ttft_s, "tpot_s": tpot_s, "request_latency_s": latency_s}, measured
        ),
    )


def _latency(measurement: Measurement, *, name: str) -> tuple[float, float] | None:
    """Return seconds of one latency under the load, and the scatter of its logarithm."""
    seconds: float = getattr(measurement.load, name) if measurement.load is not None else 0.0
    return (seconds, spread_of(measurement)) if seconds > 0.0 else None


def _tails(
    tuning: ServingTuning, means: dict[str, FloatArray], measured: dict[int, Measurement]
) -> dict[int, Tails]:
    """Return quantiles of an endpoint's rows.

    They are measured, or predicted multiples of the mean, corrected by the (geometric) mean error
    of the measured rows.
    """
    if not isinstance(tuning.search, EndpointSearch):
        return {}
    costed = tuning.problem.costed(tuning.search.candidates)
    shapes: dict[tuple[str, str], FloatArray] = {}
    for name, share in QUANTILES.items():
        at = latency_quantiles(costed, share)
        shapes |= {
            (latency, name): getattr(at, latency)
            / np.maximum(getattr(costed.costs, latency), 1e-12)
            for latency in means
        }
    seen = {
        row: each.load.tails
        for row, each in measured.items()
        if each.load is not None and each.load.tails is not None
    }
    for (latency, name), shape in shapes.items():
        ratios = [
            getattr(getattr(tails, latency), name)
            / (getattr(measured[row].load, latency) * shape[row] or 1.0)
            for row, tails in seen.items()
        ]
        if ratios and min(ratios) > 0.0:
            shape *= statistics.geometric_mean(ratios)

    def predicted(row: int) -> Tails:
        def tail(latency: str) -> Tail:
            p50, p90, p99 = (
                float(means[latency][row] * shapes[latency, name][row])
                for name in ("p50", "p90", "p99")
            )
            return Tail(p50=p50, p90=p90, p99=p99)

        return Tails(**{latency: tail(latency) for latency in means})

    return {row: seen.get(row) or predicted(row) for row in range(len(costed.candidates))}


def _describe(
    tuning: ServingTuning, rows: Sequence[int], *, latencies: RowLatencies
) -> tuple[ServingRecommendation, ...]:
    if not rows:
        return ()
    candidates = tuning.search.candidates
    predicted = tuning.problem.costed(candidates)
    costs = _corrected(tuning, latencies)
    in_flight = None
    if predicted.in_flight is not None:
        in_flight = (
            predicted.in_flight * costs.request_latency_s / predicted.costs.request_latency_s
        )
    corrected = replace(predicted, costs=costs, in_flight=in_flight)
    groups = group_numbers(
        rows, alike=partial(latencies.alike, output_length=tuning.problem.output_length)
    )
    return tuple(
        ServingRecommendation(
            rank=place + 1,
            group=groups[place],
            parallel=candidates.config(row),
            estimate=tuning.estimate(row),
            measurement=latencies.measured.get(row),
            calibrated_estimate=_with_tails(
                tuning,
                _with_intervals(estimate_row(corrected, row), row, latencies),
                row,
                latencies,
            ),
        )
        for place, row in enumerate(rows)
    )


def _answer(
    tuning: ServingTuning,
    best: ServingRecommendation,
    *,
    order: Sequence[int],
    latencies: RowLatencies,
    calibration: LatencyCalibration,
    runs: Sequence[RunRecord],
) -> ServingAnswer:
    known, baseline = best.preferred_estimate, _baseline(tuning, runs, calibration)
    assert (
        known.ttft_s is not None
        and known.tpot_s is not None
        and known.request_latency_s is not None
    )
    assert known.output_tokens_per_second_per_gpu is not None
    (first, *others), output = order, tuning.problem.output_length
    succeeded = sum(run.status == "ok" for run in runs)
    own, kind = latencies.known(first, output_length=output), tuning.problem.cluster.gpu.kind
    requests = measured_steps(
        runs, kind=kind, seconds=lambda run: run.load.request_latency_s if run.load else None
    )
    gains = (
        ()
        if baseline is None
        else gains_of(best.parallel, own, baseline=baseline, measured=requests)
    )
    gain = gains[0] if gains else None
    answer = ServingAnswer(
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
        as_good=sum(latencies.alike(row, first, output_length=output) for row in others),
        baseline=None if baseline is None else _saved(known, baseline),
        gain=gain,
        gains=gains,
        clearly_better=None if gain is None else gain.clear,
    )
    return replace(answer, verdict=get_verdict(answer))


def _baseline(
    tuning: ServingTuning, runs: Sequence[RunRecord], calibration: LatencyCalibration
) -> KnownBaseline[ServingConfig, InferenceEstimate] | None:
    """Return the baseline described like a recommendation; it need not be a configuration that runs
    vary.
    """
    problem = tuning.problem
    config, source = compared_with(baseline_config(tuning.query, problem), runs)
    if not isinstance(config, ServingConfig):
        return None
    one = serving_candidates(problem, [config])
    rows = problem.costed(one)
    search = replace(tuning.search, candidates=one, table=serving_table(rows))
    alone = replace(tuning, search=search, costs=rows.costs)
    latencies = _latencies(alone, runs, calibration)
    (row,) = _describe(alone, [0], latencies=latencies)
    known = latencies.known(0, output_length=problem.output_length)
    return KnownBaseline(
        parallel=config, source=source, estimate=row.preferred_estimate, known=known
    )


def _saved(
    best: InferenceEstimate, baseline: KnownBaseline[ServingConfig, InferenceEstimate]
) -> ServingBaseline:
    known = baseline.estimate
    rate, best_rate = known.output_tokens_per_second_per_gpu, best.output_tokens_per_second_per_gpu
    assert rate is not None and best_rate is not None
    cost, best_cost = known.cost_per_million_output_tokens, best.cost_per_million_output_tokens
    return ServingBaseline(
        parallel=baseline.parallel,
        source=baseline.source,
        output_tokens_per_second_per_gpu=rate,
        speedup=best_rate / rate,
        saved_cost_per_million_output_tokens=None
        if cost is None or best_cost is None
        else cost - best_cost,
        saved_parts_s=saved_parts(known.parts_s or {}, best.parts_s or {}),
    )


def _corrected(tuning: ServingTuning, latencies: RowLatencies) -> ServingCosts:
    """Return the costs with these latencies; proportions of parts and shapes of tails are
    unchanged.
    """
    costs = tuning.costs
    latency = latencies.ttft_s + (tuning.problem.output_length - 1) * latencies.tpot_s
    ratio = latency / costs.request_latency_s
    slower = (
        ratio if tuning.problem.request_rate_per_second is None else 1.0
    )  # a rate that is completed remains the same
    return replace(
        costs,
        ttft_s=latencies.ttft_s,
        tpot_s=latencies.tpot_s,
        request_latency_s=latency,
        parts={name: seconds * ratio for name, seconds in costs.parts.items()},
        output_tokens_per_second_per_gpu=costs.output_tokens_per_second_per_gpu / slower,
        wave_s=costs.wave_s * latencies.ttft_s / costs.ttft_s,
        prompt_s=costs.prompt_s * latencies.ttft_s / costs.ttft_s,
    )


def _with_tails(
    tuning: ServingTuning, estimate: InferenceEstimate, row: int, latencies: RowLatencies
) -> InferenceEstimate:
    """Return the estimate with these quantiles, and the targets that they miss."""
    if row not in latencies.tails or estimate.ttft_s is None:
        return estimate
    figures = bounded(
        latencies.row(row, output_length=tuning.problem.output_length),
        targets=tuning.problem.targets,
    )
    reasons = tuple(
        reason
        for name, limit, value in figures
        for reason in target_reasons(name, value=value, limit=limit)
    )
    return replace(estimate, tails=latencies.tails[row], feasible=not reasons, reasons=reasons)


def _with_intervals(
    estimate: InferenceEstimate, row: int, latencies: RowLatencies
) -> InferenceEstimate:
    """Return the estimate with its intervals."""
    if estimate.output_tokens_per_second_per_gpu is None:
        return replace(estimate, intervals=None)
    ttft, tpot = (
        (float(low[row]), float(high[row]))
        for low, high in (latencies.intervals["ttft_s"], latencies.intervals["tpot_s"])
    )
    rate, center = estimate.output_tokens_per_second_per_gpu, float(latencies.tpot_s[row])
    between = (rate * center / tpot[1], rate * center / tpot[0]) if center > 0.0 else (rate, rate)
    return replace(
        estimate,
        intervals=ServingIntervals(
            confidence=CONFIDENCE,
            ttft_s=ttft,
            tpot_s=tpot,
            output_tokens_per_second_per_gpu=between,
            source="inference runs on this cluster",
        ),
    )
