"""Imported once by the fork server: whatever API and workers load."""

# First: it may replace what others take from `time`.
from tests.service.faults import false_clock  # isort: skip
from hp_tool.loop.search import coordinator
from hp_tool.loop.tuning import run
from service import app, worker

__all__ = ["app", "coordinator", "false_clock", "run", "worker"]
