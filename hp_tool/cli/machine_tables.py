"""A ranking over several machines as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.cli.serving_tables import print_assumptions
from hp_tool.cli.tables import print_nearest, print_rejections, print_space, rank_column
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.domain.units import JOULES_PER_MWH, SECONDS_PER_HOUR, decimal
from hp_tool.wording import figures
from hp_tool.wording.columns import (
    ABSENT,
    Column,
    configuration_columns,
    figure_column,
    percents,
    serving_columns,
    serving_figures,
    training_figures,
)
from hp_tool.wording.words import machines_heading as heading

if TYPE_CHECKING:
    from hp_tool.domain.query import Query
    from hp_tool.questions.answers import RecommendAnswer

MOST_NOTES = 12
"""Reasons why machines have no row, in a table."""
Rows = Sequence[Recommendation] | Sequence[ServingRecommendation]


def print_machines(answer: RecommendAnswer, query: Query) -> None:
    """What each machine costs and takes, and the front between money and days."""
    console = make_console()
    rows = answer.recommendations
    if rows:
        print_columns(console, _columns(rows), title=heading(query))
        if days := sorted({row.price_date for row in rows if row.price_date}):
            between = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
            console.print(
                f"prices of {between}, each with its page in the price list: ask again before you "
                "sign",
                highlight=False,
            )
    print_assumptions(
        console, [row.known.provenance for row in rows if isinstance(row, ServingRecommendation)]
    )
    if answer.pareto and len(answer.pareto) > 1:
        print_columns(
            console,
            _columns(answer.pareto),
            title="no other costs less and takes fewer days",
            legend=False,
        )
    print_space(console, answer)
    print_nearest(console, answer.nearest_misses)
    print_rejections(console, answer)
    messages = dict.fromkeys(each.message for each in answer.not_ranked)
    for message in list(messages)[:MOST_NOTES]:
        names = ", ".join(each.cluster for each in answer.not_ranked if each.message == message)
        console.print(f"no row: {names}: {message}", highlight=False, markup=False, soft_wrap=True)
    if len(messages) > MOST_NOTES:
        console.print(f"and {len(messages) - MOST_NOTES} more, which --json names")


def _columns(rows: Rows) -> list[Column]:
    """Ranks, machines, money and days, then the layouts."""
    trainings = [row for row in rows if isinstance(row, Recommendation)]
    servings = [row for row in rows if isinstance(row, ServingRecommendation)]
    machines = [
        rank_column(list(rows)),
        Column(head="machine", cells=tuple(row.cluster or ABSENT for row in rows), left=True),
        Column(head="GPUs", cells=tuple(str(row.known.provenance["num_gpus"]) for row in rows)),
        *_network(rows),
        Column(
            head="price",
            unit="$/GPU-h",
            cells=tuple(_money(row.price, places=2) for row in rows),
            drop=2,
        ),
    ]
    if servings:
        hourly = Column(
            head="cost", unit="$/h", cells=tuple(_money(row.cost, places=2) for row in rows)
        )
        return [
            *machines,
            hourly,
            *serving_columns(servings),
            *serving_figures([row.known for row in servings]),
        ]
    estimates = [row.known for row in trainings]
    if all(each.calendar_days is None for each in estimates):
        per_token_s = [
            1.0 / rate if (rate := row.known.tokens_per_second_per_gpu) else math.inf
            for row in trainings
        ]
        cost = [
            None if row.price is None else row.price / SECONDS_PER_HOUR * 1e9 for row in trainings
        ]
        cells = tuple(
            ABSENT if each is None else _money(each * token_s)
            for each, token_s in zip(cost, per_token_s, strict=True)
        )
        machines.append(Column(head="cost", unit="$/G tokens", cells=cells))
        return [
            *machines,
            *configuration_columns([row.parallel for row in trainings]),
            *training_figures(estimates),
        ]
    shown = [
        *machines,
        Column(head="cost", unit="$", cells=tuple(_money(row.cost) for row in rows)),
        Column(
            head="interval",
            unit="90%, $",
            cells=tuple(_between(row.cost_interval) for row in rows),
            drop=3,
        ),
        figure_column(figures.CALENDAR, estimates),
        Column(
            head="interval",
            unit="90%, days",
            cells=tuple(_days(row.days_interval) for row in rows),
            drop=4,
        ),
        Column(
            head="in time",
            unit="%",
            meaning="chance of ending within max_days",
            cells=percents(row.deadline_probability for row in rows),
            drop=1,
        ),
        Column(
            head="energy",
            unit="MWh",
            drop=8,
            cells=tuple(
                ABSENT if row.energy is None else decimal(row.energy / JOULES_PER_MWH)
                for row in rows
            ),
        ),
        Column(
            head="CO2",
            unit="t",
            drop=7,
            cells=tuple(
                ABSENT if row.co2_kg is None else decimal(row.co2_kg / 1e3) for row in rows
            ),
        ),
        *configuration_columns([row.parallel for row in trainings]),
    ]
    return [column for column in shown if set(column.cells) != {ABSENT}]


def _network(rows: Rows) -> list[Column]:
    """Return the bandwidth between nodes and whether it is assumed; no column if every row uses one
    NVLink domain.
    """
    rates = [row.network_bandwidth_bytes_per_second for row in rows]
    if all(rate is None for rate in rates):
        return []
    cells = (
        ABSENT
        if rate is None
        else f"{decimal(rate / 1e9)}{' assumed' if row.network_assumed else ''}"
        for row, rate in zip(rows, rates, strict=True)
    )
    meaning = (
        "between nodes, per GPU; assumed: the usual network of this GPU, because neither "
        "price list nor query states one"
    )
    return [
        Column(
            head="network",
            unit="GB/s",
            cells=tuple(cells),
            meaning=meaning if any(r.network_assumed for r in rows) else "",
        )
    ]


def _money(value: float | None, *, places: int = 0) -> str:
    return ABSENT if value is None else f"{value:,.{places}f}"


def _between(ends: tuple[float, float] | None) -> str:
    return ABSENT if ends is None else f"{ends[0]:,.0f}-{ends[1]:,.0f}"


def _days(ends: tuple[float, float] | None) -> str:
    return ABSENT if ends is None else f"{decimal(ends[0])}-{decimal(ends[1])}"
