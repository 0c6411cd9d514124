"""What the searches of a simulated history ask, and the study that proposes: a few configurations,
one after the other.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.records import RunRecord
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.problem import SearchProblem
from tests.search.search_engine import make_problem

CONFIGURATIONS = 3


class Small(SearchProblem):
    """A search among a few configurations, of which nothing is predicted."""

    def predicted(self, **_: object) -> dict[str, Any]:
        return {
            "step_s": 1.0,
            "calibrated_step_s": 1.0,
            "chosen_by": "order",
            "hold_probability": 1.0,
        }


@cache
def problem(**search: Any) -> Small:
    whole = make_problem(min_gain_fraction=0.0, run_timeout_s=60.0, **search)
    return Small(**{name: getattr(whole, name) for name in whole.__dataclass_fields__})


@cache
def configurations() -> tuple[str, ...]:
    return tuple(
        configuration_digest(parallel=problem().candidates.config(row))
        for row in range(CONFIGURATIONS)
    )


class InOrder:
    """In place of Optuna's study: proposes what was not tried yet, row by row."""

    study = None
    sampler = SimpleNamespace(calibration=lambda study: SimpleNamespace(summary=dict))

    def sync(self, runs: list[RunRecord]) -> None:
        tried = {run.digest for run in runs}
        self._next = next(
            (row for row, digest in enumerate(configurations()) if digest not in tried), None
        )

    def proposal(self) -> Proposal | None:
        return (
            None
            if self._next is None
            else Proposal(
                row=self._next, expected_gain=1.0, reason="coverage", hold_probability=1.0
            )
        )

    def ask(self) -> tuple[object, int | None]:
        return object(), self._next

    def bind(self, **_: object) -> None:
        """There is nothing to keep."""
