"""The common interface of training and serving queries."""

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
    """A training or serving query with its answers; `training.answers` and `serving.answers`
    implement it.

    All members raise HpToolError.
    """

    @property
    def query(self) -> Query: ...

    @property
    def configuration(self) -> ResolvedConfiguration | None:
        """Return the query's single training configuration, to be costed together with others; None
        for serving.
        """

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> tuple[Estimate | InferenceEstimate, Estimate | None]:
        """Return the estimate of the query's configuration, and the calibrated estimate if there
        are measurements.
        """

    def rank(self, *, top: int, calibrations: Calibrations | None = None) -> Ranking[Any]:
        """Return the best of the query's configurations."""

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[Any], AnswerAdditions]:
        """Return the ranking for display, with all requested additions."""

    def ratio_log_sd(self, one: Any, other: Any, *, alike: bool) -> float:
        """Return the standard deviation of ln(measured / predicted) for the ratio of two estimates.

        The ratio is of step times or throughputs. With `alike`, the two differ only in their
        layout, so other errors cancel.
        """

    def setup(self, configuration: Configuration) -> TrainingSetup | ServingSetup:
        """Return the setup of one of its configurations, from which other tools' files are
        written.
        """


def problem_of(query: Query, *, configuration: ResolvedConfiguration | None = None) -> Problem:
    """Return the problem of a query.

    `configuration` is its single configuration, if already resolved or costed.
    """
    if machine_list_field(query.cluster) is not None:
        from hp_tool.questions.machines.answers import Machines

        return Machines(query=query, problem_of_machine=problem_of)
    if query.kind == "inference":
        from hp_tool.questions.serving.answers import Serving

        return Serving(query=query)
    from hp_tool.questions.training.answers import Training

    return Training(query=query, resolved=configuration)
