"""Export results to other tools, import their configurations, and compare runs with predictions."""

from hp_tool.formats.detection import detect
from hp_tool.formats.exchange.assessment import Assessment, LoggedRun, assess, search_query
from hp_tool.formats.exchange.export import Exported, export, export_for, exported, recommend_for
from hp_tool.formats.exchange.reading import read_configuration, read_query

__all__ = [
    "Assessment",
    "Exported",
    "LoggedRun",
    "assess",
    "detect",
    "export",
    "export_for",
    "exported",
    "read_configuration",
    "read_query",
    "recommend_for",
    "search_query",
]
