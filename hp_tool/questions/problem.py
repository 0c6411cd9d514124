"""What a query asks, whether about training or serving: doors call its members and need not know
which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hp_tool.catalog.hardware import names_several
from hp_tool.domain.beside import Beside
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Front, Ranking
from hp_tool.domain.serving import InferenceEstimate

if TYPE_CHECKING:
    from hp_tool.domain.setups import ServingSetup, TrainingSetup
    from hp_tool.questions.configuration import Configuration
    from hp_tool.questions.training.calibrated import Calibrations
    from hp_tool.questions.training.evaluate import ResolvedConfiguration


class Problem(Protocol):
    """A query with its answers; `training.answers` and `serving.answers` make one each. All members
    raise HpToolError.
    """

    @property
    def query(self) -> Query: ...

    @property
    def configuration(self) -> ResolvedConfiguration | None:
        """The query's one training configuration, which can be costed together with others; None of
        serving.
        """

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> tuple[Estimate | InferenceEstimate, Estimate | None]:
        """The query's one configuration by the cost model, and corrected by what was measured on
        its cluster, if anything.
        """

    def rank(self, *, top: int, calibrations: Calibrations | None = None) -> Ranking[Any]:
        """The best of the configurations that the query allows."""

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[Any], Beside]:
        """The ranking as it is shown, with all that was asked for beside it."""

    def ratio_log_sd(self, one: Any, other: Any, *, alike: bool) -> float:
        """Standard deviation of ln(measured / predicted) of the ratio of two estimates' step times
        or throughputs. `alike`: they differ in their layout alone, so that what is wrong with the
        rest cancels.
        """

    def setup(self, configuration: Configuration) -> TrainingSetup | ServingSetup:
        """What other tools' files say of one of its configurations."""


def problem_of(query: Query, *, configuration: ResolvedConfiguration | None = None) -> Problem:
    """Return the problem of a query; `configuration`: its one configuration, if that was resolved
    or costed earlier.
    """
    if names_several(query.cluster) is not None:
        from hp_tool.questions.machines.answers import Machines

        return Machines(query=query, of_one=problem_of)
    if query.kind == "inference":
        from hp_tool.questions.serving.answers import Serving

        return Serving(query=query)
    from hp_tool.questions.training.answers import Training

    return Training(query=query, resolved=configuration)
