"""Answer of the explorer page for several machines, ranked by cost and days."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hp_tool.catalog.prices import offers
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.prices import NotRanked
from hp_tool.domain.query import Kind, Query
from hp_tool.questions.answers import RecommendAnswer, answer_recommend
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.wording.rankings import MACHINES as COLUMNS
from hp_tool.wording.rankings import Table
from hp_tool.wording.words import machines_heading
from service.api.bodies import resolve_names
from service.dashboard.ask_question import NUM_GPUS, Question
from service.dashboard.figures import Figure
from service.dashboard.machine_rows import (
    MachineRow,
    days_and_dollars,
    machine_rows,
    machine_verdict,
)
from service.dashboard.run import Way, as_text

TOP = 40
"""Number of listed machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesAnswer:
    """A ranking of machines, with the best configuration of each."""

    kind: Kind
    heading: str
    verdict: tuple[str, ...]
    rows: tuple[MachineRow, ...]
    misses: tuple[MachineRow, ...]
    """Nearest misses, if no machine meets the limits."""
    not_ranked: tuple[NotRanked, ...]
    figure: Figure | None
    """Days against dollars, for plot.js."""
    legal: int
    pruned: int
    commands: tuple[Way, ...]
    enough: tuple[str, ...] = ()
    """Machines that would meet the limits with more GPUs, in words, if no number of GPUs in the
    query does.
    """
    enough_href: str | None = None
    """URL of the query with an unrestricted number of GPUs."""

    @property
    def table(self) -> Table:
        """The machines with their columns."""
        return Table(columns=COLUMNS[self.kind], rows=self.rows or self.misses)


def machines_answer(
    query: Query,
    *,
    question: Question,
    find: Find,
    calibrations: Calibrations | None,
    server: str,
) -> MachinesAnswer:
    """Return the answer to a query as typed.

    Raises:
        HpToolError: The query cannot be answered.
    """

    def ranked(asked: Query) -> MachinesAnswer:
        answer = answer_recommend(
            resolve_names(asked, find=find), top=TOP, calibrations=calibrations
        )
        return _answer(asked, answer, server=server)

    answer = ranked(query)
    limits, values = query.constraints, question.values
    if answer.rows or NUM_GPUS not in values or (limits.max_days or limits.max_cost) is None:
        return answer
    free = {path: text for path, text in values.items() if path != NUM_GPUS}
    enough = ranked(_with_any_number(query))
    if not enough.rows:
        return answer
    return replace(answer, enough=enough.verdict, enough_href=Question(values=free).href())


def _with_any_number(query: Query) -> Query:
    """Return the query with as many GPUs of each machine as its limits require."""
    clusters = query.cluster if isinstance(query.cluster, tuple) else (query.cluster,)
    several: Any = tuple(
        replace(each, num_gpus=None) if isinstance(each, ClusterQuery) else each
        for each in clusters
    )
    return replace(query, cluster=several)


def _answer(query: Query, answer: RecommendAnswer, *, server: str) -> MachinesAnswer:
    front = {
        (row.cluster, row.preferred_estimate.provenance.get("num_gpus"))
        for row in answer.pareto or ()
    }
    by_name = {offer.name: offer for offer in offers()}
    rows = tuple(machine_rows(answer.recommendations, query=query, prices=by_name, front=front))
    misses = tuple(machine_rows(answer.nearest_misses, query=query, prices=by_name, front=set()))
    between = tuple(machine_rows(answer.pareto or (), query=query, prices=by_name, front=front))
    return MachinesAnswer(
        kind=query.kind,
        heading=machines_heading(query),
        verdict=tuple(machine_verdict(rows, between, misses, query)),
        rows=rows,
        misses=misses,
        not_ranked=answer.not_ranked,
        figure=days_and_dollars(rows, between, query),
        legal=answer.space.legal,
        pruned=answer.space.pruned,
        commands=as_text(query, server=server),
    )
