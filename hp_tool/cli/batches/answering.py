"""Answers to a stream of queries, in order: in this process, by several, or by a server; in bounded memory."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hp_tool.cli.batches.sources import Item
from hp_tool.cli.calibrations import stored_calibrations
from hp_tool.errors import HpToolError, InputError

if TYPE_CHECKING:
    from hp_tool.training.calibrated import Calibrations

LINES_A_TURN = 64
"""Queries that are answered at a time: enough to cost those alike together, few enough to come back soon."""
TURNS_AHEAD = 4
"""Turns in flight for each process; how far reading may run ahead of writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is done with every query."""

    task: Literal["estimate", "recommend"]
    top: int
    calibration: bool


def here(items: Iterator[Item], asked: Asked) -> Iterator[str]:
    """By this process."""
    with stored_calibrations(wanted=asked.calibration) as calibrations:
        for turn in _turns(items, asked):
            yield from _answers(turn, asked, calibrations)


def by_processes(items: Iterator[Item], asked: Asked, *, jobs: int) -> Iterator[str]:
    """By `jobs` processes of their own. Raises HpToolError where one of them dies."""
    # spawn: the progress bar has a thread, which a forked process would not survive
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_start, initargs=(asked,))
    waiting: deque[Future[list[str]]] = deque()
    try:
        for turn in _turns(items, asked):
            waiting.append(pool.submit(_turn, turn))
            if len(waiting) >= TURNS_AHEAD * jobs:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise HpToolError(f"a process of the batch died ({error}); what is written stays, --resume goes on") from None
    finally:
        # waits, as the interpreter's own end would: that one may write to a pipe the pool is closing
        pool.shutdown(cancel_futures=True)


def by_server(items: Iterator[Item], asked: Asked, *, server: str) -> Iterator[str]:
    """By a server. What is no query at all is told here, in its place."""
    from hp_tool.batch import error_line
    from service.client import Client

    errors: deque[tuple[int, InputError]] = deque()

    def sent() -> Iterator[bytes]:
        for place, item in enumerate(items):
            if isinstance(item, InputError):
                errors.append((place, item))
            else:
                yield item

    with Client(server=server) as client:
        place = 0
        for answer in client.batch(lines=sent(), task=asked.task, top=asked.top, calibration=asked.calibration):
            while errors and errors[0][0] == place:
                yield error_line(b"", errors.popleft()[1])
                place += 1
            yield answer
            place += 1
        yield from (error_line(b"", error) for _, error in errors)


def _turns(items: Iterator[Item], asked: Asked) -> Iterator[list[Item]]:
    """The queries some at a time; recommendations, which take longer than their way, one by one. Where reading fails, what was
    read before is answered first.
    """
    size = LINES_A_TURN if asked.task == "estimate" else 1
    turn: list[Item] = []
    try:
        for item in items:
            turn.append(item)
            if len(turn) == size:
                yield turn
                turn = []
    except InputError:
        yield turn
        raise
    if turn:
        yield turn


_worker: tuple[Asked, Calibrations | None] | None = None
_open = ExitStack()


def _start(asked: Asked) -> None:
    """Set up one process of the pool: it leaves Ctrl-C to its parent, and does not outlive it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = asked, _open.enter_context(stored_calibrations(wanted=asked.calibration))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _turn(items: list[Item]) -> list[str]:
    assert _worker is not None  # the pool's initializer has run
    return _answers(items, *_worker)


def _answers(items: list[Item], asked: Asked, calibrations: Calibrations | None) -> list[str]:
    from hp_tool.batch import answer_lines
    from hp_tool.queries import schema

    return answer_lines(items, task=asked.task, top=asked.top, read=schema.parse_own_query, calibrations=calibrations)
