"""A serving search: its inputs, and the state of its deployments after its runs."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import rejection_counts
from hp_tool.domain.answer import ServingAnswer, ServingBaseline
from hp_tool.domain.measurement import Latencies, Measurement, Tail, Tails
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import (
    InferenceEstimate,
    ServingConfig,
    ServingIntervals,
    ServingRecommendation,
)
from hp_tool.loop.calibration import Calibration, Evidence, StepPrediction, fit_calibration
from hp_tool.loop.calibration.evidence import FloatArray
from hp_tool.loop.calibration.posterior import step_posterior
from hp_tool.loop.learning.make import accuracy_of, predicted_unseen, save
from hp_tool.loop.learning.series import Series
from hp_tool.loop.search.account import spent_by
from hp_tool.loop.search.noise import spread_of
from hp_tool.loop.search.serving import (
    EndpointSearch,
    ServingSearch,
    measured_targets,
    meets_targets,
    penalised_latency_s,
)
from hp_tool.loop.tuning.answer import (
    KnownBaseline,
    choose_baseline,
    described_baseline,
    saved_parts,
)
from hp_tool.loop.tuning.searched import Medians, Searched, outcome_of_rows, own_runs, tied
from hp_tool.loop.tuning.serving_table import (
    LatencyCalibration,
    legality_codes,
    serving_candidates,
    serving_evidence,
    serving_table,
)
from hp_tool.questions.serving.estimates import (
    QUANTILES,
    estimate_row,
    latency_quantiles,
    target_reasons,
)
from hp_tool.questions.serving.evaluate import resolve_config
from hp_tool.questions.serving.intervals import CONFIDENCE
from hp_tool.questions.serving.problem import ServingProblem
from hp_tool.questions.serving.replay import simulate_trace
from hp_tool.questions.training.ranking.rank import group_numbers


@dataclass(frozen=True, kw_only=True)
class ServingTuning(Searched):
    """A serving search: the cost model's problem and the question of the search."""

    search: ServingSearch
    problem: ServingProblem
    costs: ServingCosts
    """Costs in the order of the table's rows."""
    rejections: dict[str, int]

    @property
    def legal(self) -> int:
        return len(self.search.candidates)

    def estimate(self, row: int) -> InferenceEstimate:
        """Return the cost model's estimate of a row.

        For a trace, it has the latencies of its requests.
        """
        costed = self.problem.cost_candidates(self.search.candidates.take(slice(row, row + 1)))
        return estimate_row(costed, 0) if self.problem.trace is None else simulate_trace(costed)

    def load_evidence(
        self, store: Store, *, series: Series, without_search: str | None = None
    ) -> Evidence:
        return serving_evidence(store=store, series=series, without_search=without_search).objective

    def keep(self, store: Store) -> None:
        evidence = self.load_evidence(store, series=self.series)
        if len(evidence):
            accuracy = accuracy_of(evidence, unseen_s=predicted_unseen(evidence, prior=self.prior))
            calibration = fit_calibration(evidence=evidence, prior=self.prior)
            save(store, series=self.series, calibration=calibration, accuracy=accuracy, facts={})

    def medians(
        self, store: Store, *, calibration: Calibration, runs: Sequence[RunRecord], owner: str
    ) -> LatencyMedians:
        """Rank by both latencies, which `calibration` combines into a single penalised latency."""
        evidence = serving_evidence(store=store, series=replace(self.series, owner=owner))
        return self.after(runs, calibration=LatencyCalibration.fitted(evidence, prior=self.prior))

    def after(
        self, runs: Sequence[RunRecord], *, calibration: LatencyCalibration
    ) -> LatencyMedians:
        """Return the calibrated predictions, combined with the rows' own runs."""

        def posterior(name: str, prediction: StepPrediction) -> StepPrediction:
            own = own_runs(self.search, runs, shown=partial(_latency, name=name))
            return step_posterior(prediction, runs=own, kind=self.problem.cluster.gpu.kind)

        predicted = calibration.predict(self.search.table, self.costs)
        ttft, tpot = posterior("ttft_s", predicted[0]), posterior("tpot_s", predicted[1])
        following = self.problem.output_length - 1
        ttft_s = ttft.median_s
        tpot_s = tpot.median_s if following else np.zeros_like(tpot.median_s)
        latency_s = ttft_s + following * tpot_s
        return LatencyMedians(
            problem=self,
            runs=runs,
            seconds=latency_s,
            # The errors of both latencies are assumed to be equal.
            log_sd=(ttft_s * ttft.log_sd + following * tpot_s * tpot.log_sd) / latency_s,
            outcomes=outcome_of_rows(self.search, runs),
            calibration=calibration,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            intervals={
                "ttft_s": ttft.interval(confidence=CONFIDENCE),
                "tpot_s": tpot.interval(confidence=CONFIDENCE),
            },
        )


def baseline_config(query: Query, problem: ServingProblem) -> ServingConfig | None:
    """Return the deployment in `search.baseline`; None if the query has none.

    Raises:
        InputError: The deployment is illegal.
    """

    def reasons(config: ServingConfig) -> str:
        codes = legality_codes(problem, serving_candidates(problem, [config]))
        return ", ".join(rejection_counts(codes)).replace("_", " ")

    return described_baseline(
        query, resolve=partial(resolve_config, problem=problem), reasons=reasons
    )


@dataclass(frozen=True, kw_only=True)
class LatencyMedians(Medians[ServingConfig, InferenceEstimate]):
    """Rows of a serving search. Rows that miss a latency target are not acceptable."""

    problem: ServingTuning
    calibration: LatencyCalibration
    ttft_s: FloatArray
    tpot_s: FloatArray
    intervals: Mapping[str, tuple[FloatArray, FloatArray]]

    @cached_property
    def seen(self) -> dict[int, Latencies]:
        """Return the latencies of the rows that ran or fit in memory."""
        return {
            row: self.row(row)
            for row in range(len(self.seconds))
            if row in self.measured or (row not in self.outcomes and self.problem.costs.fits[row])
        }

    @cached_property
    def tails(self) -> dict[int, Tails]:
        """Return the latency quantiles of requests by row. Empty if runs do not measure them."""
        means = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "request_latency_s": self.seconds}
        return _tails(self.problem, means, self.measured)

    @cached_property
    def acceptable(self) -> list[int]:
        targets = self.problem.problem.targets
        return [row for row, each in self.seen.items() if meets_targets(each, targets=targets)]

    @property
    def ran(self) -> Collection[int]:
        return self.measured.keys()

    @property
    def near(self) -> list[int]:
        targets = self.problem.problem.targets
        return sorted(
            self.seen, key=lambda row: penalised_latency_s(self.seen[row], targets=targets)
        )

    @property
    def space(self) -> tuple[int, int, dict[str, int]]:
        return len(self.seconds), len(self.acceptable), self.problem.rejections

    @property
    def grid_gpu_seconds(self) -> float | None:
        spent = spent_by(self.runs)
        runs = spent.profile_runs
        return spent.gpu_seconds / runs * len(self.seconds) if runs else None

    def works(self, measurement: Measurement) -> bool:
        return measurement.load is not None

    def compared_s(self, measurement: Measurement) -> float | None:
        return measurement.load.request_latency_s if measurement.load else None

    def row(self, row: int) -> Latencies:
        """Return the estimate of one row, with its latencies and intervals."""
        return Latencies(
            ttft_s=float(self.ttft_s[row]),
            tpot_s=float(self.tpot_s[row]),
            request_latency_s=float(self.seconds[row]),
            tails=self.tails.get(row),
        )

    def describe(self, rows: Sequence[int]) -> tuple[ServingRecommendation, ...]:
        if not rows:
            return ()
        predicted = self.problem.problem.cost_candidates(self.problem.search.candidates)
        costs, in_flight = self._costs(), predicted.in_flight
        if in_flight is not None:
            in_flight = in_flight * costs.request_latency_s / predicted.costs.request_latency_s
        corrected = replace(predicted, costs=costs, in_flight=in_flight)

        def alike(row: int, first: int) -> bool:
            return bool(tied([first, row], seconds=self.seconds, log_sd=self.log_sd))

        return tuple(
            ServingRecommendation(
                rank=place + 1,
                group=group,
                parallel=self.problem.search.candidates.config(row),
                estimate=self.problem.estimate(row),
                measurement=self.measured.get(row),
                calibrated_estimate=self._with_tails(
                    self._with_intervals(estimate_row(corrected, row), row), row
                ),
            )
            for place, (row, group) in enumerate(
                zip(rows, group_numbers(rows, alike=alike), strict=True)
            )
        )

    def described(self, best: ServingRecommendation, **common: Any) -> ServingAnswer:
        known, intervals = best.preferred_estimate, best.preferred_estimate.intervals
        assert (
            known.ttft_s is not None
            and known.tpot_s is not None
            and known.request_latency_s is not None
            and known.output_tokens_per_second_per_gpu is not None
        )
        return ServingAnswer(
            **common,
            ttft_s=known.ttft_s,
            ttft_s_interval=intervals.ttft_s if intervals else None,
            tpot_s=known.tpot_s,
            tpot_s_interval=intervals.tpot_s if intervals else None,
            request_latency_s=known.request_latency_s,
            output_tokens_per_second_per_gpu=known.output_tokens_per_second_per_gpu,
            users=known.users,
            cost_per_million_output_tokens=known.cost_per_million_output_tokens,
            source="measured"
            if best.measurement
            else "calibrated"
            if common["known_from_runs"]
            else "predicted",
            baseline=None if self.baseline is None else _saved(known, self.baseline),
        )

    @cached_property
    def baseline(self) -> KnownBaseline[ServingConfig, InferenceEstimate] | None:
        """Return the baseline in the form of a recommendation."""
        problem = self.problem.problem
        config, source = choose_baseline(baseline_config(self.problem.query, problem), self.runs)
        if not isinstance(config, ServingConfig):
            return None
        one = serving_candidates(problem, [config])
        rows = problem.cost_candidates(one)
        search = replace(self.problem.search, candidates=one, table=serving_table(rows))
        alone = replace(self.problem, search=search, costs=rows.costs).after(
            self.runs, calibration=self.calibration
        )
        (row,) = alone.describe([0])
        return KnownBaseline(
            parallel=config, source=source, estimate=row.preferred_estimate, known=alone.known(0)
        )

    def _costs(self) -> ServingCosts:
        """Return the costs with these latencies.

        The proportions of parts and the shapes of tails do not change.
        """
        costs = self.problem.costs
        ratio = self.seconds / costs.request_latency_s
        slower = (
            ratio if self.problem.problem.request_rate_per_second is None else 1.0
        )  # A rate that is sustained stays the same.
        return replace(
            costs,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            request_latency_s=self.seconds,
            parts={name: seconds * ratio for name, seconds in costs.parts.items()},
            output_tokens_per_second_per_gpu=costs.output_tokens_per_second_per_gpu / slower,
            wave_s=costs.wave_s * self.ttft_s / costs.ttft_s,
            prompt_s=costs.prompt_s * self.ttft_s / costs.ttft_s,
        )

    def _with_tails(self, estimate: InferenceEstimate, row: int) -> InferenceEstimate:
        """Return the estimate with these quantiles, and with the targets that they miss."""
        if row not in self.tails or estimate.ttft_s is None:
            return estimate
        reasons = tuple(
            reason
            for name, limit, value in measured_targets(
                self.row(row), targets=self.problem.problem.targets
            )
            for reason in target_reasons(name, value=value, limit=limit)
        )
        return replace(estimate, tails=self.tails[row], feasible=not reasons, reasons=reasons)

    def _with_intervals(self, estimate: InferenceEstimate, row: int) -> InferenceEstimate:
        rate, center = estimate.output_tokens_per_second_per_gpu, float(self.tpot_s[row])
        if rate is None:
            return replace(estimate, intervals=None)
        ttft, tpot = (
            (float(low[row]), float(high[row]))
            for low, high in (self.intervals["ttft_s"], self.intervals["tpot_s"])
        )
        between = (
            (rate * center / tpot[1], rate * center / tpot[0]) if center > 0.0 else (rate, rate)
        )
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


def _latency(measurement: Measurement, *, name: str) -> tuple[float, float] | None:
    """Return one latency under load in seconds, and the standard deviation of its logarithm."""
    seconds: float = getattr(measurement.load, name) if measurement.load is not None else 0.0
    return (seconds, spread_of(measurement)) if seconds > 0.0 else None


def _tails(
    tuning: ServingTuning, means: dict[str, FloatArray], measured: dict[int, Measurement]
) -> dict[int, Tails]:
    """Return the latency quantiles of an endpoint's rows.

    If not measured, they are predicted multiples of the mean, corrected by the geometric mean error
    of the measured rows.
    """
    if not isinstance(tuning.search, EndpointSearch):
        return {}
    costed = tuning.problem.cost_candidates(tuning.search.candidates)
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
