"""Imported once by the fork server: whatever API and workers load."""

from hp_tool.search import coordinator
from hp_tool.tuning import run
from service import app, worker

__all__ = ["app", "coordinator", "run", "worker"]
