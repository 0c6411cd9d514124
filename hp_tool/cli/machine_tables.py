"""Terminal tables of a ranking of machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_tool.cli.layout import make_console, print_columns
from hp_tool.cli.serving_tables import print_assumptions
from hp_tool.cli.tables import print_nearest, print_rejections, print_space
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.wording import rankings
from hp_tool.wording.columns import Column, configuration_columns, serving_columns, terminal_columns
from hp_tool.wording.words import machines_heading as heading

if TYPE_CHECKING:
    from hp_tool.domain.query import Kind, Query
    from hp_tool.questions.answers import RecommendAnswer

MAX_NOTES = 12
"""Maximum number of reasons listed for machines that were not ranked."""
Rows = Sequence[Recommendation] | Sequence[ServingRecommendation]


def print_machines(answer: RecommendAnswer, query: Query) -> None:
    """Print the cost and time on each machine, and the Pareto front of cost and days."""
    console = make_console()
    rows = answer.recommendations
    if rows:
        print_columns(console, _machine_columns(rows, query.kind), title=heading(query))
        if days := sorted({row.price_date for row in rows if row.price_date}):
            between = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
            console.print(
                f"Prices are from {between}; the price list has their sources. Check them "
                f"before you "
                "sign a contract.",
                highlight=False,
            )
    print_assumptions(
        console,
        [
            row.preferred_estimate.provenance
            for row in rows
            if isinstance(row, ServingRecommendation)
        ],
    )
    if answer.pareto and len(answer.pareto) > 1:
        print_columns(
            console,
            _machine_columns(answer.pareto, query.kind),
            title="Pareto front: no other machine costs less and takes fewer days",
            legend=False,
        )
    print_space(console, answer)
    print_nearest(console, answer.nearest_misses, query=query)
    print_rejections(console, answer)
    messages = dict.fromkeys(each.message for each in answer.not_ranked)
    for message in list(messages)[:MAX_NOTES]:
        names = ", ".join(each.cluster for each in answer.not_ranked if each.message == message)
        console.print(
            f"not ranked: {names}: {message}", highlight=False, markup=False, soft_wrap=True
        )
    if len(messages) > MAX_NOTES:
        console.print(f"and {len(messages) - MAX_NOTES} more reasons (see --json)")


def _machine_columns(rows: Rows, kind: Kind) -> list[Column]:
    """Return the columns for machines, cost and days, followed by those of the layouts. Without
    days, include the metrics of the layouts.
    """
    columns = terminal_columns(rankings.MACHINES[kind], rows)
    servings = [row for row in rows if isinstance(row, ServingRecommendation)]
    if servings:
        return [
            *columns,
            *serving_columns(servings),
            *terminal_columns(rankings.SERVING_FIGURES, rows),
        ]
    trainings = [row for row in rows if isinstance(row, Recommendation)]
    columns += configuration_columns([row.parallel for row in trainings])
    if any(row.preferred_estimate.calendar_days is not None for row in trainings):
        return columns
    return [*columns, *terminal_columns(rankings.TRAINING_FIGURES, rows)]
