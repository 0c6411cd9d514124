"""Read Nsight Systems reports exported with `nsys export --type sqlite`. Times are in nanoseconds.

Tables: https://docs.nvidia.com/nsight-systems/UserGuide/index.html (SQLite schema). A report may
contain several ranks, one per process and device. Nsight records neither the groups nor the message
sizes of collectives.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sized
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from hp_tool.domain import bounds
from hp_tool.errors import HpToolError, InputError
from hp_tool.traces.columns import Floats, Ints, check_room, look_up
from hp_tool.traces.messages import Messages, number
from hp_tool.traces.names import MAX_NAME, Names
from hp_tool.traces.timeline.events import KINDS, Phases, RankEvents, Signs

_KERNEL, _COPY, _FILL = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_LAUNCH, _RANGE = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_TO_OR_FROM_HOST = (1, 2)
"""CUPTI's copyKind values for host-to-device and device-to-host copies."""
_THREADS = 1 << 24
"""A globalTid is a globalPid plus a thread number, which is less than this value."""
MAX_SQLITE_STEPS = 2_000_000_000
"""Maximum number of SQLite virtual machine steps per file. A gigabyte of kernels needs a tenth of
this.
"""
MAX_VALUE_BYTES = 1_000_000
"""Maximum size of a value in a report, in bytes."""
MAX_RANKS = 64
MAX_PROCESSES = 4096


class _DeviceColumns:
    """Columns of one device of a process."""

    def __init__(self, names: Names) -> None:
        self.start, self.end, self.kind, self.identity = Floats(), Floats(), Ints(), Ints()
        self.messages = Messages(names=names)
        self.signs = Signs()


class _HostColumns:
    """Columns of one process."""

    def __init__(self) -> None:
        self.launch_id, self.launch_s, self.thread = Ints(), Floats(), Ints()
        self.phase, self.phase_start, self.phase_end, self.phase_thread = (
            Ints(),
            Floats(),
            Floats(),
            Ints(),
        )
        self.steps: dict[int, tuple[float, float]] = {}


def read_nsight(path: Path, *, name: str, rank: int) -> list[RankEvents]:
    """Read the ranks of a report. They are numbered from `rank` on, by process and device.

    Raises:
        InputError: The file is not a readable report. The message contains `name`.
    """
    steps, stopped = iter(range(MAX_SQLITE_STEPS // 100_000)), list[HpToolError]()
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        ) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
            connection.set_progress_handler(lambda: _should_stop(steps, stopped), 100_000)
            return _read(connection, name=name, rank=rank)
    except sqlite3.Error as error:
        if stopped:
            raise stopped[0] from None
        raise InputError(
            f"Cannot read {name} as an SQLite report: {error}", field="trace", code="syntax"
        ) from None


def _should_stop(steps: Iterator[int], stopped: list[HpToolError]) -> bool:
    """Return True to interrupt SQLite.

    Errors are appended to `stopped`, because exceptions cannot propagate through SQLite.
    """
    try:
        bounds.check_work()
    except HpToolError as error:
        stopped.append(error)
        return True
    return next(steps, None) is None


def _read(connection: sqlite3.Connection, *, name: str, rank: int) -> list[RankEvents]:
    # Tables only: reports have no views, and reading a view can take arbitrarily long.
    listed = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
    )
    tables = {row[0] for row in listed}
    if _KERNEL not in tables:
        raise InputError(
            f"{name} has no table {_KERNEL}. Record with --trace=cuda,nvtx.",
            field="trace",
            code="no_trace",
        )
    names = Names()
    devices: dict[tuple[int, int], _DeviceColumns] = {}
    hosts: dict[int, _HostColumns] = {}
    _kernels(connection, tables, names=names, devices=devices, name=name)
    if not devices:
        raise InputError(f"{name} has no kernels.", field="trace", code="no_trace")
    if _LAUNCH in tables:
        for start, identity, thread in _rows(
            connection, _LAUNCH, ("start", "correlationId", "globalTid")
        ):
            if isinstance(thread, int) and isinstance(identity, int):
                host = hosts.setdefault(thread // _THREADS, _HostColumns())
                _check_number(hosts, what="processes", name=name)
                host.launch_id.append(identity)
                host.launch_s.append(1e-9 * number(start))
                host.thread.append(thread % _THREADS)
                check_room(len(host.launch_id), name=name)
    if _RANGE in tables:
        _ranges(connection, tables, names=names, hosts=hosts, name=name)
    device = (
        next((str(row[0])[:100] for row in _rows(connection, "TARGET_INFO_GPU", ("name",))), "")
        if "TARGET_INFO_GPU" in tables
        else ""
    )
    return [
        _rank(devices[key], hosts.get(key[0], _HostColumns()), rank=rank + place, device=device)
        for place, key in enumerate(sorted(devices))
    ]


def _rows(
    connection: sqlite3.Connection, table: str, columns: tuple[str, ...], join: str = ""
) -> Iterator[tuple[Any, ...]]:
    """Yield rows of a table. Columns that this Nsight version does not write are NULL."""
    present = _columns(connection, table)
    chosen = ", ".join(
        column if "." in column or column in present else f"NULL AS {column}" for column in columns
    )
    yield from connection.execute(f"SELECT {chosen} FROM {table} {join}")  # noqa: S608 (our own names)


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _text_column(
    connection: sqlite3.Connection, tables: Iterable[str], *, table: str, column: str
) -> tuple[str, str]:
    """Return the SQL expression for the text that a column refers to, and the required join.

    Texts are looked up in the database, because all of them may not fit in memory.
    """
    if "StringIds" not in tables or column not in _columns(connection, table):
        return column, ""
    text = f"substr(coalesce(StringIds.value, {table}.{column}), 1, {MAX_NAME})"
    return text, f"LEFT JOIN StringIds ON StringIds.id = {table}.{column}"


def _kernels(
    connection: sqlite3.Connection,
    tables: Iterable[str],
    *,
    names: Names,
    devices: dict[tuple[int, int], _DeviceColumns],
    name: str,
) -> None:
    common = ("start", "end", "globalPid", "deviceId", "correlationId")
    collective, unknown = KINDS.index("collective"), KINDS.index("unknown")
    for table, extra in ((_KERNEL, "demangledName"), (_COPY, "copyKind"), (_FILL, "value")):
        if table not in tables:
            continue
        text_of, join = (
            _text_column(connection, tables, table=table, column=extra)
            if table == _KERNEL
            else (extra, "")
        )
        for start, end, process, device, identity, value in _rows(
            connection, table, (*common, text_of), join
        ):
            begin, finish = number(start), number(end)
            if not begin <= finish or not isinstance(device, int):
                continue
            key = (process // _THREADS if isinstance(process, int) else 0, device)
            columns = devices.setdefault(key, _DeviceColumns(names))
            _check_number(devices, what="devices", name=name)
            text = str(value)
            if table == _KERNEL:
                kind = names.kernel(text)
            else:
                kind = KINDS.index(
                    "copy_host" if table == _COPY and value in _TO_OR_FROM_HOST else "copy_device"
                )
            if kind == collective:
                columns.messages.add_device(len(columns.start), text, {})
            seconds = 1e-9 * (finish - begin)
            columns.signs.add(
                text, workload=names.workload(text), unknown=kind == unknown, seconds=seconds
            )
            columns.start.append(1e-9 * begin)
            columns.end.append(1e-9 * finish)
            columns.kind.append(kind)
            columns.identity.append(identity if isinstance(identity, int) else -1)
            check_room(len(columns.start), name=name)


def _ranges(
    connection: sqlite3.Connection,
    tables: Iterable[str],
    *,
    names: Names,
    hosts: dict[int, _HostColumns],
    name: str,
) -> None:
    text_of, join = _text_column(connection, tables, table=_RANGE, column="textId")
    columns = ("start", "end", "globalTid", "text", *((text_of,) if join else ()))
    for start, end, thread, *texts in _rows(connection, _RANGE, columns, join):
        text = next((text for text in texts if isinstance(text, str)), "")
        begin, finish = 1e-9 * number(start), 1e-9 * number(end)
        if not text or not begin <= finish or not isinstance(thread, int):
            continue
        host = hosts.setdefault(thread // _THREADS, _HostColumns())
        _check_number(hosts, what="processes", name=name)
        if (step := names.step(text)) is not None:
            host.steps.setdefault(step, (begin, finish))
            check_room(len(host.steps), name=name)
        elif (phase := names.phase(text)) >= 0:
            host.phase.append(phase)
            host.phase_start.append(begin)
            host.phase_end.append(finish)
            host.phase_thread.append(thread % _THREADS)
            check_room(len(host.phase), name=name)


def _check_number(found: Sized, *, what: str, name: str) -> None:
    """Raise InputError if a report has too many devices or processes."""
    limit = MAX_RANKS if what == "devices" else MAX_PROCESSES
    if len(found) > limit:
        raise InputError(f"{name} has more than {limit} {what}.", field="trace", code="too_many")


def _rank(columns: _DeviceColumns, host: _HostColumns, *, rank: int, device: str) -> RankEvents:
    launch, rows = look_up(
        host.launch_id.array(), host.launch_s.array(), wanted=columns.identity.array()
    )
    threads = host.thread.array()
    collectives, groups = columns.messages.finish({})
    return RankEvents(
        rank=rank,
        start_s=columns.start.array(),
        end_s=columns.end.array(),
        kind=columns.kind.array(),
        launch_s=launch,
        thread=np.where(rows >= 0, threads[rows] if len(threads) else -1, -1),
        collectives=collectives,
        groups=groups,
        phases=Phases(
            phase=host.phase.array(),
            start_s=host.phase_start.array(),
            end_s=host.phase_end.array(),
            thread=host.phase_thread.array(),
        ),
        steps_s=np.array([host.steps[step] for step in sorted(host.steps)]).reshape(-1, 2),
        device=device,
        signs=columns.signs,
    )
