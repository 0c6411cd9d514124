"""Explain traces or a log. Shared by the command line, the Python API and the service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hp_tool.domain.query import Query
from hp_tool.errors import InputError
from hp_tool.formats.timers import is_log, read_timers
from hp_tool.traces import read_traces
from hp_tool.traces.explain.explanation import Explanation, explain
from hp_tool.traces.explain.logged import LoggedExplanation, explain_log


def explain_files(
    paths: Sequence[Path],
    *,
    names: Sequence[str] | None = None,
    query: Query | None = None,
    tool: str | None = None,
) -> Explanation | LoggedExplanation:
    """Explain one trace per rank, or a single log with Megatron's timers.

    Args:
        paths: The files.
        names: File names for error messages; by default the paths.
        query: A training query to compare with.
        tool: Framework or format whose flags the suggestions use.

    Raises:
        HpToolError: A file cannot be read, or the query cannot be predicted.
    """
    names = [str(path) for path in paths] if names is None else names
    for path, name in zip(paths, names, strict=True):
        if is_log(path):
            if len(paths) > 1:
                raise InputError(f"{name} is a log. Pass either one log or traces.", field="trace")
            return explain_log(read_timers(path, name=name), query=query)
    return explain(read_traces(paths, names=names), query=query, tool=tool)
