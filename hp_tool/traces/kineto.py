"""Traces of torch.profiler: Kineto's JSON of one rank, event by event.

The form: https://github.com/pytorch/kineto/blob/main/libkineto/src/output_json.cpp; microseconds.
Older releases wrote `Kernel`, `Runtime` and `Operator` as categories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.columns import Floats, Ints, check_room, joined
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
_SECOND = {
    "aten::mm": 0,
    "aten::_scaled_mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Matmuls of recorded shapes, and the place of their first factor."""
_UNKNOWN = KINDS.index("unknown")
MAX_DURATION_US = 1e15
"""31 years."""
MAX_TIME_US = 1e17
"""The year 5138: until release 2.3 torch wrote microseconds since 1970, 1.7e15 of them."""
MAX_WORLD = 1 << 16
"""Ranks of a job whose group of all ranks is written out."""
MAX_THREAD_NAME = 100


class _Rank:
    """The columns of one rank while its trace is read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names = Names()
        self.origin_us: float | None = None
        self.on_device = False
        self.untimed = 0
        self.serving_span = False
        self.calls = Calls()
        self._clear()
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

    def _clear(self) -> None:
        self.start, self.end, self.kind, self.identity = Floats(), Floats(), Ints(), Ints()
        self.messages = Messages(names=self.names)
        self.signs = Signs()

    def add(self, event: Mapping[str, Any]) -> None:
        """One complete event (`ph` X) of a category that counts."""
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
            self._launch(event)
        elif kind in _DEVICE:
            self._kernel(event, name)
        elif kind in _HOST:
            self._host(event, name)

    def _times(self, event: Mapping[str, Any]) -> tuple[float, float]:
        """Start and end in seconds since the first event; NaN for what is no time."""
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
        known = self._threads.get(key) if isinstance(key, str | int) else 0
        return known if known is not None else self._threads.setdefault(key, len(self._threads) + 1)

    def _launch(self, event: Mapping[str, Any]) -> None:
        args = event.get("args")
        identity = args.get("correlation") if isinstance(args, dict) else None
        start, _ = self._times(event)
        if start == start and isinstance(identity, int) and 0 < identity < 1 << 62:
            self.launch_id.append(identity)
            self.launch_s.append(start)
            self.launch_thread.append(self._thread(event))
            check_room(len(self.launch_id), name=self.name)

    def _kernel(self, event: Mapping[str, Any], name: str) -> None:
        start, end = self._times(event)
        if start != start:
            self.untimed += 1
            return
        if not self.on_device:
            self.on_device = True
            self._clear()
        raw = event.get("args")
        args: dict[str, Any] = raw if isinstance(raw, dict) else {}
        kind = self.names.kernel(name)
        if kind == _COLLECTIVE:
            self.messages.add_device(len(self.start), name, args)
        identity = args.get("correlation")
        self._keep(
            name,
            start,
            end,
            kind,
            identity if isinstance(identity, int) and 0 < identity < 1 << 62 else -1,
        )

    def _keep(self, name: str, start: float, end: float, kind: int, identity: int) -> None:
        self.signs.add(
            name, workload=self.names.workload(name), unknown=kind == _UNKNOWN, seconds=end - start
        )
        self.start.append(start)
        self.end.append(end)
        self.kind.append(kind)
        self.identity.append(identity)
        check_room(len(self.start), name=self.name)

    def _host(self, event: Mapping[str, Any], name: str) -> None:
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
        if name in _SECOND:
            self._count(event, name)
        elif self._marks(event, name) and (step := self.names.step(name)) is not None:
            start, end = self._times(event)
            if start == start:
                self.steps.setdefault(step, (start, end))
            return
        self._span(event, name)
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
        self._keep(name, start, end, kind, self._thread(event))

    def _span(self, event: Mapping[str, Any], name: str) -> None:
        """Note a call of NCCL, which tells what its kernels do, or a step of a serving engine."""
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
    def _marks(event: Mapping[str, Any], name: str) -> bool:
        """Whether a span of the host may mark a step: torch 1.8 to 1.11 wrote `ProfilerStep#` as an
        operator.
        """
        return event.get("cat") == "user_annotation" or name.startswith("ProfilerStep#")

    def _count(self, event: Mapping[str, Any], name: str) -> None:
        """2 m n k of a matmul whose shapes were recorded."""
        args = event.get("args")
        shapes = args.get("Input Dims") if isinstance(args, dict) else None
        place = _SECOND[name]
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
        """The rank's arrays."""
        groups = _groups(header, self.names)
        identity = self.identity.array()
        start = self.start.array()
        if self.on_device:
            launch, rows = joined(self.launch_id.array(), self.launch_s.array(), wanted=identity)
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
            steps_s=np.array([self.steps[each] for each in numbers]).reshape(-1, 2),
            flops=np.stack([self.flops_s.array(), self.flops.array()], axis=1),
            on_device=self.on_device,
            device=_device(header),
            world_size=_world_size(header),
            signs=self.signs,
        )

    def origin_ns(self, header: Mapping[str, Any]) -> int:
        """Return when this rank's times are zero, in nanoseconds of its host's clock.

        Integers: a float of the nanoseconds since 1970 is exact to 256 ns only.
        """
        base = header.get("baseTimeNanoseconds")
        if not isinstance(base, int) or isinstance(base, bool) or not 0 <= base < 1 << 63:
            base = 0
        return base + round((self.origin_us or 0.0) * 1e3)


def read_kineto(stream: TraceStream, *, name: str, rank: int) -> tuple[RankEvents, int]:
    """(one rank's events; nanoseconds of its host's clock at which their times are zero).

    `rank` is what the file's name says, or its place: what the trace says of itself counts before.
    Raises InputError.
    """
    columns = _Rank(name)
    for event in stream:
        columns.add(event)
    if columns.untimed and not len(columns.start):
        message = (
            f"{name}: none of its {columns.untimed:,} kernels has a time; each needs `ts` "
            "and `dur` in microseconds"
        )
        raise InputError(message, field="trace", code="no_times")
    info = stream.header.get("distributedInfo")
    own = info.get("rank") if isinstance(info, dict) else None
    if isinstance(own, int) and not isinstance(own, bool) and 0 <= own < 1 << 20:
        rank = own
    return columns.finish(stream.header, rank=rank), columns.origin_ns(stream.header)


def _world_size(header: Mapping[str, Any]) -> int:
    """Return the number of ranks of the job; 0 if it was not recorded."""
    info = header.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    return (
        size if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 1 << 20 else 0
    )


def _groups(header: Mapping[str, Any], names: Names) -> dict[str, Group]:
    """Return the groups that the trace lists, by name; `part` is empty if the description names no
    part.

    torch lists its own group of all ranks, `default_pg`, with all of them or with none.
    """
    info = header.get("distributedInfo")
    listed = info.get("pg_config") if isinstance(info, dict) else None
    world = _world_size(header)
    everyone = tuple(range(world)) if world <= MAX_WORLD else ()
    groups: dict[str, Group] = {}
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            name, description = (
                str(each.get("pg_name", ""))[:100],
                str(each.get("pg_desc", ""))[:100],
            )
            ranks = ranks_of(each.get("ranks")) or (
                everyone if description == DEFAULT_GROUP else ()
            )
            groups[name] = Group(part=names.group(description) or "", ranks=ranks, name=description)
    return groups


def _device(header: Mapping[str, Any]) -> str:
    devices = header.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    return str(first.get("name", ""))[:100] if isinstance(first, dict) else ""
