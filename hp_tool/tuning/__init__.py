"""Tuning: a search from its stored query to its ranked answer, the same for the command line and for a worker."""

from hp_tool.tuning.result import SearchSummary, TuneResult
from hp_tool.tuning.run import create_launcher, resolve_search, run_search, study_storage, tune

__all__ = ["SearchSummary", "TuneResult", "create_launcher", "resolve_search", "run_search", "study_storage", "tune"]
