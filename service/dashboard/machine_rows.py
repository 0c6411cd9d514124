"""Comparison of machines: rows, verdict, and a plot of days against cost."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.prices import Offer
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.wording.figures import PER_MILLION
from hp_tool.wording.words import machines_heading
from service.api.views import View
from service.dashboard import formats
from service.dashboard.figures import Figure, line, markers
from service.dashboard.ranking import RankedRow, ranked_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The cost of a machine, and its source."""

    per_gpu_hour: float
    date: str | None = None
    """Date of the price; None for a price from the query or the GPU catalogue."""
    age_days: int | None = None
    line: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow(View):
    """The best configuration of a machine, and its cost."""

    machine: str
    num_gpus: int
    network_bandwidth_bytes_per_second: float | None
    """Network bandwidth between nodes, per GPU; None if the configuration stays within one NVLink
    domain.
    """
    network_assumed: bool
    """Whether the network is assumed, because neither the query nor the price list names it."""
    price: Price | None
    cost: float | None
    """US dollars for the training, or per hour of the service."""
    cost_interval: tuple[float, float] | None
    per_million_tokens: float | None
    """US dollars per million output tokens when serving; for training without a total, per million
    trained tokens.
    """
    per_million_interval: tuple[float, float] | None
    days: float | None
    days_interval: tuple[float, float] | None
    deadline_probability: float | None
    energy: float | None
    co2_kg: float | None
    configuration: RankedRow
    on_front: bool = False
    """Whether it is on the Pareto front of cost and days."""


def machine_rows(
    rows: Sequence[Recommendation] | Sequence[ServingRecommendation],
    *,
    query: Query,
    prices: Mapping[str, Offer],
    front: set[tuple[str | None, Any]],
) -> Iterator[MachineRow]:
    for row in rows:
        num_gpus = int(str(row.preferred_estimate.provenance["num_gpus"]))
        days = row.preferred_estimate.calendar_days if isinstance(row, Recommendation) else None
        yield MachineRow.of(
            row,
            machine=row.cluster or "",
            num_gpus=num_gpus,
            network_assumed=bool(row.network_assumed),
            price=_price(row, prices),
            per_million_tokens=row.cost_per_million_tokens
            if isinstance(row, Recommendation)
            else row.preferred_estimate.cost_per_million_output_tokens,
            per_million_interval=PER_MILLION.interval_in(row.preferred_estimate)
            if isinstance(row, ServingRecommendation)
            else None,
            days=days,
            configuration=ranked_row(row, query=query),
            on_front=(row.cluster, num_gpus) in front,
        )


def _price(
    row: Recommendation | ServingRecommendation, prices: Mapping[str, Offer]
) -> Price | None:
    if row.price is None:
        return None
    offer = prices.get(row.cluster or "")
    if row.price_date is None or offer is None:
        return Price(per_gpu_hour=row.price)
    age = (datetime.now(UTC).date() - date.fromisoformat(row.price_date)).days
    return Price(
        per_gpu_hour=row.price,
        date=row.price_date,
        age_days=age,
        line=offer.line,
        source=offer.source,
    )


def machine_verdict(
    rows: Sequence[MachineRow],
    front: Sequence[MachineRow],
    misses: Sequence[MachineRow],
    query: Query,
) -> Iterator[str]:
    """Return a sentence each about the cheapest and the fastest machine within the limits."""
    limits, every = query.constraints, (*rows, *front)
    within = [] if limits.max_days is None else [f"{limits.max_days:g} days"]
    within += [formats.dollars(limits.max_cost)] if limits.max_cost is not None else []
    kept = f" within {' and '.join(within)}" if within else ""
    if not every:
        yield (
            f"No machine finishes{kept}."
            if kept
            else "No configuration meets the constraints on any of these machines."
        )
        priced = [row for row in misses if row.cost is not None and row.days is not None]
        if priced:
            nearest = min(priced, key=lambda row: row.cost or 0.0)
            yield f"Cheapest beyond the limits: {_machine_words(nearest)}{_cost_words(nearest)}."
        return
    timed = [row for row in every if row.days is not None and row.cost is not None]
    if not timed:
        yield (
            f"{machines_heading(query).capitalize()}: "
            f"{_machine_words(rows[0])}{_cost_words(rows[0])}{_target_words(query)}."
        )
        return
    cheapest = min(timed, key=lambda row: (row.cost or 0.0, row.days or 0.0))
    fastest = min(timed, key=lambda row: (row.days or 0.0, row.cost or 0.0))
    yield f"Cheapest{kept}: {_machine_words(cheapest)}{_cost_words(cheapest)}."
    same = (fastest.machine, fastest.num_gpus) == (cheapest.machine, cheapest.num_gpus)
    yield (
        "It is also the fastest."
        if same
        else f"Fastest{kept}: {_machine_words(fastest)}{_cost_words(fastest)}."
    )


def _machine_words(row: MachineRow) -> str:
    assumed = " over an assumed network" if row.network_assumed else ""
    return (
        f"{row.num_gpus:,} GPUs of {row.machine}{assumed}"
        if row.num_gpus > 1
        else f"1 GPU of {row.machine}"
    )


def _cost_words(row: MachineRow) -> str:
    if row.days is None or row.cost is None:
        if row.per_million_tokens is None:
            return ""
        dollars = _interval_words(row.per_million_interval, formats.dollars)
        tokens = "tokens" if row.configuration.ttft_s is None else "output tokens"
        return (
            f", {formats.dollars(row.per_million_tokens)}{dollars} per million "
            f"{tokens}{_latency_words(row.configuration)}"
        )
    dollars = _interval_words(row.cost_interval, formats.dollars)
    return (
        f", {formats.dollars(row.cost)}{dollars} and "
        f"{formats.days(row.days)}{_interval_words(row.days_interval, formats.number)}"
    )


def _latency_words(row: RankedRow) -> str:
    """Return `, 231 ms (180 ms to 290 ms) to the first token, ...`; empty for training."""
    known = (
        (row.ttft_s, row.ttft_s_interval, LATENCIES["ttft_s"].per),
        (row.tpot_s, row.tpot_s_interval, LATENCIES["tpot_s"].per),
    )
    return "".join(
        f", {formats.seconds(value)}{_interval_words(interval, formats.seconds)} {per}"
        for value, interval, per in known
        if value is not None
    )


def _target_words(query: Query) -> str:
    """Describe the targets that the ranked rows meet: `; it meets both targets`."""
    count = 0 if query.targets is None else len(list(query.targets.limits()))
    return (
        ""
        if not count
        else (
            "; it meets "
            f"{'its target' if count == 1 else 'both targets' if count == 2 else 'all targets'}"
        )
    )


def _interval_words(ends: tuple[float, float] | None, written: Any) -> str:
    return "" if ends is None else f" ({written(ends[0])} to {written(ends[1])})"


def days_and_dollars(
    rows: Sequence[MachineRow], front: Sequence[MachineRow], query: Query
) -> Figure | None:
    """Plot days against dollars with their intervals, and the Pareto front as a line."""
    traces = []
    for name, shown, marker in (
        ("Machines", rows, {"color": "--series-1", "size": 7}),
        (
            "Best trade-offs",
            front,
            {"color": "--series-3", "size": 9, "symbol": "ring"},
        ),
    ):
        known = [
            row
            for row in shown
            if row.days is not None and row.cost is not None and row.days_interval is not None
        ]
        if known:
            text = (
                f"{_machine_words(row)}\n{formats.dollars(row.cost or 0.0)}\n{formats.days(row.days or 0.0)}"  # noqa: E501
                for row in known
            )
            points = markers(
                name,
                x=(row.cost for row in known),
                y=(row.days for row in known),
                text=text,
                marker=marker,
            )
            ends = [[(row.days_interval or (0.0, 0.0))[end] for row in known] for end in (0, 1)]
            named = (
                {"labels": [f"{row.num_gpus:,} x {row.machine}" for row in known]}
                if shown is front
                else {}
            )
            traces.append(points | named | {"ends": ends})
    if not traces:
        return None
    joined = [row for row in front if row.cost is not None and row.days is not None]
    style = {"color": "--series-3", "width": 1, "plain": True}
    traces.append(
        line("", x=(row.cost for row in joined), y=(row.days for row in joined), style=style)
    )
    budget = query.constraints.max_cost
    return {
        "traces": traces,
        "x": {"title": "US dollars", "zero": True},
        "y": {"title": "Days", "zero": True},
        "shapes": [] if budget is None else [{"at": budget, "color": "--bad", "label": "budget"}],
    }
