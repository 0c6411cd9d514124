"""Export configurations to other tools, import theirs, and compare runs with predictions."""

from hp_tool.formats.detection import detect_format
from hp_tool.formats.exchange.assessment import (
    Assessment,
    LoggedRun,
    LogSummary,
    assess,
    search_query,
    summarize_log,
)
from hp_tool.formats.exchange.export import (
    Exported,
    export,
    export_configuration,
    export_for_tool,
    recommend_for_tool,
)
from hp_tool.formats.exchange.reading import read_configuration, read_query

__all__ = [
    "Assessment",
    "Exported",
    "LogSummary",
    "LoggedRun",
    "assess",
    "detect_format",
    "export",
    "export_configuration",
    "export_for_tool",
    "read_configuration",
    "read_query",
    "recommend_for_tool",
    "search_query",
    "summarize_log",
]
