"""Answer a stream of queries in order and in bounded memory: in this process, in several processes,
or on a server.
"""

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
from hp_tool.cli.queries import stored_calibrations
from hp_tool.cli.server import connect
from hp_tool.errors import HpToolError, InputError

if TYPE_CHECKING:
    from hp_tool.questions.training.calibrated import Calibrations

CHUNK_LINES = 64
"""Number of queries per chunk. Similar queries in a chunk are evaluated together."""
CHUNKS_AHEAD = 4
"""Number of chunks in flight per process. It limits how far reading gets ahead of writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to compute for every query, with its options."""

    name: Literal["estimate", "recommend"]
    top: int
    calibration: bool


def answer_here(items: Iterator[Item], task: Task) -> Iterator[str]:
    """Yield the answers computed by this process."""
    with stored_calibrations(wanted=task.calibration) as calibrations:
        for chunk in _split_chunks(items, task):
            yield from _answer_items(chunk, task, calibrations)


def answer_by_processes(items: Iterator[Item], task: Task, *, jobs: int) -> Iterator[str]:
    """Yield the answers computed by `jobs` processes.

    Raises:
        HpToolError: A process died.
    """
    # A fork could deadlock, because the progress bar runs a thread.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        max_workers=jobs, mp_context=context, initializer=_start_worker, initargs=(task,)
    )
    waiting: deque[Future[list[str]]] = deque()
    try:
        for chunk in _split_chunks(items, task):
            waiting.append(pool.submit(_answer_chunk, chunk))
            if len(waiting) >= CHUNKS_AHEAD * jobs:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise HpToolError(
            f"a worker process died ({error}); rerun with --resume to continue after the "
            "written answers"
        ) from None
    finally:
        # Wait here: waiting at interpreter exit might write to a closed pipe.
        pool.shutdown(cancel_futures=True)


def answer_by_server(items: Iterator[Item], task: Task, *, server: str) -> Iterator[str]:
    """Yield the answers of a server. For an unreadable item, yield an error line without sending a
    request.
    """
    from hp_tool.questions.answers import error_line

    errors: deque[tuple[int, InputError]] = deque()

    def readable_lines() -> Iterator[bytes]:
        for place, item in enumerate(items):
            if isinstance(item, InputError):
                errors.append((place, item))
            else:
                yield item

    with connect(server) as client:
        place = 0
        for answer in client.batch(
            lines=readable_lines(), task=task.name, top=task.top, calibration=task.calibration
        ):
            while errors and errors[0][0] == place:
                yield error_line(b"", errors.popleft()[1])
                place += 1
            yield answer
            place += 1
        yield from (error_line(b"", error) for _, error in errors)


def _split_chunks(items: Iterator[Item], task: Task) -> Iterator[list[Item]]:
    """Yield the queries in chunks of CHUNK_LINES, or one by one for recommendations, which take
    longer. If reading fails, the queries before the failure are yielded first.
    """
    size = CHUNK_LINES if task.name == "estimate" else 1
    chunk: list[Item] = []
    try:
        for item in items:
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except InputError:
        yield chunk
        raise
    if chunk:
        yield chunk


_worker_state: tuple[Task, Calibrations | None] | None = None
_open_resources = ExitStack()


def _start_worker(task: Task) -> None:
    """Initialize a process of the pool: ignore Ctrl-C, which the parent handles, and exit when the
    parent exits.
    """
    global _worker_state
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_state = (
        task,
        _open_resources.enter_context(stored_calibrations(wanted=task.calibration)),
    )


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _answer_chunk(items: list[Item]) -> list[str]:
    assert _worker_state is not None  # The pool's initializer has run.
    return _answer_items(items, *_worker_state)


def _answer_items(items: list[Item], task: Task, calibrations: Calibrations | None) -> list[str]:
    from hp_tool.questions import schema
    from hp_tool.questions.answers import answer_lines

    return answer_lines(
        items, task=task.name, top=task.top, read=schema.parse_own_query, calibrations=calibrations
    )
