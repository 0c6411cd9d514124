"""Collectives in traces: process group, operation and message size."""

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
"""Element size in bytes by torch type name, as written in traces, in lower case and without
`c10::`.
"""
MAX_ELEMENTS = 1e15
SMALL_MESSAGE_ELEMENTS = 64
"""Messages with fewer elements are norms, losses or flags. Their group cannot be inferred from the
operation.
"""
_MAX_RANKS = 1 << 20
MAX_GROUP_MEMBERS = 1 << 22
"""Maximum number of process groups of one rank plus their members."""
_ALL_GATHER, _SEND_RECEIVE, _ALL_TO_ALL, _OTHER = (
    COLLECTIVES.index(name) for name in ("all_gather", "send_receive", "all_to_all", "other")
)
DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""


def element_bytes(name: Any) -> float:
    """Return the size of one element in bytes; NaN for an unknown type."""
    return float(ELEMENT_BYTES.get(str(name).lower().removeprefix("c10::"), math.nan))


def number(value: Any) -> float:
    """Convert a number or numeric string to float.

    Return NaN for other and for implausible values.
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
    """Parse a list of ranks, or its text such as `[0, 1, 2]`. Empty if abbreviated or invalid."""
    if isinstance(value, str):
        if "..." in value or not re.fullmatch(r"\[[\d,\s]{0,200000}\]", value):
            return ()
        value = [int(digits) for digits in re.findall(r"\d{1,9}", value)]
    if not isinstance(value, list) or len(value) > _MAX_RANKS:
        return ()
    return tuple(
        rank
        for rank in value
        if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _MAX_RANKS
    )


def _size_of(value: Any) -> int:
    """Return the number of members of a group; 0 if invalid."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value < _MAX_RANKS
        else 0
    )


def elements(shape: Any) -> float:
    """Return the number of elements of a recorded shape; NaN if invalid."""
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and not isinstance(size, bool) for size in shape
    ):
        return math.nan
    size = math.prod(shape[:10])
    return float(size) if 0 <= size < MAX_ELEMENTS else math.nan


@dataclass(slots=True)
class Calls:
    """Host spans of `torch.distributed` NCCL calls (`nccl:all_reduce`), with tensor bytes."""

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
        """Add one call."""
        size, _ = _tensor(args)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.thread.append(thread)
        self.operation.append(operation)
        self.size_bytes.append(size)

    def containing(self, times_s: FloatArray, threads: IntArray) -> IntArray:
        """Return (n,) index of the call that contains each time on its thread; -1 if none."""
        start, end, thread = self.start_s.array(), self.end_s.array(), self.thread.array()
        inside_call = np.full(len(times_s), -1)
        for one_thread in np.unique(thread):
            rows = np.flatnonzero(threads == one_thread)
            calls = np.flatnonzero(thread == one_thread)
            calls = calls[np.argsort(start[calls], kind="stable")]
            place = np.searchsorted(start[calls], times_s[rows], side="right") - 1
            inside = (place >= 0) & (times_s[rows] <= end[calls[np.maximum(place, 0)]])
            inside_call[rows[inside]] = calls[place[inside]]
        return inside_call


def _tensor(args: Mapping[str, Any]) -> tuple[float, Any]:
    """Return the bytes and shape of a call's first tensor. Bytes are NaN if not recorded."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    shape = shapes[0] if isinstance(shapes, list) and shapes else None
    kind = types[0] if isinstance(types, list) and types else None
    return elements(shape) * element_bytes(kind), shape


@dataclass(slots=True, kw_only=True)
class Messages:
    """Collect the collectives of one rank while its trace is read."""

    names: Names
    rank: int | None = None
    event: Ints = field(default_factory=Ints)
    operation: Ints = field(default_factory=Ints)
    label: Ints = field(default_factory=Ints)
    size_bytes: Floats = field(default_factory=Floats)
    _labels: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _members: int = 0

    def add_device(self, event: int, name: str, args: Mapping[str, Any]) -> None:
        """Add a collective kernel. torch writes its arguments since release 2.2."""
        collective = args.get("Collective name")
        operation = self.names.operation(
            collective if isinstance(collective, str) and collective else name
        )
        per_element = element_bytes(args.get("dtype"))
        num_elements = max(number(args.get("In msg nelems")), number(args.get("Out msg nelems")))
        size = num_elements * per_element
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
                isinstance(collective, str) and bool(collective),
            ),
        )

    def add_host(self, event: int, name: str, args: Mapping[str, Any]) -> None:
        """Add a gloo collective. The trace records its tensor shape but not its group."""
        operation = self.names.operation(name)
        size, shape = _tensor(args)
        flat = not isinstance(shape, list) or len(shape) < 2
        is_small = elements(shape) < SMALL_MESSAGE_ELEMENTS
        self._add(
            event,
            operation,
            size,
            label=("", "", (), COLLECTIVES[operation], flat, is_small, 0, True),
        )

    def name_operations(self, calls: Calls, *, launch_s: FloatArray, thread: IntArray) -> None:
        """Set the operation of kernels without arguments from the call that launched them.

        torch before 2.2 writes no arguments, and NCCL's kernel names are ambiguous:
        ncclKernel_SendRecv also runs all-to-alls and, in some builds, all collectives.

        Args:
            calls: NCCL calls on the host.
            launch_s: (n,) launch time of each event; NaN if not recorded.
            thread: (n,) host thread that launched each event.
        """
        label = self.label.array()
        unnamed = (
            np.flatnonzero(~np.array([key[7] for key in self._labels] or [True])[label])
            if len(label)
            else label
        )
        if not len(calls) or not len(unnamed):
            return
        called, sizes = calls.operation.array(), calls.size_bytes.array()
        sends = bool(np.isin(called, [_SEND_RECEIVE]).any())
        fallback = _ALL_TO_ALL if (called == _ALL_TO_ALL).any() else _OTHER
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
            elif operation[row] == _SEND_RECEIVE and not sends:
                operation[row] = fallback
            new = (*labels[label[row]][:3], COLLECTIVES[operation[row]], *labels[label[row]][4:])
            label[row] = self._labels.setdefault(new, len(self._labels))
        used, label = np.unique(label, return_inverse=True)
        labels = list(self._labels)
        self._labels = {labels[old]: place for place, old in enumerate(used.tolist())}
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
                    f"The trace's process groups have more than {MAX_GROUP_MEMBERS:,} members in "
                    "total."
                )
                raise InputError(message, field="trace", code="too_large")
        self.label.append(self._labels.setdefault(label, len(self._labels)))

    def finish(self, groups: Mapping[str, Group]) -> tuple[Collectives, tuple[Group, ...]]:
        """Return the columns, and the groups to which their indices refer.

        Args:
            groups: Groups listed in the trace, by name. `part` is empty if unknown.
        """
        made = tuple(self._resolve_group(label, groups) for label in self._labels)
        operation, label = self.operation.array(), self.label.array()
        size = self.size_bytes.array()
        members = np.array([max(len(group.ranks), 1) for group in made] or [1])
        by_host = np.array([not key[0] for key in self._labels] or [False])
        if len(label):  # gloo records the input of a gather, not its output.
            size = np.where(
                (operation == _ALL_GATHER) & by_host[label], size * members[label], size
            )
        return Collectives(
            event=self.event.array(), operation=operation, group=label, size_bytes=size
        ), made

    def _resolve_group(self, label: tuple[Any, ...], groups: Mapping[str, Group]) -> Group:
        """Return the process group of a label.

        If its ranks were not recorded, use those of the first listed group of the same part,
        because frameworks create that one first. If there is none, use those of the listed groups
        of unknown part, provided that all of them have the same ranks.
        """
        name, description, ranks, operation, flat, is_small, size, _ = label
        listed = groups.get(name) if name else None
        part = self.names.group(description) or (listed.part if listed is not None else None)
        part = part or unnamed_part(operation, flat=flat, groups=list(groups.values()))
        if listed is not None and listed.ranks:
            ranks = listed.ranks
        if not ranks and not is_small:
            listed_ranks = [group.ranks for group in groups.values() if group.part == part]
            unknown = {
                group.ranks for group in groups.values() if not group.part and len(group.ranks) > 1
            }
            listed_ranks += unknown if len(unknown) == 1 and not name else ()
            ranks = next(
                (found for found in listed_ranks if len(found) > 1 and size in (0, len(found))),
                (),
            )
        return Group(part=part, ranks=ranks, name=description or name, size=size)
