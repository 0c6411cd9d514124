"""Read torch.profiler traces: Kineto's JSON of one rank, with times in microseconds.

Format: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp. Older releases
use the categories `Kernel`, `Runtime` and `Operator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.columns import Floats, Ints, check_room, look_up
from hp_tool.traces.json_stream import TraceStream
from hp_tool.traces.messages import DEFAULT_GROUP, Calls, Messages, elements, number, ranks_of
from hp_tool.traces.names import Names
from hp_tool.traces.timeline.events import KINDS, Group, Phases, RankEvents, Signs

_COLLECTIVE = KINDS.index("collective")
_DEVICE = frozenset({"kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset"})
_LAUNCHES = frozenset(
    {"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "privateuse1_runtime"}
)
_HOST = frozenset({"cpu_op", "operator", "user_annotation"})
_FIRST_FACTOR_INDEX = {
    "aten::mm": 0,
    "aten::_scaled_mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Index of the first factor among the inputs of each matmul operator."""
_UNKNOWN = KINDS.index("unknown")
MAX_DURATION_US = 1e15
"""Maximum duration of an event in microseconds: 31 years."""
MAX_TIME_US = 1e17
"""Maximum time of an event in microseconds (year 5138). Until release 2.3, torch wrote microseconds
since 1970, about 1.7e15.
"""
MAX_WORLD = 1 << 16
"""Maximum job size in ranks for which the group of all ranks is expanded to a list."""
MAX_THREAD_NAME = 100


class _RankColumns:
    """Collect the columns of one rank while its trace is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names = Names()
        self.origin_us: float | None = None
        self.on_device = False
        self.untimed = 0
        self.serving_span = False
        self.calls = Calls()
        self._reset_events()
        self.launch_id, self.launch_s, self.launch_thread = Ints(), Floats(), Ints()
        self.phase, self.phase_start, self.phase_end, self.phase_thread = (
            Ints(),
            Floats(),
            Floats(),
            Ints(),
        )
        self.flops_s, self.flops = Floats(), Floats()
        self.steps: dict[int, tuple[float, float]] = {}
        self._threads: dict[Any, int] = {}

    def _reset_events(self) -> None:
        self.start, self.end, self.kind, self.identity = Floats(), Floats(), Ints(), Ints()
        self.messages = Messages(names=self.names)
        self.signs = Signs()

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event if it is complete (`ph` is X) and its category is used."""
        if event.get("ph") != "X":
            return
        category, name = event.get("cat"), event.get("name")
        if not isinstance(category, str) or not isinstance(name, str):
            return
        kind = (
            category
            if category in _HOST or category in _DEVICE or category in _LAUNCHES
            else category.lower()
        )
        if kind in _LAUNCHES:
            self._add_launch(event)
        elif kind in _DEVICE:
            self._add_kernel(event, name)
        elif kind in _HOST:
            self._add_host(event, name)

    def _times(self, event: Mapping[str, Any]) -> tuple[float, float]:
        """Return (start, end) in seconds since the first event; NaN if invalid."""
        start, length = number(event.get("ts")), number(event.get("dur"))
        if not (abs(start) < MAX_TIME_US and 0.0 <= length < MAX_DURATION_US):
            return math.nan, math.nan
        if self.origin_us is None:
            self.origin_us = start
        begin = start - self.origin_us
        return 1e-6 * begin, 1e-6 * (begin + length)

    def _thread(self, event: Mapping[str, Any]) -> int:
        key = event.get("tid")
        if isinstance(key, str):
            key = key[:MAX_THREAD_NAME]
        index = self._threads.get(key) if isinstance(key, str | int) else 0
        return index if index is not None else self._threads.setdefault(key, len(self._threads) + 1)

    def _add_launch(self, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        identity = args.get("correlation") if isinstance(args, dict) else None
        start, _ = self._times(event)
        if start == start and isinstance(identity, int) and 0 < identity < 1 << 62:
            self.launch_id.append(identity)
            self.launch_s.append(start)
            self.launch_thread.append(self._thread(event))
            check_room(len(self.launch_id), name=self.name)

    def _add_kernel(self, event: Mapping[str, Any], name: str) -> None:
        start, end = self._times(event)
        if start != start:
            self.untimed += 1
            return
        if not self.on_device:
            self.on_device = True
            self._reset_events()
        raw = event.get("args")
        args: dict[str, Any] = raw if isinstance(raw, dict) else {}
        kind = self.names.kernel(name)
        if kind == _COLLECTIVE:
            self.messages.add_device(len(self.start), name, args)
        identity = args.get("correlation")
        self._append_event(
            name,
            start,
            end,
            kind,
            identity if isinstance(identity, int) and 0 < identity < 1 << 62 else -1,
        )

    def _append_event(self, name: str, start: float, end: float, kind: int, identity: int) -> None:
        self.signs.add(
            name, workload=self.names.workload(name), unknown=kind == _UNKNOWN, seconds=end - start
        )
        self.start.append(start)
        self.end.append(end)
        self.kind.append(kind)
        self.identity.append(identity)
        check_room(len(self.start), name=self.name)

    def _add_host(self, event: Mapping[str, Any], name: str) -> None:
        phase = self.names.phase(name)
        if phase >= 0:
            start, end = self._times(event)
            if start == start:
                self.phase.append(phase)
                self.phase_start.append(start)
                self.phase_end.append(end)
                self.phase_thread.append(self._thread(event))
                check_room(len(self.phase), name=self.name)
            return
        if name in _FIRST_FACTOR_INDEX:
            self._add_matmul(event, name)
        elif self._may_mark_step(event, name) and (step := self.names.step(name)) is not None:
            start, end = self._times(event)
            if start == start:
                self.steps.setdefault(step, (start, end))
            return
        self._add_span(event, name)
        if self.on_device:
            return
        kind = self.names.kernel(name)
        if kind != _COLLECTIVE and not self.names.operator(name):
            return
        start, end = self._times(event)
        if start != start:
            return
        if kind == _COLLECTIVE:
            raw = event.get("args")
            self.messages.add_host(len(self.start), name, raw if isinstance(raw, dict) else {})
        self._append_event(name, start, end, kind, self._thread(event))

    def _add_span(self, event: Mapping[str, Any], name: str) -> None:
        """Record an NCCL call, which identifies its kernels, or a step of a serving engine."""
        if event.get("cat") != "user_annotation":
            return
        if name.startswith("nccl:"):
            start, end = self._times(event)
            if start == start:
                raw = event.get("args")
                operation, args = self.names.operation(name), raw if isinstance(raw, dict) else {}
                self.calls.add(
                    start, end, thread=self._thread(event), operation=operation, args=args
                )
                check_room(len(self.calls), name=self.name)
        elif self.names.workload(name) == "serving":
            self.serving_span = True

    @staticmethod
    def _may_mark_step(event: Mapping[str, Any], name: str) -> bool:
        """Return True if a host span may mark a step.

        torch 1.8-1.11 marked steps with operators.
        """
        return event.get("cat") == "user_annotation" or name.startswith("ProfilerStep#")

    def _add_matmul(self, event: Mapping[str, Any], name: str) -> None:
        """Add a matmul's 2 m n k FLOPs if its shapes were recorded."""
        args = event.get("args")
        shapes = args.get("Input Dims") if isinstance(args, dict) else None
        place = _FIRST_FACTOR_INDEX[name]
        if not isinstance(shapes, list) or len(shapes) < place + 2:
            return
        first, second = elements(shapes[place]), shapes[place + 1]
        columns = second[-1] if isinstance(second, list) and second else None
        start, _ = self._times(event)
        flops = 2.0 * first * number(columns)
        if start == start and flops == flops:
            self.flops_s.append(start)
            self.flops.append(flops)
            check_room(len(self.flops), name=self.name)

    def finish(self, header: Mapping[str, Any], *, rank: int) -> RankEvents:
        """Return the events of the rank as arrays."""
        groups = _groups(header, self.names)
        identity = self.identity.array()
        start = self.start.array()
        if self.on_device:
            launch, rows = look_up(self.launch_id.array(), self.launch_s.array(), wanted=identity)
            threads = self.launch_thread.array()
            thread = np.where(rows >= 0, threads[rows] if len(threads) else -1, -1)
        else:
            launch, thread = start, identity
        if self.on_device:
            self.messages.name_operations(self.calls, launch_s=launch, thread=thread)
        collectives, used = self.messages.finish(groups)
        self.signs.serving_span = self.serving_span
        numbers = sorted(self.steps)
        return RankEvents(
            rank=rank,
            start_s=start,
            end_s=self.end.array(),
            kind=self.kind.array(),
            launch_s=launch,
            thread=thread,
            collectives=collectives,
            groups=used,
            phases=Phases(
                phase=self.phase.array(),
                start_s=self.phase_start.array(),
                end_s=self.phase_end.array(),
                thread=self.phase_thread.array(),
            ),
            steps_s=np.array([self.steps[step] for step in numbers]).reshape(-1, 2),
            flops=np.stack([self.flops_s.array(), self.flops.array()], axis=1),
            on_device=self.on_device,
            device=_device(header),
            world_size=_world_size(header),
            signs=self.signs,
        )

    def origin_ns(self, header: Mapping[str, Any]) -> int:
        """Return the host clock at this rank's time zero, in nanoseconds.

        This is an integer, because a float stores nanoseconds since 1970 only to within 256 ns.
        """
        base = header.get("baseTimeNanoseconds")
        if not isinstance(base, int) or isinstance(base, bool) or not 0 <= base < 1 << 63:
            base = 0
        return base + round((self.origin_us or 0.0) * 1e3)


def read_kineto(stream: TraceStream, *, name: str, rank: int) -> tuple[RankEvents, int]:
    """Read the trace of one rank.

    Args:
        stream: The trace.
        name: File name for error messages.
        rank: Rank to use if the trace does not record one.

    Returns:
        The events, and the host clock at their time zero in nanoseconds.

    Raises:
        InputError: The trace is invalid.
    """
    columns = _RankColumns(name)
    for event in stream:
        columns.add(event)
    if columns.untimed and not len(columns.start):
        message = (
            f"{name}: none of its {columns.untimed:,} kernels has a time. Each needs `ts` and "
            "`dur` in microseconds."
        )
        raise InputError(message, field="trace", code="no_times")
    info = stream.header.get("distributedInfo")
    recorded = info.get("rank") if isinstance(info, dict) else None
    if isinstance(recorded, int) and not isinstance(recorded, bool) and 0 <= recorded < 1 << 20:
        rank = recorded
    return columns.finish(stream.header, rank=rank), columns.origin_ns(stream.header)


def _world_size(header: Mapping[str, Any]) -> int:
    info = header.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    return (
        size if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 1 << 20 else 0
    )


def _groups(header: Mapping[str, Any], names: Names) -> dict[str, Group]:
    """Return the groups listed in the trace by name.

    `part` is empty if the description does not tell. torch lists `default_pg`, the group of all
    ranks, with or without its ranks.
    """
    info = header.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    world = _world_size(header)
    everyone = tuple(range(world)) if world <= MAX_WORLD else ()
    groups: dict[str, Group] = {}
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict):
            name = str(entry.get("pg_name", ""))[:100]
            description = str(entry.get("pg_desc", ""))[:100]
            ranks = ranks_of(entry.get("ranks")) or (
                everyone if description == DEFAULT_GROUP else ()
            )
            groups[name] = Group(part=names.group(description) or "", ranks=ranks, name=description)
    return groups


def _device(header: Mapping[str, Any]) -> str:
    devices = header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    return str(first.get("name", ""))[:100] if isinstance(first, dict) else ""
