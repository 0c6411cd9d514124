"""Lines of a batch: a query each, answered on one line each, in order. Whatever is wrong with a line stays in it."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

from hp_tool import bounds
from hp_tool.answers import EstimateAnswer, Task, estimate_answer, recommend_answer, uncalibrated
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.training.calibrated import Corrections
from hp_tool.training.evaluate import Row, Single, calibrated, predicted, single

log = logging.getLogger(__name__)

LEAST = 8
"""Configurations of one problem from which on an array costs less than as many plain numbers."""


def costed_together(singles: Sequence[Single | None]) -> list[Row | None]:
    """For each its row among those of its problem. None, for one to be costed alone: it is illegal, there are too few like it,
    or one among them breaks the costs of all.
    """
    alike: defaultdict[Hashable, list[tuple[int, Single]]] = defaultdict(list)
    for place, one in enumerate(singles):
        if one is None or one.reasons:
            continue
        try:
            alike[one.costed_with()].append((place, one))
        except TypeError:  # a model or a device described in the query, as a mapping
            continue
    rows: list[Row | None] = [None] * len(singles)
    for group in alike.values():
        if len(group) < LEAST:
            continue
        costed = _rows([one for _, one in group])
        for (place, _), row in zip(group, costed, strict=True) if costed else ():
            rows[place] = row
    return rows


def _rows(singles: Sequence[Single]) -> list[Row]:
    candidates = Candidates.from_configs(one.config for one in singles)
    try:
        costs = singles[0].problem.costs(candidates)
    except HpToolError:  # whose it is shows when each is costed alone
        return []
    except Exception:
        log.exception("candidates could not be costed together")
        return []
    return [Row(index=index, candidates=candidates, costs=costs) for index in range(len(singles))]


# Lines of a batch: a query each, answered on one line each, in order. Whatever is wrong with a line stays in it.


T = TypeVar("T")
Line = bytes | HpToolError
"""A line, or in its place why there is none."""
Read = Callable[[bytes], Query]


def answer_lines(
    lines: Sequence[Line],
    *,
    task: Task,
    top: int,
    read: Read = schema.parse_query,
    corrections: Corrections = uncalibrated,
) -> list[str]:
    """An answer for each line, the same as if it were the only one. Estimates that differ in their configuration alone are
    costed together, which is several times faster: hand over a few dozen lines at a time.

    Estimates come without mends, which would cost more than the rest of a batch together.
    """

    def begun(line: Line) -> Single | str:
        if isinstance(line, HpToolError):
            raise line
        bounds.begin_again()
        query = read(line)
        if task == "recommend":
            return schema.to_json(recommend_answer(query, top=top, with_query=False, corrections=corrections))
        if query.kind == "inference":
            return schema.to_json(estimate_answer(query, with_mends=False, with_query=False))
        return single(query)

    def ended(asked: Single, row: Row | None) -> str:
        found = predicted(asked=asked, row=row)
        learnt = calibrated(asked=asked, corrections=corrections, row=row)
        return schema.to_json(EstimateAnswer(id=asked.query.id, estimate=found, calibrated_estimate=learnt))

    halves = [_or_its_error(line, partial(begun, line)) for line in lines]
    rows = costed_together([half if isinstance(half, Single) else None for half in halves])
    return [
        half if isinstance(half, str) else _or_its_error(line, partial(ended, half, row))
        for line, half, row in zip(lines, halves, rows, strict=True)
    ]


def answer_line(
    line: Line,
    *,
    task: Task,
    top: int,
    read: Read = schema.parse_query,
    corrections: Corrections = uncalibrated,
) -> str:
    """The answer of one line."""
    return answer_lines([line], task=task, top=top, read=read, corrections=corrections)[0]


def _or_its_error(line: Line, answer: Callable[[], T]) -> T | str:
    """What `answer` gives, or what it raises as the line's answer."""
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
