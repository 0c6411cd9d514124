"""/searches/ID/export: a search's best configuration, or that of one run, as a launch command, as flags, as a query."""

import re
import shlex

import yaml
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from hp_tool.domain.query import Query
from hp_tool.domain.records import SearchRecord
from hp_tool.domain.serving import Configuration
from hp_tool.errors import NotFoundError
from hp_tool.exchange import export_for, exported
from hp_tool.exchange.export import options
from hp_tool.formats.names import SERVERS
from hp_tool.queries import schema
from hp_tool.store.columns import decode_configuration
from service.api.dependencies import StoreDep
from service.dashboard.page import configuration_text

COMMAND, FLAGS, YAML = "command", "flags", "yaml"
"""Formats beside those of other tools: what starts it in its framework's own tool, the flags of that alone, and the query."""
TOOLS = {"torch-fsdp": "torchtitan", "nanotron": "nanotron"}
"""What launches a framework's trainings, if not Megatron-LM."""
_PLAIN = re.compile(r"[\w./:=,+ -]*")

router = APIRouter(tags=["dashboard"])


@router.get("/searches/{search_id}/export", response_class=PlainTextResponse)
def export_text(
    search_id: str, store: StoreDep, format: str, download: bool = False, rerank: bool = False, run: str | None = None
) -> PlainTextResponse:
    """The best configuration so far, or that of `run`, as `command`, `flags`, `yaml` or in another tool's format; with
    `rerank` the best that this tool can run, by predictions."""
    record = store.get_search(search_id=search_id)
    parallel = store.get_run(search_id=search_id, run_id=run).parallel if run else _best(record)
    text, headers = "", {}
    if format in (FLAGS, YAML):
        text = _flags(record, parallel) if format == FLAGS else _yaml(record, parallel)
    else:
        result = {"query": record.query, "recommendations": [{"parallel": schema.to_dict(parallel)}]}
        tool = _tool(schema.parse_query(record.query)) if format == COMMAND else format
        chosen = export_for(result=result, format=tool) if rerank else exported(result=result, format=tool)
        text, note = chosen.text, "; ".join(filter(None, (chosen.cost_in_words(), *chosen.notes)))
        headers = {"Export-Note": note} if note else {}
    if download:
        headers["Content-Disposition"] = f'attachment; filename="{record.id}-{format}.txt"'
    return PlainTextResponse(text, headers=headers)


def _best(record: SearchRecord) -> Configuration:
    rows = (record.result or {}).get("recommendations") or ()
    parallel = rows[0]["parallel"] if rows else record.progress.get("best_parallel")
    if parallel is None:
        raise NotFoundError("the search has no best configuration yet", field="search_id")
    return decode_configuration(parallel)


def _tool(query: Query) -> str:
    """The tool that runs what a query describes."""
    if query.training is not None:
        return TOOLS.get(query.training.framework, "megatron-lm")
    engine = query.inference.engine if query.inference else ""
    return engine if engine in SERVERS else SERVERS[0]


def _flags(record: SearchRecord, parallel: Configuration) -> str:
    """Options of the tool in one line if they are flags, else a line each."""
    query = schema.parse_query(record.query)
    written = options(query, parallel, _tool(query))
    if all(name.startswith("-") for name in written):
        return " ".join(f"{name} {_quoted(value)}".strip() for name, value in written.items())
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in written.items())


def _quoted(value: str) -> str:
    """The words behind a flag, which may be several, for a shell."""
    return value if _PLAIN.fullmatch(value) else shlex.quote(value)


def _yaml(record: SearchRecord, parallel: Configuration) -> str:
    """The query of this configuration alone, for `hp-tool estimate`."""
    text = configuration_text(schema.parse_query(record.query), parallel=parallel)
    return yaml.safe_dump(schema.parse_mapping(text), sort_keys=False)
