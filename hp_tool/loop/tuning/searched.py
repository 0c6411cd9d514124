"""A search's question for the cost model and for the search itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.query import Query
from hp_tool.loop.calibration import Calibration, Evidence, Prior
from hp_tool.loop.learning.series import Series
from hp_tool.loop.search.problem import Question

if TYPE_CHECKING:
    from hp_tool.loop.tuning.result import Account, TuneResult


@dataclass(frozen=True, kw_only=True)
class Searched(ABC):
    """Inputs of a search and functions of its runs; implemented for trainings and deployments."""

    query: Query
    search: Question
    prior: Prior
    series: Series
    """Series of the calibration that the search uses and updates."""

    @property
    @abstractmethod
    def legal(self) -> int:
        """Return the number of legal candidates."""

    def launched(self, launcher: Launcher) -> Launcher:
        """Return the launcher of the search's runs."""
        return launcher

    @abstractmethod
    def evidence(
        self, store: Store, *, series: Series, without_search: str | None = None
    ) -> Evidence:
        """Return evidence from stored runs of a series, without those of one search."""

    @abstractmethod
    def keep(self, store: Store) -> None:
        """Store the calibration fitted to the series' runs."""

    @abstractmethod
    def result(
        self, store: Store, *, calibration: Calibration, account: Account, owner: str
    ) -> TuneResult:
        """Rank and describe by `calibration` and the account's runs, at any moment of a search.

        Held runs of `owner`, the search's, count for its result.
        """
