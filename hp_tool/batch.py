"""Lines of a batch: a query each, answered on one line each, in order. An error stays in its line."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from hp_tool import bounds
from hp_tool.answers import Task, estimate_answer, recommend_answer
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.evaluate import CostedRow, ResolvedConfiguration, resolve_configuration

log = logging.getLogger(__name__)

T = TypeVar("T")
Line = bytes | HpToolError
"""A line, or in its place why there is none."""
Read = Callable[[bytes], Query]

MIN_ARRAY = 8
"""Configurations of one problem from which on an array costs less than as many plain numbers."""


def answer_lines(
    lines: Sequence[Line], *, task: Task, top: int, read: Read = schema.parse_query, calibrations: Calibrations | None = None
) -> list[str]:
    """An answer for each line, the same as if it were the only one. Estimates that differ in their configuration alone are
    costed together, which is several times faster: pass a few dozen lines at a time.

    Estimates come without fixes, which would cost more than the rest of a batch together.
    """

    def begin(line: Line) -> ResolvedConfiguration | str:
        if isinstance(line, HpToolError):
            raise line
        bounds.begin_again()
        query = read(line)
        if task == "recommend":
            return schema.to_json(recommend_answer(query, top=top, with_query=False, calibrations=calibrations))
        return estimate(query) if query.kind == "inference" else resolve_configuration(query)

    def estimate(query: Query, configuration: ResolvedConfiguration | None = None) -> str:
        answer = estimate_answer(
            query, configuration=configuration, with_fixes=False, with_query=False, calibrations=calibrations
        )
        return schema.to_json(answer)

    begun = [_or_its_error(line, partial(begin, line)) for line in lines]
    costed = iter(cost_together([each for each in begun if isinstance(each, ResolvedConfiguration)]))
    return [
        each if isinstance(each, str) else _or_its_error(line, partial(estimate, each.query, next(costed)))
        for line, each in zip(lines, begun, strict=True)
    ]


def cost_together(configurations: Sequence[ResolvedConfiguration]) -> list[ResolvedConfiguration]:
    """The configurations, with their costs where they were computed as one array. Those stay without that are illegal, that
    are too few of one problem, or among which one breaks the costs of all.
    """
    costed = list(configurations)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for place, configuration in enumerate(configurations):
        if configuration.reasons:
            continue
        try:
            groups[configuration.problem_key()].append(place)
        except TypeError:  # a model or a device described in the query, as a mapping
            continue
    for places in groups.values():
        if len(places) < MIN_ARRAY:
            continue
        candidates = Candidates.from_configs(configurations[place].config for place in places)
        try:
            costs = configurations[places[0]].problem.costs(candidates)
        except HpToolError:  # costing each alone shows whose it is
            continue
        except Exception:
            log.exception("candidates could not be costed together")
            continue
        for index, place in enumerate(places):
            costed[place] = replace(costed[place], row=CostedRow(index=index, candidates=candidates, costs=costs))
    return costed


def _or_its_error(line: Line, answer: Callable[[], T]) -> T | str:
    """What `answer` returns, or the error it raises as the line's answer."""
    try:
        return answer()
    except HpToolError as error:
        return error_line(line, error)
    except Exception:  # a bug that one query finds must not take the answers of all others with it
        log.exception("unhandled error on a batch line")
        return error_line(line, HpToolError("an internal error occurred; it has been logged"))


def error_line(line: Line, error: HpToolError) -> str:
    """The answer of a line that cannot be answered, with the id it came with if that can be read."""
    try:
        data = json.loads(line) if isinstance(line, bytes) else None
        identity = data.get("id") if isinstance(data, dict) else None
    except (ValueError, RecursionError):
        identity = None
    return json.dumps({"id": identity if isinstance(identity, str) else None, "status": "error", "error": error.as_dict()})
