"""Context ranks that exchange heads each need as many (Transformer Engine's rule)."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate, recommend

REASON = "context_heads_not_divisible"


def asked(**parallel: Any) -> Query:
    """llama-3-8b: 32 query heads, 8 key/value heads."""
    return Query(
        kind="training",
        model="llama-3-8b",
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64),
        training=TrainingWorkload(sequence_length=65536, global_batch_size=64),
        parallel=ParallelQuery(**parallel),
    )


@pytest.mark.parametrize(
    ("t", "c", "kind", "levels", "legal"),
    [
        (1, 8, "a2a", None, True),
        (1, 16, "a2a", None, False),  # 32 queries would do, 8 keys do not
        (2, 4, "a2a", None, True),
        (2, 8, "a2a", None, False),
        (8, 2, "a2a", None, False),  # one key/value head a rank
        (8, 2, "p2p", None, True),
        (8, 1, "a2a", None, True),
        (2, 8, "a2a+p2p", (4, 2), True),
        (2, 8, "a2a+p2p", (8, 1), False),
        (2, 8, "a2a+p2p", None, True),
    ],
)
def test_heads_of_a_rank_must_divide(
    t: int, c: int, kind: Any, levels: tuple[int, int] | None, legal: bool
) -> None:
    query = asked(
        tensor_parallel_size=t,
        context_parallel_size=c,
        context_parallel_communication=kind,
        hierarchical_context_parallel_sizes=levels,
        micro_batch_size=1,
    )
    found = estimate(query=query, with_fixes=False)
    assert (REASON in {reason.code for reason in found.reasons}) is not legal
    if not legal:
        (reason,) = found.reasons
        assert "key/value heads" in reason.message


def test_a_search_turns_them_away() -> None:
    result = recommend(
        query=asked(context_parallel_communication="a2a", context_parallel_size=(2, 8, 16)), top=20
    )
    assert result.rejections[REASON] > 0
    assert all(
        max(8 // row.parallel.tensor_parallel_size, 1) % row.parallel.context_parallel_size == 0
        for row in result.recommendations
    )
