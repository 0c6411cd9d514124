"""Export a search's best configuration, or that of a run, at /searches/ID/export."""

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from hp_tool.domain.query import Query
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.serving import RunConfig
from hp_tool.errors import NotFoundError
from hp_tool.formats.exchange.export import tool_options, write_configuration
from hp_tool.formats.registry import default_format
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.store.columns import decode_configuration
from service.api.dependencies import StoreDep

COMMAND, FLAGS, YAML = "command", "flags", "yaml"
"""Additional formats besides other tools': the usual launch command, its flags, and the query.
"""
_PLAIN = re.compile(r"[\w./:=,+ -]*")

router = APIRouter(tags=["dashboard"])


@router.get("/searches/{search_id}/export", response_class=PlainTextResponse)
def export_text(
    search_id: str,
    store: StoreDep,
    format: str,
    run: str | None = None,
) -> PlainTextResponse:
    """Return the best configuration so far, or that of `run`, as `command`, `flags`, `yaml` or for
    another tool.
    """
    record = store.get_search(search_id=search_id)
    query = schema.parse_query(record.query)
    configuration = Configuration.from_row(
        store.get_run(search_id=search_id, run_id=run) if run else _best(record), query=query
    )
    text, headers = "", {}
    if format in (FLAGS, YAML):
        text = _flags(configuration) if format == FLAGS else _yaml(configuration)
    else:
        tool = _tool(query) if format == COMMAND else format
        chosen = write_configuration(configuration, tool)
        text, note = chosen.text, "; ".join(filter(None, (chosen.cost_in_words(), *chosen.notes)))
        headers = {"Export-Note": note} if note else {}
    return PlainTextResponse(text, headers=headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Best:
    """The best configuration so far, as stored with a search."""

    parallel: RunConfig
    set: dict[str, Any]


def _best(record: SearchRecord) -> _Best:
    rows = (record.result or {}).get("recommendations") or ()
    row: dict[str, Any] = rows[0] if rows else {"parallel": record.progress.get("best_parallel")}
    if row["parallel"] is None:
        raise NotFoundError(
            "This search has no best configuration yet; wait for its first successful run.",
            field="search_id",
        )
    return _Best(parallel=decode_configuration(row["parallel"]), set=row.get("set", {}))


def _tool(query: Query) -> str:
    if query.training is not None:
        return default_format("training", query.training.framework).name
    return default_format("inference", query.inference.engine if query.inference else None).name


def _flags(configuration: Configuration) -> str:
    """Return the tool's options: flags on one line, keys one per line."""
    written = tool_options(configuration, _tool(configuration.query), as_predicted=True)
    if all(name.startswith("-") for name in written):
        return " ".join(f"{name} {_quoted(value)}".strip() for name, value in written.items())
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in written.items())


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else shlex.quote(value)


def _yaml(configuration: Configuration) -> str:
    """Return a query for this configuration only, for `hp-tool estimate`."""
    return yaml.safe_dump(configuration.mapping(), sort_keys=False)
