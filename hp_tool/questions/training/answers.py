"""Answer training queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hp_tool.cost.uncertainty import ratio_log_sd, step_log_sd
from hp_tool.domain.additions import AnswerAdditions
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Front, Ranking, Recommendation
from hp_tool.errors import UnsupportedError
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.calibrated import Calibrations, with_unused_reason
from hp_tool.questions.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.questions.training.narrowest import with_narrowest
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.recommend import pareto_front, recommend
from hp_tool.questions.training.sensitivity import sensitivity as sensitivity_of
from hp_tool.questions.training.usual_settings import with_usual_settings
from hp_tool.questions.training.with_recipe import with_recipe_figure

if TYPE_CHECKING:
    from hp_tool.domain.setups import TrainingSetup


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training query that can be answered; implements `questions.problem.Problem`."""

    query: Query
    resolved: ResolvedConfiguration | None = None
    """The query's single configuration, if it was already resolved or costed."""

    @cached_property
    def configuration(self) -> ResolvedConfiguration:
        return self.resolved or resolve_configuration(self.query)

    def estimate(
        self, *, with_fixes: bool = True, calibrations: Calibrations | None = None
    ) -> tuple[Estimate, Estimate | None]:
        """Return the estimate with the usual settings that the query omits, and the calibrated
        estimate.

        With `with_fixes`, an estimate also contains the setting that would narrow its interval most
        and the step time with the current recipe. A calibrated estimate contains only the latter.
        If no calibration applies, the provenance of the estimate contains the reason.
        """
        problem = self.configuration.problem
        estimate = asked = self.configuration.estimate(with_fixes=False)
        calibrated = self.configuration.calibrated_estimate(calibrations)
        if calibrated is None:
            estimate = with_usual_settings(
                asked, query=self.query, problem=problem, with_fixes=with_fixes
            )
        if estimate is asked and with_fixes and not asked.feasible:
            estimate = self.configuration.estimate()
        if with_fixes and calibrated is None:
            estimate = with_narrowest(estimate, query=self.query, problem=problem)
            estimate = with_recipe_figure(estimate, query=self.query, problem=problem)
        elif with_fixes and calibrated is not None:
            calibrated = with_recipe_figure(
                calibrated, query=self.query, problem=problem, calibrations=calibrations
            )
        if calibrated is None and calibrations is not None:
            estimate = with_unused_reason(estimate, problem=problem, calibrations=calibrations)
        return estimate, calibrated

    def rank(
        self, *, top: int, calibrations: Calibrations | None = None
    ) -> Ranking[Recommendation]:
        return recommend(query=self.query, top=top, calibrations=calibrations)

    def answer(
        self,
        *,
        top: int,
        pareto: Front | None = None,
        sensitivity: bool = False,
        calibrations: Calibrations | None = None,
    ) -> tuple[Ranking[Recommendation], AnswerAdditions]:
        if pareto == "throughput":
            raise UnsupportedError(
                "the throughput front is for inference queries only; use memory or gpus",
                field="pareto",
            )
        ranking = self.rank(top=top, calibrations=calibrations)
        shown = tuple(self._explained(row, calibrations) for row in ranking.recommendations)
        front = (
            None
            if pareto is None
            else pareto_front(query=self.query, against=pareto, calibrations=calibrations)
        )
        depends = None
        if sensitivity:
            first = next(iter(shown), None)
            depends = sensitivity_of(self.query, first=first, calibrations=calibrations)
        return replace(ranking, recommendations=shown), AnswerAdditions(
            pareto=front, sensitivity=depends
        )

    def _explained(self, row: Recommendation, calibrations: Calibrations | None) -> Recommendation:
        one = Configuration.from_row(row, query=self.query).query
        if row.calibrated_estimate is not None:
            if row.rank > 1:
                return row
            calibrated = with_recipe_figure(
                row.calibrated_estimate, query=one, calibrations=calibrations
            )
            return replace(row, calibrated_estimate=calibrated)
        estimate = with_narrowest(row.estimate, query=one)
        return replace(
            row, estimate=with_recipe_figure(estimate, query=one) if row.rank == 1 else estimate
        )

    def ratio_log_sd(self, one: Estimate, other: Estimate, *, alike: bool) -> float:
        problem = self.configuration.problem
        if not alike:
            return math.sqrt(2.0) * step_log_sd(case=problem)
        features = [
            set(each.familiarity.unmeasured) if each.familiarity else set() for each in (one, other)
        ]
        return float(ratio_log_sd(problem.profile, differing=len(features[0] ^ features[1])))

    def setup(self, configuration: Configuration) -> TrainingSetup:
        from hp_tool.questions.training.setup import training_setup

        assert isinstance(configuration.parallel, ParallelConfig)  # This is a training query.
        return training_setup(resolve_training(configuration.query), configuration.parallel)
