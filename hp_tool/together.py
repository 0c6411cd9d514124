"""Configurations of many queries costed as one batch of candidates, where queries differ in their configuration alone.

The cost model serves arrays and plain numbers by the same formulas, so each gets the numbers it would get alone.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Sequence

from hp_tool.cost.candidates import Candidates
from hp_tool.errors import HpToolError
from hp_tool.single import Row, Single

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
