"""Answer queries that compare several machines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hp_tool import catalog
from hp_tool.cost.goodput import lost_s
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain import bounds
from hp_tool.domain.additions import AnswerAdditions
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.prices import NotRanked
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Front, Ranking, Recommendation, SpaceSummary
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.units import SECONDS_PER_DAY
from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.questions import schema
from hp_tool.questions.configuration import NUM_GPUS, Configuration
from hp_tool.questions.machines.listed import Machine, device_counts, list_machines
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.usual_settings import least_step_s
from hp_tool.wording import figures

if TYPE_CHECKING:
    from hp_tool.domain.setups import ServingSetup, TrainingSetup
    from hp_tool.questions.training.calibrated import Calibrations

Row = Recommendation | ServingRecommendation
CLUSTER = "cluster"
"""Key in the `set` of a row: the query's `cluster` for the row's machine."""
MIN_SCALING_FACTOR = 0.8
"""Limit of superlinear scaling: n times as many devices are at most n / MIN_SCALING_FACTOR times as
fast.
"""
TOO_SLOW_REASON = "misses the deadline or the budget even at twice the peak FLOP/s of its devices"
MAX_SHOWN_MACHINES = 8
"""Maximum number of machines that count towards a request's CPU time limit. Each adds the limit of
one question.
"""
NUM_NEAREST = 3
"""Number of nearest misses in an answer."""
PEAK_FACTOR = 4
"""Maximum number of acceptable device counts tried under a deadline. Each count is twice the
previous one.
"""
ONE_MACHINE_HINT = (
    "requires a single machine; use the `cluster` in `set` of one of the ranking's rows"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """A query that compares several machines; implements `questions.problem.Problem`.

    Each row of its ranking is the best configuration on one machine.
    """

    query: Query
    problem_of_machine: Callable[[Query], Any]
    """Function that returns the problem of a query for a single machine."""

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
        setup: TrainingSetup | ServingSetup = self.problem_of_machine(configuration.query).setup(
            configuration
        )
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
        """Return the ranking and, for training runs with days and cost, the Pareto front of days
        and cost.
        """
        if sensitivity or pareto is not None:
            name = "sensitivity" if sensitivity else "pareto"
            raise UnsupportedError(f"{name} {ONE_MACHINE_HINT}", field=name)
        ranked = self._ranked(calibrations)
        return ranked.first(top), AnswerAdditions(
            pareto=ranked.front(), not_ranked=tuple(ranked.not_ranked)
        )

    def _ranked(self, calibrations: Calibrations | None) -> Ranked:
        start = time.perf_counter()
        ranked = Ranked(
            query=self.query, problem_of_machine=self.problem_of_machine, calibrations=calibrations
        )
        listed = list_machines(self.query)
        bounds.announce_answers(min(len(listed), MAX_SHOWN_MACHINES))
        for number, machine in enumerate(listed):
            with _machine_progress(number, len(listed)), ranked.recording_errors(machine):
                ranked.add(machine)
        ranked.end()
        if ranked.errors and not ranked.rows and not ranked.misses:
            raise ranked.errors[0]
        ranked.seconds = time.perf_counter() - start
        return ranked


@dataclass(kw_only=True)
class Ranked:
    """Ranking of machines, filled one machine at a time.

    Machines that differ only in name, price and electricity grid share one ranking of layouts.
    """

    query: Query
    problem_of_machine: Callable[[Query], Any]
    calibrations: Calibrations | None
    known: dict[str, Ranking[Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    misses: list[Row] = field(default_factory=list)
    tried: list[Row] = field(default_factory=list)
    """Acceptable rows for each number of devices tried, for the Pareto front. `rows` contains only
    the best row of each machine.
    """
    spaces: list[SpaceSummary] = field(default_factory=list)
    rejections: Counter[str] = field(default_factory=Counter)
    errors: list[HpToolError] = field(default_factory=list)
    not_ranked: list[NotRanked] = field(default_factory=list)
    beyond: list[tuple[float, Query, Machine]] = field(default_factory=list)
    """Machines that cannot meet the deadline or budget at any achievable throughput. The first item
    is the shortest possible step time divided by the longest permitted one.
    """
    failing: list[tuple[Machine, str, str]] = field(default_factory=list)
    """Machines whose layouts could not be predicted, with error code and message. Some fail only
    with certain numbers of devices.
    """
    lacking: list[tuple[Machine, str, str]] = field(default_factory=list)
    """Machines without an acceptable configuration, with reason code and message."""
    with_rows: set[int] = field(default_factory=set)
    """The `id()` of each machine that has a row."""
    seconds: float = 0.0

    def add(self, machine: Machine) -> None:
        """Rank the layouts of a machine for each number of devices to try."""
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
        """Rank the layouts of a machine with increasing numbers of devices, until more devices
        cannot meet the limits or enough rows are acceptable.
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
            elif acceptable:  # Too expensive, or more devices than the batch can be split over.
                return
            elif (
                row is not None
                and longest is not None
                and (days := _training_days(row)) is not None
            ):
                fewest = MIN_SCALING_FACTOR * count * days / longest
            elif row is not None and longest is None and row.cost is not None:
                if row.cost >= cheapest:  # Over budget, and more devices would only cost more.
                    return
                cheapest = row.cost

    @contextmanager
    def recording_errors(self, machine: Machine) -> Iterator[None]:
        """Record an error of one machine as a rejection, so that the other machines are still
        ranked.

        Raises:
            NotFoundError: A name is unknown.
            InputError: `request_too_costly`.
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
        """Return the best row of a machine or, without an acceptable one, its nearest miss; None if
        no layout is legal or can meet the limits.
        """
        first: Ranking[Any] = Ranking()
        with self.recording_errors(machine), bounds.repeat_search():
            if (beyond := _deadline_excess(query)) > 1.0:
                self.beyond.append((beyond, query, machine))
                return None
            first = self._first(query)
        return self._add_first_row(first, query, machine)

    def end(self) -> None:
        """Fill `not_ranked` with the machines that have no row.

        If there is neither a row nor a miss, first rank the machines that exceed the limits least,
        so that the answer contains nearest misses.
        """
        beyond = sorted(self.beyond, key=lambda each: each[0])
        if not self.rows and not self.misses:
            for _, query, machine in beyond[:NUM_NEAREST]:
                with self.recording_errors(machine), bounds.repeat_search():
                    self._add_first_row(self._first(query), query, machine)
        lacking = [
            *self.lacking,
            *((machine, "target_missed", TOO_SLOW_REASON) for _, _, machine in beyond),
        ]
        listed = set(self.with_rows)
        for machine, code, message in (*self.failing, *(lacking if self.rows else ())):
            if id(machine) not in listed:
                listed.add(id(machine))
                self.not_ranked.append(NotRanked(cluster=machine.name, code=code, message=message))

    def _add_first_row(self, first: Ranking[Any], query: Query, machine: Machine) -> Row | None:
        """Return the first row of a machine's ranking with its cost, and append it to `rows` or
        `misses`; None if the ranking is empty.
        """
        acceptable = bool(first.recommendations)
        row = next(iter(first.recommendations or first.nearest_misses), None)
        if row is None:
            self.lacking.append((machine, "no_configuration", "no layout is legal on this machine"))
            return None
        configuration = Configuration.from_row(row, query=query)
        estimate, calibrated = self.problem_of_machine(configuration.query).estimate(
            with_fixes=False, calibrations=self.calibrations
        )
        assert isinstance(configuration.query.cluster, ClusterQuery)
        priced: Row = replace(
            row,
            set={CLUSTER: _cluster_mapping(configuration.query.cluster)}
            | {path: row.set[path] for path in row.set if path != NUM_GPUS},
            estimate=estimate,
            calibrated_estimate=calibrated,
            group=None,
        )
        priced = with_price(
            priced,
            query=query,
            spec=catalog.cluster(configuration.query.cluster),
            date=machine.date,
        )
        if acceptable:
            self.rows.append(priced)
            self.with_rows.add(id(machine))
            return priced
        self.misses.append(priced)
        if reason := next(iter(priced.preferred_estimate.reasons), None):
            self.lacking.append((machine, reason.code, reason.message))
        return priced

    def _first(self, query: Query) -> Ranking[Any]:
        """Return a ranking of a machine's layouts that has a single row.

        Machines that differ only in name and grid share the ranking. So do machines that differ in
        price, unless the query limits or minimizes the cost.
        """
        spec = catalog.cluster(query.with_most_devices().cluster)
        counts_money = query.constraints.max_cost is not None or query.objective == "cost"
        shared = replace(spec, name="", grid_carbon_kg_per_kwh=None)
        key = repr(shared if counts_money else replace(shared, price_per_gpu_hour=None))
        if key not in self.known:
            ranking = self.known[key] = self.problem_of_machine(query).rank(
                top=1, calibrations=self.calibrations
            )
            self.spaces.append(ranking.space)
            self.rejections.update(ranking.rejections)
        return self.known[key]

    def first(self, top: int) -> Ranking[Any]:
        """Return the best `top` rows so far, ranked by the query's objective."""
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
        """Return the row with the full estimate of its configuration, including fixes."""
        configuration = Configuration.from_row(row, query=self.query)
        estimate, calibrated = self.problem_of_machine(configuration.query).estimate(
            calibrations=self.calibrations
        )
        return replace(row, estimate=estimate, calibrated_estimate=calibrated)

    def front(self) -> tuple[Recommendation, ...] | None:
        """Return the Pareto-optimal rows in days and cost, cheapest first; None for serving, and
        without days or prices.
        """
        rows = {id(row): row for row in (*self.rows, *self.tried)}.values()
        trainings = [
            row
            for row in rows
            if isinstance(row, Recommendation)
            and row.cost is not None
            and _training_days(row) is not None
        ]
        optimal: list[Recommendation] = []
        for row in sorted(trainings, key=lambda row: (row.cost, _training_days(row))):
            if not optimal or (_training_days(row) or 0.0) < (_training_days(optimal[-1]) or 0.0):
                optimal.append(row)
        return tuple(_with_ranks(optimal)) or None


@contextmanager
def _machine_progress(number: int, count: int) -> Iterator[None]:
    """Add the number of machines ranked so far to a `request_too_costly` error."""
    try:
        yield
    except InputError as error:
        if error.code != "request_too_costly":
            raise
        message = f"after {number} of {count} machines: {error.message}, or list fewer machines"
        raise InputError(message, field=CLUSTER, code=error.code) from error


def _deadline_excess(query: Query) -> float:
    """Return the shortest possible step time (`usual_settings.least_step_s`) divided by the longest
    one that meets the deadline and budget.

    Return 0 without a deadline or budget, for serving, and if the query lists values of `training`.
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
    return {
        name: value for name, value in schema.to_dict(cluster).items() if value not in (None, ())
    }


def _training_days(row: Row) -> float | None:
    return row.preferred_estimate.calendar_days if isinstance(row, Recommendation) else None


def _sort_key(row: Row, query: Query) -> tuple[float, ...]:
    """Return the sort key of a row.

    Rows are sorted by the query's objective or, without one, by cost. If the query limits the cost,
    they are sorted by days instead. Ties are sorted by the other of the two.
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
    if days is None:  # Without total_tokens, compare time and cost per token.
        days = row.expected_token_s or math.inf
        cost = math.inf if row.price is None else row.price * row.set[CLUSTER]["num_gpus"] * days
    if query.objective == "min_gpus":
        return (float(row.set[CLUSTER]["num_gpus"]), cost, days)
    return (days, cost) if by_days else (cost, days)


def _limit_excess(row: Row, query: Query) -> float:
    """Return the larger of days / max_days and cost / max_cost of a training run; 0 for serving."""
    limits = query.constraints
    values = ((_training_days(row), limits.max_days), (row.cost, limits.max_cost))
    return max(
        (value / limit for value, limit in values if value is not None and limit), default=0.0
    )


def with_price(row: Any, *, query: Query, spec: ClusterSpec, date: str | None) -> Any:
    """Return the row with the name, price, network and cost of its machine."""
    price, cluster = spec.price_per_gpu_hour, query.cluster
    assert isinstance(cluster, ClusterQuery)  # Set when the machines were listed.
    between_nodes = spec.num_gpus > spec.nvlink_domain_size
    stated = (
        cluster.node_type is not None or cluster.inter_node_bandwidth_bytes_per_second is not None
    )
    machine_values: dict[str, Any] = {
        "cluster": spec.name,
        "price": price,
        "price_date": date,
        "network_bandwidth_bytes_per_second": spec.inter_node_bandwidth_bytes_per_second
        if between_nodes
        else None,
        "network_assumed": between_nodes and not stated,
    }
    if isinstance(row, ServingRecommendation):
        return replace(row, **machine_values, cost=None if price is None else price * spec.num_gpus)
    return replace(with_training_totals(row, query=query), **machine_values)


def with_training_totals(row: Recommendation, *, query: Query) -> Recommendation:
    """Return the row with cost, energy, emissions and days of the whole training run, and the
    probability of meeting the deadline.
    """
    estimate, max_days, days = (
        row.preferred_estimate,
        query.constraints.max_days,
        figures.CALENDAR.interval_in(row.preferred_estimate),
    )
    return replace(
        row,
        cost=estimate.cost,
        energy=estimate.energy,
        co2_kg=estimate.co2_kg,
        days_interval=days,
        cost_interval=figures.COST.interval_in(estimate),
        deadline_probability=None
        if days is None or max_days is None
        else deadline_probability(estimate, max_days=max_days),
    )


NUM_QUADRATURE_NODES = 64
"""Number of equally likely durations that represent the uncertainty of a training run's
duration.
"""


def deadline_probability(estimate: Estimate, *, max_days: float) -> float:
    """Return the probability that a training run ends within a number of calendar days.

    The duration without failures is log-normal. Its standard deviation follows from the side of the
    step-time interval on which the deadline lies. Failures are distributed as in the estimate's
    goodput.
    """
    days, goodput = estimate.days, estimate.goodput
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
    if goodput is None:
        return float(np.mean(lengths_s <= limit_s))
    stretches = days * SECONDS_PER_DAY / goodput.checkpoint_interval_s
    seconds, probability = lost_s(
        stretches=stretches,
        interval_s=goodput.checkpoint_interval_s,
        checkpoint_s=goodput.checkpoint_s,
        restart_s=goodput.restart_s,
        mtbf_s=goodput.mtbf_s,
    )
    busy_s = (
        1.0 + goodput.checkpoint_s / goodput.checkpoint_interval_s
    )  # Time per second of training, including its share of checkpoints.
    spare_s = limit_s * (days * SECONDS_PER_DAY / lengths_s) - days * SECONDS_PER_DAY * busy_s
    return float(
        np.mean(np.interp(spare_s, seconds, np.minimum(np.cumsum(probability), 1.0), left=0.0))
    )
