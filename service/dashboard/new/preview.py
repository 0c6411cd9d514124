"""The cost model's answer while one types, and the same question as YAML, command and request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from hp_tool.answers import RecommendAnswer, recommend_answer
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.queries.registered import Find
from hp_tool.render.words import serving_arithmetic
from hp_tool.training.calibrated import Calibrations
from hp_tool.tuning import resolve_search
from service.api.queries import resolve
from service.dashboard.formats import arithmetic, details
from service.dashboard.links import configuration_href
from service.dashboard.new.contexts import Command, Preview, PreviewRow
from service.dashboard.new.figures import serving_figure, training_figure
from service.dashboard.new.forms import kind_of, to_query

ROWS = 8
DRAWN = 60


def preview(values: Mapping[str, str], *, find: Find, calibrations: Calibrations | None, server: str) -> Preview:
    """What is known of the question; what is wrong with it is an answer too."""
    try:
        asked = schema.parse_query(to_query(values))
        query = resolve(asked, find=find)
        answer = recommend_answer(
            query, top=DRAWN, calibrations=calibrations, pareto=None if query.kind == "inference" else "memory"
        )
        figure = _figure(query, answer)
    except HpToolError as error:
        return Preview(kind=kind_of(values), error=error.as_dict())
    # Links and commands say what was typed: a registered name stays a name.
    return Preview(
        kind=query.kind,
        error=None,
        rows=tuple(_row(asked, row) for row in answer.recommendations[:ROWS]),
        misses=tuple(_row(asked, row) for row in answer.nearest_misses),
        legal=answer.space.legal,
        feasible=answer.space.feasible,
        seconds=answer.space.seconds,
        rejections=tuple(sorted(answer.rejections.items(), key=lambda item: -item[1])),
        figure=figure,
        unsearchable=_unsearchable(query),
        commands=commands(asked, server=server),
    )


def commands(query: Query, *, server: str) -> tuple[Command, ...]:
    """The query for a file, for the command line and for a request."""
    mapping = schema.query_mapping(query)
    body = json.dumps(mapping, ensure_ascii=False)
    settings = " ".join(f"--set {shlex.quote(f'{path}={_flow(value)}')}" for path, value in _paths(mapping))
    posts = (f"curl {server}/v1/{route} --json {shlex.quote(body)}" for route in ("recommendations", "searches"))
    return (
        Command(label="YAML", text=yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True)),
        Command(label="Command line", text=f"hp-tool recommend {settings}\nhp-tool tune --server {server} {settings}"),
        Command(label="curl", text="\n".join(posts)),
    )


def _paths(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Values by dotted path."""
    found: list[tuple[str, Any]] = []
    for name, value in mapping.items():
        nested = isinstance(value, dict) and all(isinstance(key, str) and "." not in key and "=" not in key for key in value)
        found += _paths(value, f"{prefix}{name}.") if nested and value else [(prefix + name, value)]
    return found


def _flow(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unsearchable(query: Query) -> str | None:
    try:
        resolve_search(query)
    except HpToolError as error:
        return error.message
    return None


def _row(query: Query, row: Recommendation | ServingRecommendation) -> PreviewRow:
    href = configuration_href(query, parallel=row.parallel)
    if isinstance(row, ServingRecommendation):
        serving = row.estimate
        memory = serving.memory
        return PreviewRow(
            rank=row.rank,
            arithmetic=serving_arithmetic(row.parallel, replicas=serving.replicas),
            details=f"{row.parallel.max_num_seqs} requests and {row.parallel.max_num_batched_tokens} tokens a pass at most",
            href=href,
            tokens_per_second_per_gpu=serving.output_tokens_per_second_per_gpu,
            ttft_s=serving.ttft_s,
            tpot_s=serving.tpot_s,
            memory_bytes=memory.total_bytes if memory else None,
            capacity_bytes=memory.capacity_bytes if memory else None,
        )
    known = row.calibrated_estimate or row.estimate
    return PreviewRow(
        rank=row.rank,
        arithmetic=arithmetic(row.parallel),
        details=details(row.parallel),
        href=href,
        step_s=known.time.step_s if known.time else None,
        tokens_per_second_per_gpu=known.tokens_per_second_per_gpu,
        mfu=known.mfu,
        memory_bytes=known.memory.total_bytes if known.memory else None,
        capacity_bytes=known.memory.capacity_bytes if known.memory else None,
        reasons=tuple(reason.message for reason in known.reasons),
    )


def _figure(query: Query, answer: RecommendAnswer) -> dict[str, Any] | None:
    if query.kind == "training":
        rows = [row for row in (*answer.recommendations, *(answer.pareto or ())) if isinstance(row, Recommendation)]
        return training_figure(rows, front=answer.pareto or ()) if rows else None
    # The region of the targets says more where what misses them is shown, too.
    everything = recommend_answer(replace(query, targets=None), top=DRAWN).recommendations
    rows_served = [row for row in everything if isinstance(row, ServingRecommendation)]
    return serving_figure(rows_served, targets=query.targets) if rows_served else None
