"""What lone candidates share is kept by identity, and is what each would compute alone."""

from __future__ import annotations

from hp_tool.cost.shared import MAX_ENTRIES, Shared, forget_all
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate

QUERY = {
    "kind": "training",
    "model": "mixtral-8x7b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 4096, "global_batch_size": 256},
}
LAYOUTS = [
    {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "expert_parallel_size": 8,
        "recompute": r,
        "zero_stage": z,
    }
    for t in (1, 2)
    for p in (1, 4)
    for r in ("none", "selective", "full")
    for z in (1, 3)
]


def test_equal_objects_are_not_the_same_and_results_are_computed_once() -> None:
    shared: Shared[list[int]] = Shared()
    one, equal = [1], [1]
    first = shared.get((one,), (2,), lambda: [3])
    assert shared.get((one,), (2,), lambda: [4]) is first
    assert shared.get((equal,), (2,), lambda: [4]) == [4]
    assert shared.get((one,), (3,), lambda: [5]) == [5]
    forget_all()
    assert shared.get((one,), (2,), lambda: [6]) == [6]


def test_a_cache_is_bounded() -> None:
    shared: Shared[int] = Shared()
    computed = []
    for number in (*range(MAX_ENTRIES + 1), 0):
        shared.get((), (number,), lambda number=number: computed.append(number) or number)  # type: ignore[misc]
    assert computed[-1] == 0 and len(computed) == MAX_ENTRIES + 2


def test_estimates_do_not_depend_on_those_before_them() -> None:
    queries = [parse_query(QUERY | {"parallel": layout}) for layout in LAYOUTS]
    together = [estimate(query=query, with_fixes=False) for query in queries]
    for query, before in zip(reversed(queries), reversed(together), strict=True):
        forget_all()
        assert estimate(query=query, with_fixes=False) == before
