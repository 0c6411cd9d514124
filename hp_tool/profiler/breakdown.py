"""The seconds of one step by torch's profiler: compute, each kind of communication, and idle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from hp_tool.profiler.clock import synchronize

Interval = tuple[float, float]
_STEP = "hp_tool step"
_KINDS = (
    (r"all_?reduce", "all_reduce"),
    (r"all_?gather", "all_gather"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?to_?all", "all_to_all"),
    (r"send|recv", "send_receive"),
    (r"broadcast", "broadcast"),
)


def of_one_step(step: Callable[[], object], *, device: torch.device) -> dict[str, float]:
    """The seconds of one more step under the profiler, mean over the ranks: `compute`, exposed communication by kind, and
    `idle`, which sum to the step. The profiler itself takes time, so this step is longer than the measured ones.

    A GPU is idle while no kernel runs on it; a CPU process while no operator of torch runs, even if Python does.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    distributed.barrier()
    with profile(activities=activities) as trace, record_function(_STEP):
        step()
        synchronize(device)
    events = trace.events()
    (whole,) = ((e.time_range.start, e.time_range.end) for e in events if e.name == _STEP and "CPU" in str(e.device_type))
    compute: list[Interval] = []
    communication: dict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if ("CUDA" in str(event.device_type)) != cuda or event.name == _STEP:
            continue
        interval = (event.time_range.start, event.time_range.end)
        kind = communication_kind(event.name)
        if kind is not None:
            communication[kind].append(interval)
        elif cuda or event.name.startswith("aten::"):
            compute.append(interval)
    own_parts = parts(whole=whole, compute=compute, communication=communication)
    gathered: list[dict[str, float]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own_parts)
    names = sorted({name for each in gathered for name in each})
    return {name: 1e-6 * sum(each.get(name, 0.0) for each in gathered) / len(gathered) for name in names}


def communication_kind(name: str) -> str | None:
    """`all_reduce` for gloo:all_reduce and for NCCL's kernel of it; None for other events."""
    lower = name.lower()
    if not lower.startswith(("gloo:", "nccl")):
        return None
    return next((kind for pattern, kind in _KINDS if re.search(pattern, lower)), "other_communication")


def parts(*, whole: Interval, compute: Iterable[Interval], communication: Mapping[str, Iterable[Interval]]) -> dict[str, float]:
    """The length of `whole` that each part covers and earlier ones do not, and `idle`, the rest; they sum to its length."""
    covered = _merged(compute, within=whole)
    lengths = {"compute": _length(covered)}
    for kind in sorted(communication):
        wider = _merged([*covered, *communication[kind]], within=whole)
        lengths[kind] = _length(wider) - _length(covered)
        covered = wider
    return lengths | {"idle": whole[1] - whole[0] - _length(covered)}


def _merged(intervals: Iterable[Interval], *, within: Interval) -> list[Interval]:
    """The union as disjoint intervals, cut to `within`."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, within[0]), min(end, within[1])
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
