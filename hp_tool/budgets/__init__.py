"""From a budget (devices and days, parameters, tokens or FLOPs) to the training that it buys, timed by the cost model."""

from __future__ import annotations

from hp_tool.budgets.answer import size_answer
from hp_tool.budgets.query import parse_sizing

__all__ = ["parse_sizing", "size_answer"]
