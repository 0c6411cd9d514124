"""When each operation of a pipeline schedule starts and ends: the schedule's order, executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hp_tool.cost.schedules.orders import Block, Operation, Order

_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One block in time; seconds from the start of the step."""

    block: Block
    start_s: float
    end_s: float


def timeline(*, orders: Sequence[Order], seconds: Callable[[Operation], float], transfer_s: float = 0.0) -> list[list[Span]]:
    """The spans of each rank. A block starts when its rank is free and all its inputs have arrived: of a forward pass the
    previous stage's output, of a backward pass its own forward pass and the next stage's gradient; it takes as long as its
    operations one after the other. `transfer_s` is the way from one rank to another.

    Raises ValueError where the ranks wait for each other in a circle.
    """
    last_stage = max(operation.stage for order in orders for block in order for operation in block)
    done: dict[_Key, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank, order in enumerate(orders):
            for block in order[len(spans[rank]) :]:
                inputs = [done.get(key) for operation in block for key in _inputs(operation, last_stage)]
                if None in inputs:
                    break
                arrived = [end + (transfer_s if source != rank else 0.0) for end, source in filter(None, inputs)]
                start = max([spans[rank][-1].end_s if spans[rank] else 0.0, *arrived])
                end = start + sum(seconds(operation) for operation in block)
                spans[rank].append(Span(block=block, start_s=start, end_s=end))
                done |= {_key(operation): (end, rank) for operation in block}
                left -= 1
        if left == before:
            raise ValueError("the ranks of this schedule wait for each other in a circle")
    return spans


def _key(operation: Operation) -> _Key:
    kind, stage, micro_batch = operation
    return ("B" if kind == "BW" else kind), stage, micro_batch


def _inputs(operation: Operation, last_stage: int) -> list[_Key]:
    kind, stage, micro_batch = operation
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("B", stage, micro_batch)]
    return [("F", stage, micro_batch)] + ([("B", stage + 1, micro_batch)] if stage < last_stage else [])
