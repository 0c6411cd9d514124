"""Collectives as traces record them: the group, the operation, and the bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hp_tool.errors import InputError
from hp_tool.traces.columns import Floats, Ints
from hp_tool.traces.names import Names, unnamed_part
from hp_tool.traces.timeline.events import COLLECTIVES, Collectives, FloatArray, Group, IntArray

ELEMENT_BYTES = {
    "bfloat16": 2,
    "half": 2,
    "float16": 2,
    "float": 4,
    "float32": 4,
    "double": 8,
    "float64": 8,
    "long": 8,
    "long int": 8,
    "int64": 8,
    "int": 4,
    "int32": 4,
    "byte": 1,
    "char": 1,
    "int8": 1,
    "uint8": 1,
    "unsigned char": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""By torch's names of types, as traces write them, in lower case and without `c10::`."""
MAX_ELEMENTS = 1e15
FEW = 64
"""Elements below which a message is a norm, a loss or a flag, of whatever group."""
_MAX_RANKS = 1 << 20
MAX_GROUP_MEMBERS = 1 << 22
"""Members of all process groups of one rank together, and groups."""
_GATHERED, _SENT, _EXCHANGED, _OTHER = (
    COLLECTIVES.index(each) for each in ("all_gather", "send_receive", "all_to_all", "other")
)
DEFAULT_GROUP = "default_pg"
"""torch's description of its group of all ranks."""


def element_bytes(name: Any) -> float:
    """Bytes of one element; NaN for a type that is not known."""
    return float(ELEMENT_BYTES.get(str(name).lower().removeprefix("c10::"), math.nan))


def number(value: Any) -> float:
    """A number that a trace wrote as one or as text; NaN for all else, and for what no trace
    means.
    """
    if isinstance(value, str) and len(value) < 40:
        try:
            value = float(value)
        except ValueError:
            return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        return math.nan
    return float(value)


def ranks_of(value: Any) -> tuple[int, ...]:
    """A list of ranks, or its text as `[0, 1, 2, 3]`; empty where it was abbreviated (`...`) or is
    none.
    """
    if isinstance(value, str):
        if "..." in value or not re.fullmatch(r"\[[\d,\s]{0,200000}\]", value):
            return ()
        value = [int(each) for each in re.findall(r"\d{1,9}", value)]
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        return ()
    return tuple(
        each
        for each in value
        if isinstance(each, int) and not isinstance(each, bool) and 0 <= each < _MAX_RANKS
    )


def _size_of(value: Any) -> int:
    """The number of a group's members; 0 for what is none."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value < _MAX_RANKS
        else 0
    )


def elements(shape: Any) -> float:
    """The product of a recorded shape; NaN for what is none."""
    if not isinstance(shape, list) or not all(
        isinstance(each, int) and not isinstance(each, bool) for each in shape
    ):
        return math.nan
    size = math.prod(shape[:10])
    return float(size) if 0 <= size < MAX_ELEMENTS else math.nan


@dataclass(slots=True)
class Calls:
    """Host spans of `torch.distributed` calls of NCCL (`nccl:all_reduce`), with the shape of their
    tensor if recorded.
    """

    start_s: Floats = field(default_factory=Floats)
    end_s: Floats = field(default_factory=Floats)
    thread: Ints = field(default_factory=Ints)
    operation: Ints = field(default_factory=Ints)
    size_bytes: Floats = field(default_factory=Floats)

    def __len__(self) -> int:
        return len(self.start_s)

    def add(
        self, start_s: float, end_s: float, *, thread: int, operation: int, args: Mapping[str, Any]
    ) -> None:
        """Record one call."""
        size, _ = _tensor(args)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.thread.append(thread)
        self.operation.append(operation)
        self.size_bytes.append(size)

    def containing(self, times_s: FloatArray, threads: IntArray) -> IntArray:
        """Return (n,) the index of the call that each time on its thread lies in; -1 if in none."""
        start, end, thread = self.start_s.array(), self.end_s.array(), self.thread.array()
        inside_call = np.full(len(times_s), -1)
        for each in np.unique(thread):
            rows, calls = np.flatnonzero(threads == each), np.flatnonzero(thread == each)
            calls = calls[np.argsort(start[calls], kind="stable")]
            place = np.searchsorted(start[calls], times_s[rows], side="right") - 1
            inside = (place >= 0) & (times_s[rows] <= end[calls[np.maximum(place, 0)]])
            inside_call[rows[inside]] = calls[place[inside]]
        return inside_call


def _tensor(args: Mapping[str, Any]) -> tuple[float, Any]:
    """Return the bytes of a call's first tensor, NaN if not recorded, and its shape."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    shape = shapes[0] if isinstance(shapes, list) and shapes else None
    kind = types[0] if isinstance(types, list) and types else None
    return elements(shape) * element_bytes(kind), shape


@dataclass(slots=True, kw_only=True)
class Messages:
    """The collectives of one rank while its trace is read."""

    names: Names
    rank: int | None = None
    event: Ints = field(default_factory=Ints)
    operation: Ints = field(default_factory=Ints)
    label: Ints = field(default_factory=Ints)
    size_bytes: Floats = field(default_factory=Floats)
    _labels: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _members: int = 0

    def add_device(self, event: int, name: str, args: Mapping[str, Any]) -> None:
        """A kernel whose arguments torch adds since 2.2; older ones carry none."""
        described = args.get("Collective name")
        operation = self.names.operation(
            described if isinstance(described, str) and described else name
        )
        each = element_bytes(args.get("dtype"))
        size = max(number(args.get("In msg nelems")), number(args.get("Out msg nelems"))) * each
        self._add(
            event,
            operation,
            size,
            label=(
                str(args.get("Process Group Name", ""))[:100],
                str(args.get("Process Group Description", ""))[:100],
                ranks_of(args.get("Process Group Ranks")),
                COLLECTIVES[operation],
                True,
                False,
                _size_of(args.get("Group size")),
                isinstance(described, str) and bool(described),
            ),
        )

    def add_host(self, event: int, name: str, args: Mapping[str, Any]) -> None:
        """A collective of gloo, which knows the shape of its tensor and not its group."""
        operation = self.names.operation(name)
        size, shape = _tensor(args)
        flat = not isinstance(shape, list) or len(shape) < 2
        few = elements(shape) < FEW
        self._add(
            event, operation, size, label=("", "", (), COLLECTIVES[operation], flat, few, 0, True)
        )

    def name_operations(self, calls: Calls, *, launch_s: FloatArray, thread: IntArray) -> None:
        """Take the operation of kernels without arguments from the call that launched them.

        Releases of torch before 2.2 write no arguments, and NCCL names a kernel after one of the
        operations that it serves: ncclKernel_SendRecv runs every all-to-all, and in some builds all
        collectives.

        Args:
            calls: The host's calls of NCCL.
            launch_s: (n,) launch time of each event, NaN if not recorded.
            thread: (n,) the host thread that launched it.
        """
        label = self.label.array()
        unnamed = (
            np.flatnonzero(~np.array([each[7] for each in self._labels] or [True])[label])
            if len(label)
            else label
        )
        if not len(calls) or not len(unnamed):
            return
        called, sizes = calls.operation.array(), calls.size_bytes.array()
        sends = bool(np.isin(called, [_SENT]).any())
        instead = _EXCHANGED if (called == _EXCHANGED).any() else _OTHER
        events = self.event.array()[unnamed]
        operation, size = self.operation.array().copy(), self.size_bytes.array().copy()
        label, labels = label.copy(), list(self._labels)
        for row, call in zip(
            unnamed.tolist(),
            calls.containing(launch_s[events], thread[events]).tolist(),
            strict=True,
        ):
            if call >= 0 and called[call] != _OTHER:
                operation[row] = called[call]
                size[row] = sizes[call] if size[row] != size[row] else size[row]
            elif operation[row] == _SENT and not sends:
                operation[row] = instead
            new = (*labels[label[row]][:3], COLLECTIVES[operation[row]], *labels[label[row]][4:])
            label[row] = self._labels.setdefault(new, len(self._labels))
        used, label = np.unique(label, return_inverse=True)
        labels = list(self._labels)
        self._labels = {labels[each]: place for place, each in enumerate(used.tolist())}
        self.operation, self.label = Ints.of(operation), Ints.of(label.astype(np.int64))
        self.size_bytes = Floats.of(size)

    def _add(self, event: int, operation: int, size: float, *, label: tuple[Any, ...]) -> None:
        self.event.append(event)
        self.operation.append(operation)
        self.size_bytes.append(size)
        if label not in self._labels:
            self._members += 1 + len(label[2])
            if self._members > MAX_GROUP_MEMBERS:
                message = (
                    f"the trace lists process groups of more than {MAX_GROUP_MEMBERS:,} "
                    "members together"
                )
                raise InputError(message, field="trace", code="too_large")
        self.label.append(self._labels.setdefault(label, len(self._labels)))

    def finish(self, groups: Mapping[str, Group]) -> tuple[Collectives, tuple[Group, ...]]:
        """Return the columns, and the groups that they index.

        Args:
            groups: The groups that the trace lists, by name; `part` is empty if unknown.
        """
        made = tuple(self._group(label, groups) for label in self._labels)
        operation, label = self.operation.array(), self.label.array()
        size = self.size_bytes.array()
        members = np.array([max(len(group.ranks), 1) for group in made] or [1])
        by_host = np.array([not each[0] for each in self._labels] or [False])
        if len(label):  # gloo records what a rank gives to a gather
            size = np.where((operation == _GATHERED) & by_host[label], size * members[label], size)
        return Collectives(
            event=self.event.array(), operation=operation, group=label, size_bytes=size
        ), made

    def _group(self, label: tuple[Any, ...], groups: Mapping[str, Group]) -> Group:
        """Return the label's group. One that was not recorded is the first listed of its part, as
        frameworks make it first; if none is of its part, a listed group of unknown part stands in,
        provided that all of these have the same ranks.
        """
        name, description, ranks, operation, flat, few, size, _ = label
        listed = groups.get(name) if name else None
        part = self.names.group(description) or (listed.part if listed is not None else None)
        part = part or unnamed_part(operation, flat=flat, groups=list(groups.values()))
        if listed is not None and listed.ranks:
            ranks = listed.ranks
        if not ranks and not few:
            listed_ranks = [group.ranks for group in groups.values() if group.part == part]
            unknown = {
                group.ranks for group in groups.values() if not group.part and len(group.ranks) > 1
            }
            listed_ranks += unknown if len(unknown) == 1 and not name else ()
            ranks = next(
                (each for each in listed_ranks if len(each) > 1 and size in (0, len(each))), ()
            )
        return Group(part=part, ranks=ranks, name=description or name, size=size)
