"""A search's question at both levels: what the cost model takes, and what the search works on."""

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
    """What a search is made of and what follows from its runs; trainings and deployments have one
    each.
    """

    query: Query
    search: Question
    prior: Prior
    series: Series
    """Whose calibration the search takes up and leaves behind."""

    @property
    @abstractmethod
    def legal(self) -> int:
        """How many legal candidates the query has."""

    def launched(self, launcher: Launcher) -> Launcher:
        """Return the launcher of the search's runs."""
        return launcher

    @abstractmethod
    def evidence(
        self, store: Store, *, series: Series, without_search: str | None = None
    ) -> Evidence:
        """Return what stored runs of a series taught, those of one search left out."""

    @abstractmethod
    def keep(self, store: Store) -> None:
        """Store what the series' runs teach as its next calibration."""

    @abstractmethod
    def result(
        self, store: Store, *, calibration: Calibration, account: Account, owner: str
    ) -> TuneResult:
        """Rank and describe by `calibration` and the account's runs; possible at any moment of a
        search.

        `owner`: the search's, whose own doubted runs count for its result.
        """
