"""Common interface of training and serving queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hp_tool.catalog.hardware import machine_list_field
from hp_tool.domain.additions import AnswerAdditions
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Front, Ranking
from hp_tool.domain.serving import InferenceEstimate

if TYPE_CHECKING:
    from hp_tool.domain.setups import ServingSetup, TrainingSetup
    from hp_tool.questions.configuration import Configuration
    from hp_tool.questions.training.calibrated import Calibrations
    from hp_tool.questions.training.evaluate import ResolvedConfiguration


class Problem(Protocol):
    """A training or serving query that can be answered. `training.answers` and `serving.answers`
    implement it.

    All members raise HpToolError.
    """

    @property
    def query(self) -> Query: ...

    @property
    def configuration(self) -> ResolvedConfiguration | None:
        """Return the single configuration of a training query, so that it can be costed together
        with others; None for serving.
        """

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> tuple[Estimate | InferenceEstimate, Estimate | None]:
        """Return the estimate of the query's configuration and, if there are measurements, the
        calibrated estimate.
        """

    def rank(self, *, top: int, calibrations: Calibrations | None = None) -> Ranking[Any]:
        """Return the best configurations for the query."""

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[Any], AnswerAdditions]:
        """Return the ranking and all requested additions, for display."""

    def ratio_log_sd(self, one: Any, other: Any, *, alike: bool) -> float:
        """Return the standard deviation of ln(measured / predicted) of the ratio of two estimates.

        The ratio is that of step times or throughputs. With `alike`, the estimates differ only in
        their layouts, so that the errors that both share cancel.
        """

    def setup(self, configuration: Configuration) -> TrainingSetup | ServingSetup:
        """Return the setup of a configuration of this query. Exporters write it as files for other
        tools.
        """


def problem_of(query: Query, *, configuration: ResolvedConfiguration | None = None) -> Problem:
    """Return the problem of a query.

    `configuration` is the query's single configuration, if it was already resolved or costed.
    """
    if machine_list_field(query.cluster) is not None:
        from hp_tool.questions.machines.answers import Machines

        return Machines(query=query, problem_of_machine=problem_of)
    if query.kind == "inference":
        from hp_tool.questions.serving.answers import Serving

        return Serving(query=query)
    from hp_tool.questions.training.answers import Training

    return Training(query=query, resolved=configuration)
