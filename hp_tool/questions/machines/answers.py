"""Answers to a query over several machines (`hp_tool.questions.problem.Problem`)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from hp_tool import catalog
from hp_tool.domain import bounds
from hp_tool.domain.additions import AnswerAdditions
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.prices import NotRanked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Front, Ranking, Recommendation, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.questions.configuration import NUM_GPUS, Configuration
from hp_tool.questions.machines.listed import Machine, device_counts, list_machines
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.usual_settings import least_step_s
from hp_tool.wording import figures

if TYPE_CHECKING:
    from hp_tool.domain.setups import ServingSetup, TrainingSetup
    from hp_tool.questions.training.calibrated import Calibrations
from statistics import NormalDist

import numpy as np

from hp_tool.cost.goodput import lost_s
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import SECONDS_PER_DAY

Row = Recommendation | ServingRecommendation
CLUSTER = "cluster"
"""Path of the machine in a row's `set`, as in a query of that machine alone."""
MIN_SCALING_FACTOR = 0.8
"""Fraction by which superlinear scaling is limited: n times as many devices are assumed to be at
most n divided by this factor times as fast.
"""
TOO_SLOW_REASON = "twice the peak FLOP/s of its devices would miss the deadline or the budget"
MAX_SHOWN_MACHINES = 8
"""Maximum number of machines for which one request may use the processor time of one question
each.
"""
NUM_NEAREST = 3
"""Number of nearest misses in an answer."""
PEAK_FACTOR = 4
"""Maximum number of acceptable numbers of devices under a deadline; each trial doubles the last."""
ONE_MACHINE_HINT = "is of one machine: take one of a ranking's rows, whose `set` names it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """A query that compares several machines, with its answers. Each row is the best configuration
    of a machine.
    """

    query: Query
    of_one: Callable[[Query], Any]
    """Returns the problem of a query for a single machine."""

    @property
    def configuration(self) -> None:
        return None

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> NoReturn:
        raise InputError(f"an estimate {ONE_MACHINE_HINT}", field=CLUSTER, code="several_machines")

    def ratio_log_sd(self, one: Any, other: Any, *, alike: bool) -> NoReturn:
        raise InputError(f"a ratio {ONE_MACHINE_HINT}", field=CLUSTER, code="several_machines")

    def setup(self, configuration: Configuration) -> TrainingSetup | ServingSetup:
        setup: TrainingSetup | ServingSetup = self.of_one(configuration.query).setup(configuration)
        return setup

    def rank(self, *, top: int, calibrations: Calibrations | None = None) -> Ranking[Any]:
        return self._ranked(calibrations).first(top)

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[Any], AnswerAdditions]:
        """Return the ranking; for trainings with days and cost, with their Pareto front."""
        if sensitivity or pareto is not None:
            name = "sensitivity" if sensitivity else "pareto"
            raise UnsupportedError(f"{name} {ONE_MACHINE_HINT}", field=name)
        ranked = self._ranked(calibrations)
        return ranked.first(top), AnswerAdditions(
            pareto=ranked.front(), not_ranked=tuple(ranked.not_ranked)
        )

    def _ranked(self, calibrations: Calibrations | None) -> Ranked:
        start = time.perf_counter()
        ranked = Ranked(query=self.query, of_one=self.of_one, calibrations=calibrations)
        listed = list_machines(self.query)
        bounds.announce_answers(min(len(listed), MAX_SHOWN_MACHINES))
        for number, machine in enumerate(listed):
            with _machine_progress(number, len(listed)), ranked.noting(machine):
                ranked.add(machine)
        ranked.end()
        if ranked.errors and not ranked.rows and not ranked.misses:
            raise ranked.errors[0]
        ranked.seconds = time.perf_counter() - start
        return ranked


@dataclass(kw_only=True)
class Ranked:
    """Rankings of machines, filled one machine at a time; machines that differ only in cost are
    ranked once.
    """

    query: Query
    of_one: Callable[[Query], Any]
    calibrations: Calibrations | None
    known: dict[str, Ranking[Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    misses: list[Row] = field(default_factory=list)
    tried: list[Row] = field(default_factory=list)
    """All acceptable rows of machines with an open number of devices, for the Pareto front; `rows`
    has only the best.
    """
    spaces: list[SpaceSummary] = field(default_factory=list)
    rejections: Counter[str] = field(default_factory=Counter)
    errors: list[HpToolError] = field(default_factory=list)
    not_ranked: list[NotRanked] = field(default_factory=list)
    beyond: list[tuple[float, Query, Machine]] = field(default_factory=list)
    """Machines that exceed the limits at any throughput, with the factor by which they do."""
    failing: list[tuple[Machine, str, str]] = field(default_factory=list)
    """Machines that cannot be estimated, some only with a particular number of devices: code and
    message.
    """
    lacking: list[tuple[Machine, str, str]] = field(default_factory=list)
    """Machines without an acceptable configuration: code and message."""
    with_rows: set[int] = field(default_factory=set)
    """Machines with a row, by identity."""
    seconds: float = 0.0

    def add(self, machine: Machine) -> None:
        """Rank a machine with each number of devices to be tried."""
        query = replace(self.query, cluster=machine.cluster)
        if (
            query.kind == "inference"
            and replace(query, objective="min_gpus").leaves_num_gpus_open()
        ):
            self._row(replace(query, objective="min_gpus"), machine)
            return
        numbers = device_counts(query, listed=machine.priced)
        if len(numbers) == 1:
            self._row(query.with_num_gpus(numbers[0]), machine)
            return
        before = len(self.rows)
        self._grow(query, numbers, machine)
        rows = self.rows[before:]
        self.tried += rows
        self.rows[before:] = [min(rows, key=lambda row: _sort_key(row, query))] if rows else []

    def _grow(self, query: Query, numbers: Sequence[int], machine: Machine) -> None:
        """Rank a machine with increasing numbers of devices, as long as more devices may meet the
        limits or be shown.
        """
        longest = query.constraints.max_days
        acceptable, fewest, cheapest = 0, 0.0, math.inf
        for count in numbers:
            if count < fewest:
                continue
            misses = len(self.misses)
            row = self._row(query.with_num_gpus(count), machine)
            if row is not None and len(self.misses) == misses:
                acceptable += 1
                if acceptable == PEAK_FACTOR and longest is not None:
                    return
            elif acceptable:  # Too expensive, or more devices than the batch can use.
                return
            elif (
                row is not None
                and longest is not None
                and (days := _training_days(row)) is not None
            ):
                fewest = MIN_SCALING_FACTOR * count * days / longest
            elif row is not None and longest is None and row.cost is not None:
                if row.cost >= cheapest:  # Over budget, and more devices only cost more.
                    return
                cheapest = row.cost

    @contextmanager
    def noting(self, machine: Machine) -> Iterator[None]:
        """Record an error of a machine with its name, count it as a rejection, and continue with
        the other machines.

        Raises:
            NotFoundError: A name is unknown.
        """
        try:
            yield
        except (InputError, UnsupportedError) as error:
            if error.code == "request_too_costly":
                raise
            self.errors.append(error)
            self.rejections[error.code] += 1
            self.failing.append((machine, error.code, error.message))

    def _row(self, query: Query, machine: Machine) -> Row | None:
        """Return the best row of a machine, or its nearest miss.

        Returns None if nothing is legal or no configuration can meet the limits.
        """
        first: Ranking[Any] = Ranking()
        with self.noting(machine), bounds.repeat_search():
            if (beyond := _deadline_excess(query)) > 1.0:
                self.beyond.append((beyond, query, machine))
                return None
            first = self._first(query)
        return self._add_first_row(first, query, machine)

    def end(self) -> None:
        """Record the machines without a row.

        If nothing was ranked, rank the machines that exceed the limits least, to report their
        nearest misses.
        """
        beyond = sorted(self.beyond, key=lambda each: each[0])
        if not self.rows and not self.misses:
            for _, query, machine in beyond[:NUM_NEAREST]:
                with self.noting(machine), bounds.repeat_search():
                    self._add_first_row(self._first(query), query, machine)
        lacking = [
            *self.lacking,
            *((machine, "target_missed", TOO_SLOW_REASON) for _, _, machine in beyond),
        ]
        named = set(self.with_rows)
        for machine, code, message in (*self.failing, *(lacking if self.rows else ())):
            if id(machine) not in named:
                named.add(id(machine))
                self.not_ranked.append(NotRanked(cluster=machine.name, code=code, message=message))

    def _add_first_row(self, first: Ranking[Any], query: Query, machine: Machine) -> Row | None:
        """Return the first row of a machine's ranking with its cost, and store it in `rows` or
        `misses`.
        """
        acceptable = bool(first.recommendations)
        row = next(iter(first.recommendations or first.nearest_misses), None)
        if row is None:
            self.lacking.append((machine, "no_configuration", "no configuration is legal there"))
            return None
        alone = Configuration.of(row, query=query)
        estimate, calibrated = self.of_one(alone.query).estimate(
            with_fixes=False, calibrations=self.calibrations
        )
        assert isinstance(alone.query.cluster, ClusterQuery)
        whole: Row = replace(
            row,
            set={CLUSTER: _cluster_mapping(alone.query.cluster)}
            | {path: row.set[path] for path in row.set if path != NUM_GPUS},
            estimate=estimate,
            calibrated_estimate=calibrated,
            group=None,
        )
        whole = with_price(
            whole, query=query, spec=catalog.cluster(alone.query.cluster), date=machine.date
        )
        if acceptable:
            self.rows.append(whole)
            self.with_rows.add(id(machine))
            return whole
        self.misses.append(whole)
        if reason := next(iter(whole.preferred_estimate.reasons), None):
            self.lacking.append((machine, reason.code, reason.message))
        return whole

    def _first(self, query: Query) -> Ranking[Any]:
        """Return the best row of a machine; machines that differ only in name, grid and price share
        it.
        """
        spec = catalog.cluster(query.with_most_devices().cluster)
        counts_money = query.constraints.max_cost is not None or query.objective == "cost"
        alike = replace(spec, name="", grid_carbon_kg_per_kwh=None)
        key = repr(alike if counts_money else replace(alike, price_per_gpu_hour=None))
        if key not in self.known:
            ranking = self.known[key] = self.of_one(query).rank(
                top=1, calibrations=self.calibrations
            )
            self.spaces.append(ranking.space)
            self.rejections.update(ranking.rejections)
        return self.known[key]

    def first(self, top: int) -> Ranking[Any]:
        """Return the ranking of all rows so far by the query's objective."""
        rows = [
            self._with_full_estimate(row)
            for row in sorted(self.rows, key=lambda row: _sort_key(row, self.query))[:top]
        ]
        misses = sorted(
            self.misses,
            key=lambda row: (_limit_excess(row, self.query), *_sort_key(row, self.query)),
        )[:NUM_NEAREST]
        misses = [] if rows else misses
        space = SpaceSummary(
            legal=sum(each.legal for each in self.spaces),
            feasible=sum(each.feasible for each in self.spaces),
            pruned=sum(each.pruned for each in self.spaces),
            seconds=self.seconds,
        )
        return Ranking(
            recommendations=_with_ranks(rows),
            nearest_misses=_with_ranks(misses),
            space=space,
            rejections=dict(self.rejections),
        )

    def _with_full_estimate(self, row: Row) -> Row:
        """Return a row for display, with the estimate that a query of this machine alone would
        get.
        """
        alone = Configuration.of(row, query=self.query)
        estimate, calibrated = self.of_one(alone.query).estimate(calibrations=self.calibrations)
        return replace(row, estimate=estimate, calibrated_estimate=calibrated)

    def front(self) -> tuple[Recommendation, ...] | None:
        """Return the Pareto-optimal rows in days and cost, cheapest first.

        Returns None for serving, and without days or prices.
        """
        rows = {id(row): row for row in (*self.rows, *self.tried)}.values()
        both = [
            row
            for row in rows
            if isinstance(row, Recommendation)
            and row.cost is not None
            and _training_days(row) is not None
        ]
        shown: list[Recommendation] = []
        for row in sorted(both, key=lambda row: (row.cost, _training_days(row))):
            if not shown or (_training_days(row) or 0.0) < (_training_days(shown[-1]) or 0.0):
                shown.append(row)
        return tuple(_with_ranks(shown)) or None


@contextmanager
def _machine_progress(number: int, count: int) -> Iterator[None]:
    """Add the number of machines completed so far to an error about the request's cost."""
    try:
        yield
    except InputError as error:
        if error.code != "request_too_costly":
            raise
        message = f"after {number} of {count} machines: {error.message}, or list fewer machines"
        raise InputError(message, field=CLUSTER, code=error.code) from error


def _deadline_excess(query: Query) -> float:
    """Return the ratio of a training's shortest possible step to the longest that meets the limits.

    The shortest step is `usual_settings.least_step_s`. 0 without a deadline or budget, for
    serving, and if the query lists trainings.
    """
    limits = query.constraints
    if (
        query.training is None
        or query.training.choices
        or (limits.max_days is None and limits.max_cost is None)
    ):
        return 0.0
    problem = replace(resolve_training(query), asked=query)
    return least_step_s(problem) / problem.longest_step_s


def _with_ranks(rows: list[Any]) -> tuple[Any, ...]:
    return tuple(replace(row, rank=place) for place, row in enumerate(rows, start=1))


def _cluster_mapping(cluster: ClusterQuery) -> dict[str, Any]:
    from hp_tool.questions import schema

    return {
        name: value for name, value in schema.to_dict(cluster).items() if value not in (None, ())
    }


def _training_days(row: Row) -> float | None:
    return row.preferred_estimate.calendar_days if isinstance(row, Recommendation) else None


def _sort_key(row: Row, query: Query) -> tuple[float, ...]:
    """Return the sort key of rows: cost under a deadline, days under a budget, else `objective`,
    then cost.
    """
    by_days = query.objective in ("throughput", "days") or (
        query.objective is None and query.constraints.max_cost is not None
    )
    cost = math.inf if row.cost is None else row.cost
    if isinstance(row, ServingRecommendation):
        spent = row.preferred_estimate.cost_per_million_output_tokens
        gpus = float(row.set[CLUSTER]["num_gpus"])
        return (
            (gpus, cost)
            if query.objective == "min_gpus"
            else (math.inf if spent is None else spent, cost)
        )
    days = _training_days(row)
    if days is None:  # Without total_tokens, one token represents the training.
        days = row.expected_token_s or math.inf
        cost = math.inf if row.price is None else row.price * row.set[CLUSTER]["num_gpus"] * days
    if query.objective == "min_gpus":
        return (float(row.set[CLUSTER]["num_gpus"]), cost, days)
    return (days, cost) if by_days else (cost, days)


def _limit_excess(row: Row, query: Query) -> float:
    """Return the larger of two ratios: a training's days and cost, each divided by its limit; 0 for
    serving.
    """
    limits = query.constraints
    both = ((_training_days(row), limits.max_days), (row.cost, limits.max_cost))
    return max((value / limit for value, limit in both if value is not None and limit), default=0.0)


def with_price(row: Any, *, query: Query, spec: ClusterSpec, date: str | None) -> Any:
    """Return a row with the cost of its machine."""
    price, cluster = spec.price_per_gpu_hour, query.cluster
    assert isinstance(cluster, ClusterQuery)  # As listed.
    between_nodes = spec.num_gpus > spec.nvlink_domain_size
    stated = (
        cluster.node_type is not None or cluster.inter_node_bandwidth_bytes_per_second is not None
    )
    own: dict[str, Any] = {
        "cluster": spec.name,
        "price": price,
        "price_date": date,
        "network_bandwidth_bytes_per_second": spec.inter_node_bandwidth_bytes_per_second
        if between_nodes
        else None,
        "network_assumed": between_nodes and not stated,
    }
    if isinstance(row, ServingRecommendation):
        return replace(row, **own, cost=None if price is None else price * spec.num_gpus)
    return replace(with_training_totals(row, query=query), **own)


def with_training_totals(row: Recommendation, *, query: Query) -> Recommendation:
    """Return a row with totals and intervals of the whole training, and the probability of meeting
    the deadline.
    """
    known, max_days, days = (
        row.preferred_estimate,
        query.constraints.max_days,
        figures.CALENDAR.between(row.preferred_estimate),
    )
    return replace(
        row,
        cost=known.cost,
        energy=known.energy,
        co2_kg=known.co2_kg,
        days_interval=days,
        cost_interval=figures.COST.between(known),
        deadline_probability=None
        if days is None or max_days is None
        else deadline_probability(known, max_days=max_days),
    )


NUM_QUADRATURE_NODES = 64
"""Number of equally likely durations that represent the uncertainty."""


def deadline_probability(estimate: Estimate, *, max_days: float) -> float:
    """Return the probability that a training ends within a number of calendar days.

    Its duration without failures is log-normal, with the deviation of the step-time interval on the
    side of the deadline. Failures are distributed as in its goodput.
    """
    days, kept = estimate.days, estimate.goodput
    assert days is not None and estimate.time is not None and estimate.intervals is not None
    end_s = estimate.intervals.step_s[1 if (estimate.calendar_days or days) < max_days else 0]
    log_sd = abs(math.log(end_s / estimate.time.step_s)) / NORMAL_QUANTILE
    middle = (np.arange(NUM_QUADRATURE_NODES) + 0.5) / NUM_QUADRATURE_NODES
    lengths_s = (
        days
        * SECONDS_PER_DAY
        * np.exp(log_sd * np.array([NormalDist().inv_cdf(each) for each in middle]))
    )
    limit_s = max_days * SECONDS_PER_DAY
    if kept is None:
        return float(np.mean(lengths_s <= limit_s))
    stretches = days * SECONDS_PER_DAY / kept.checkpoint_interval_s
    seconds, probability = lost_s(
        stretches=stretches,
        interval_s=kept.checkpoint_interval_s,
        checkpoint_s=kept.checkpoint_s,
        restart_s=kept.restart_s,
        mtbf_s=kept.mtbf_s,
    )
    busy_s = (
        1.0 + kept.checkpoint_s / kept.checkpoint_interval_s
    )  # Each second of training, including its share of a checkpoint.
    spare_s = limit_s * (days * SECONDS_PER_DAY / lengths_s) - days * SECONDS_PER_DAY * busy_s
    return float(
        np.mean(np.interp(spare_s, seconds, np.minimum(np.cumsum(probability), 1.0), left=0.0))
    )
