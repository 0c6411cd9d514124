"""Simulate pipeline schedules: the order and the times of the operations on each rank. Symbols:
docs/cost-model.md.

A stage is one model chunk. Stages are numbered in the order in which a micro-batch passes through
them; r is a rank. Sources: GPipe arXiv 1811.06965; 1F1B and interleaved 2104.04473, in Megatron
Core's order; ZB-H1 and ZB-V 2401.10241 sections 2 and 6; DualPipe 2412.19437 section 3.2.1 and its
published code.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]


class Operation(NamedTuple):
    """A pass of one micro-batch through one stage."""

    kind: Kind
    """F: forward; B: input gradient; W: weight gradient; BW: both gradients."""
    stage: int
    micro_batch: int


Block = tuple[Operation, ...]
"""Operations that run as one block. They start when all their inputs are available, and end
together.
"""
Order = list[Block]
"""The blocks that one rank runs, in order."""


def gpipe(*, p: int, m: int) -> list[Order]:
    """Return the orders of GPipe: all forward passes, then all backward passes."""
    kinds: tuple[Kind, ...] = ("F", "BW")
    return [_as_blocks(Operation(kind, r, k) for kind in kinds for k in range(m)) for r in range(p)]


def one_f_one_b(*, p: int, m: int) -> list[Order]:
    """Return the orders of 1F1B: p - r forward passes, then alternating backward and forward
    passes.
    """
    return [_as_blocks(_alternate(r, warm_up=min(p - r, m), m=m)) for r in range(p)]


def interleaved(*, p: int, v: int, m: int) -> list[Order]:
    """Return the orders of interleaved 1F1B, in which a rank's stages are p apart.

    Groups of p micro-batches pass through one chunk after another; m must be a multiple of p.
    """

    def forward(r: int, i: int) -> Operation:
        group, rest = divmod(i, p * v)
        return Operation("F", rest // p * p + r, group * p + rest % p)

    def backward(r: int, i: int) -> Operation:
        group, rest = divmod(i, p * v)
        return Operation("BW", (v - 1 - rest // p) * p + r, group * p + rest % p)

    orders = []
    for r in range(p):
        warm_up = min(2 * (p - r - 1) + (v - 1) * p, m * v)
        order = [forward(r, i) for i in range(warm_up)]
        for i in range(m * v):
            if warm_up + i < m * v:
                order.append(forward(r, warm_up + i))
            order.append(backward(r, i))
        orders.append(_as_blocks(order))
    return orders


def zb_h1(*, p: int, m: int) -> list[Order]:
    """Return the orders of ZB-H1: 1F1B with a split backward pass.

    Rank r delays r weight gradients and fills the drain of the pipeline with them.
    """
    orders = []
    for r in range(p):
        order: list[Operation] = []
        waiting: deque[Operation] = deque()
        for operation in _alternate(r, warm_up=min(p - r, m), m=m):
            if operation.kind == "F":
                order.append(operation)
                continue
            order.append(operation._replace(kind="B"))
            waiting.append(operation._replace(kind="W"))
            if len(waiting) > r:
                order.append(waiting.popleft())
        orders.append(_as_blocks((*order, *waiting)))
    return orders


def zbv(*, p: int, m: int) -> list[Order]:
    """Return the orders of ZB-V, with stages r and 2p - 1 - r on rank r, so that a micro-batch
    passes down and back up a V.

    Designed for t_f = t_b = t_w and m >= 2p - 1. With fewer micro-batches, the operations of the
    missing ones are omitted.
    """
    orders = []
    for r in range(p):
        rank = _Rank(stages=(r, 2 * p - 1 - r))
        total = max(2 * p - 1, m)
        rank.run("F0", times=2 * (p - r) - 1)
        rank.run("F1", "F0", times=r)
        rank.run("F1", "B1", "W1", times=p - r)
        rank.run("F0", "B0", "W0", "F1", "B1", "W1", times=total - (2 * p - 1 - r))
        rank.run("B0", "W0", "F1", "B1", "W1", times=p - 1 - r)
        rank.run("B0", "B1", times=r)
        rank.run("B0", "W0", times=p - r)
        rank.run("W1", times=r)
        rank.run("W0", times=r)
        orders.append([block for block in rank.order if block[0].micro_batch < m])
    return orders


def dualpipe(*, p: int, m: int) -> list[Order]:
    """Return the orders of DualPipe, in which micro-batches enter at both ends, m/2 at each.

    Rank r runs stage r in one direction and stage p - 1 - r in the other, so every stage is stored
    twice. p and m are even, and m >= 2p. An overlapping pair of a forward and a backward pass is
    one block, except the first pair in the middle of the pipeline, as in the published code.
    """
    # Chunk 0 processes the micro-batches that enter at the nearer end.
    return [
        _dualpipe_order(
            near=min(r, p - 1 - r),
            stages=p,
            each=m // 2,
            first=(0, m // 2) if r < p // 2 else (m // 2, 0),
        )
        for r in range(p)
    ]


def dualpipe_v(*, p: int, m: int) -> list[Order]:
    """Return the orders of DualPipeV.

    It is the first half of DualPipe's 2p ranks, each of which also runs the stage of its mirrored
    rank. Requires m >= 2p.
    """
    return [_dualpipe_order(near=r, stages=2 * p, each=m, first=(0, 0)) for r in range(p)]


def _dualpipe_order(*, near: int, stages: int, each: int, first: tuple[int, int]) -> Order:
    """Return the order of a rank with the stages `near` and stages - 1 - near. Each of the two runs
    `each` micro-batches.
    """
    far = stages // 2 - near - 1
    rank = _Rank(stages=(near, stages - 1 - near), first=first)
    rank.run("F0", times=2 * far)
    rank.run("F0", "F1", times=near + 1)
    rank.run("B1", "W", "F1", times=far)
    for i in range(each - stages + near + 1):
        rank.run(*("F0", "BW1") if far == 0 and i == 0 else ("F0+BW1",), "F1+BW0")
    rank.run("BW1", "F1+BW0", times=far)
    whole = (
        near + 1
        # Number of the 2 (near + 1) remaining backward passes that are not split. The weight
        # gradients of the others fill the drain.
    )
    for i in range(2 * (near + 1)):
        rank.run(("BW" if i < whole else "B") + ("1" if i % 2 == 0 else "0"))
    rank.run("W", "B0", times=far)
    rank.run("W", times=len(rank.waiting))
    return rank.order


def _as_blocks(operations: Iterable[Operation]) -> Order:
    return [(operation,) for operation in operations]


def _alternate(r: int, *, warm_up: int, m: int) -> Iterator[Operation]:
    yield from (Operation("F", r, k) for k in range(warm_up))
    for k in range(m):
        yield Operation("BW", r, k)
        if warm_up + k < m:
            yield Operation("F", r, warm_up + k)


class _Rank:
    """The order of one rank with two chunks. Each chunk processes its micro-batches in order,
    starting with `first`.
    """

    def __init__(self, *, stages: tuple[int, int], first: tuple[int, int] = (0, 0)) -> None:
        self.order: Order = []
        self.waiting: deque[Operation] = deque()
        self._stages = stages
        self._next = {"F0": first[0], "F1": first[1], "B0": first[0], "B1": first[1]}

    def run(self, *words: str, times: int = 1) -> None:
        """Append operations in a short notation: F0, B1, BW0, ... name the kind and the chunk.

        W is the oldest pending weight gradient, and W0 is that of chunk 0. A + joins two operations
        into one block.
        """
        for _ in range(times):
            for word in words:
                self.order.append(
                    tuple(self._owed(w) if w[0] == "W" else self._take(w) for w in word.split("+"))
                )

    def _owed(self, word: str) -> Operation:
        stages = self._stages if word == "W" else (self._stages[int(word[-1])],)
        operation = next(operation for operation in self.waiting if operation.stage in stages)
        self.waiting.remove(operation)
        return operation

    def _take(self, word: str) -> Operation:
        chunk = int(word[-1])
        counter = f"{word[0]}{chunk}"
        micro_batch = self._next[counter]
        self._next[counter] += 1
        stage = self._stages[chunk]
        if word[:-1] == "B":
            self.waiting.append(Operation("W", stage, micro_batch))
        return Operation(
            "F" if word[0] == "F" else "BW" if word[:-1] == "BW" else "B", stage, micro_batch
        )


# Start and end of each operation.


_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Start and end of one block, in seconds from the start of the step."""

    block: Block
    start_s: float
    end_s: float


def timeline(
    *, orders: Sequence[Order], seconds: Callable[[Operation], float], transfer_s: float = 0.0
) -> list[list[Span]]:
    """Return the start and end times of the blocks of each rank.

    A block starts when its rank is free and all its inputs have arrived. A forward pass needs the
    previous stage's output; a backward pass needs its own forward pass and the next stage's
    gradient. The block takes as long as its operations in sequence. `transfer_s` is the transfer
    time between ranks.

    Raises:
        ValueError: The ranks wait for each other in a cycle.
    """
    last_stage = max(operation.stage for order in orders for block in order for operation in block)
    done: dict[_Key, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank, order in enumerate(orders):
            for block in order[len(spans[rank]) :]:
                inputs = [
                    done.get(key) for operation in block for key in _inputs(operation, last_stage)
                ]
                if None in inputs:
                    break
                arrived = [
                    end + (transfer_s if source != rank else 0.0)
                    for end, source in filter(None, inputs)
                ]
                start = max([spans[rank][-1].end_s if spans[rank] else 0.0, *arrived])
                end = start + sum(seconds(operation) for operation in block)
                spans[rank].append(Span(block=block, start_s=start, end_s=end))
                done |= {_key(operation): (end, rank) for operation in block}
                left -= 1
        if left == before:
            raise ValueError("the ranks of this schedule wait for each other in a cycle")
    return spans


def critical_path(
    spans: Sequence[Sequence[Span]], *, transfer_s: float = 0.0
) -> set[tuple[int, int]]:
    """Return the (rank, index) of each block on the critical path: each block starts when its
    predecessor allows it.
    """
    places = {
        (rank, index): span for rank, row in enumerate(spans) for index, span in enumerate(row)
    }
    done = {_key(operation): at for at, span in places.items() for operation in span.block}
    last_stage = max(stage for _, stage, _ in done)
    path: set[tuple[int, int]] = set()
    at: tuple[int, int] | None = max(places, key=lambda each: places[each].end_s)
    while at is not None:
        path.add(at)
        rank, index = at
        inputs = {
            done[key] for operation in places[at].block for key in _inputs(operation, last_stage)
        } - {at}
        allows = {
            each: places[each].end_s + (transfer_s if each[0] != rank else 0.0) for each in inputs
        }
        allows |= {(rank, index - 1): places[rank, index - 1].end_s} if index else {}
        at = max(allows, key=allows.__getitem__, default=None)
    return path


def _key(operation: Operation) -> _Key:
    kind, stage, micro_batch = operation
    return ("B" if kind == "BW" else kind), stage, micro_batch


def _inputs(operation: Operation, last_stage: int) -> list[_Key]:
    kind, stage, micro_batch = operation
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("B", stage, micro_batch)]
    return [("F", stage, micro_batch)] + (
        [("B", stage + 1, micro_batch)] if stage < last_stage else []
    )
