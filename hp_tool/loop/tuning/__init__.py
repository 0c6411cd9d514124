"""Tuning: run a search from its stored query to its ranked answer.

Searches run in the command line's process or in a worker.
"""

from hp_tool.loop.tuning.clusters import Sweeper, create_launcher, daily_limits, within_limits
from hp_tool.loop.tuning.offers import check_offered, find_offers, offers_in_words
from hp_tool.loop.tuning.result import SearchSummary, TuneResult
from hp_tool.loop.tuning.retention import prune, retention_settings
from hp_tool.loop.tuning.run import resolve_search, run_search, tune
from hp_tool.loop.tuning.study import study_storage

__all__ = [
    "SearchSummary",
    "Sweeper",
    "TuneResult",
    "check_offered",
    "create_launcher",
    "daily_limits",
    "find_offers",
    "offers_in_words",
    "prune",
    "resolve_search",
    "retention_settings",
    "run_search",
    "study_storage",
    "tune",
    "within_limits",
]
