"""Run and time training steps, and profile one additional step.

Both engines (Megatron Core and native) use it. Steps end early once the step time is known well
enough. torch's profiler splits the additional step into compute, communication by kind, and idle
time.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, record_function

from hp_tool.cluster.profiler.backend import DeviceWatch, max_over_ranks, now, synchronize
from hp_tool.domain.measurement import DeviceState, ProfileRequest
from hp_tool.domain.steps import count_warmup_steps, format_step

MIN_STEPS = 4
"""Minimum number of measured steps. The true median lies between the shortest and longest of n
steps with probability 1 - 2^(1-n), which is 7/8 for four.
"""
Step = Callable[[], tuple[torch.Tensor | None, float]]
"""Run one optimizer step. Return the mean loss (None on ranks without it) and the gradient norm."""
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


@dataclass(frozen=True, slots=True)
class Steps:
    """Results of the steps that ran; the same on all ranks."""

    warmup_s: tuple[float, ...]
    """Warm-up step times on the slowest rank, in seconds."""
    times_s: tuple[float, ...]
    """Measured step times on the slowest rank, in seconds."""
    losses: tuple[float, ...]
    """Loss of every step, averaged over the global batch."""
    stopped: str | None
    """Why fewer steps than requested were run."""
    devices: tuple[DeviceState, ...]
    """GPU states during a step whose time is not measured."""
    driver: str | None
    """Driver version."""
    breakdown_s: dict[str, float] | None
    """Seconds by part of one additional step, if requested."""


def run(request: ProfileRequest, step: Step, *, device: torch.device) -> Steps:
    """Run warm-up steps until they stop getting faster, then measured steps.

    Raises:
        ArithmeticError: A loss is not finite.
    """
    times: list[float] = []
    losses: list[float] = []
    stopped = None
    devices: tuple[DeviceState, ...] = ()
    driver: str | None = None
    min_warmup, max_warmup = request.warmup
    while (
        stopped is None
        and len(times) - count_warmup_steps(times, least=min_warmup, most=max_warmup)
        < request.steps
    ):
        watch = DeviceWatch(device) if len(times) == min_warmup - 1 else None
        distributed.barrier()
        started = now(device)
        loss, norm = step()
        times.append(max_over_ranks(now(device) - started, device=device))
        losses.append(_mean(loss, device=device))
        if watch is not None:
            devices, driver = watch.states()
        if distributed.get_rank() == 0:
            line = format_step(
                len(times), warmup=request.warmup, time_s=times[-1], loss=losses[-1], norm=norm
            )
            print(line, flush=True)
        stopped = why_stop(request, times)
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"the loss is not finite: {losses}")
    parts_s = _profile_one_step(step, device=device) if request.breakdown else None
    warmup = count_warmup_steps(times, least=min_warmup, most=max_warmup)
    return Steps(
        warmup_s=tuple(times[:warmup]),
        times_s=tuple(times[warmup:]),
        losses=tuple(losses),
        devices=devices,
        driver=driver,
        stopped=stopped,
        breakdown_s=parts_s,
    )


def why_stop(request: ProfileRequest, times_s: Sequence[float]) -> str | None:
    """Return why no further step is needed, as the measurement's cause; None to continue.

    `times_s` are the slowest rank's times, including warm-up. All ranks pass the same times, so
    that they stop together.
    """
    min_warmup, max_warmup = request.warmup
    measured = times_s[count_warmup_steps(times_s, least=min_warmup, most=max_warmup) :]
    if not measured or len(measured) >= request.steps:
        return None
    done = f"stopped after {len(measured)} of {request.steps} steps"
    if request.longest_step_s is not None and min(measured) > request.longest_step_s:
        return (
            f"{done}: {min(measured):.4g} s is above the limit of {request.longest_step_s:.4g} s, "
            "far slower than the best"
        )
    spread = (max(measured) - min(measured)) / statistics.median(measured)
    if (
        request.step_tolerance_fraction is not None
        and len(measured) >= MIN_STEPS
        and spread <= request.step_tolerance_fraction
    ):
        return f"{done}: all are within {spread:.2%}"
    return None


def sample(request: ProfileRequest, number: int) -> torch.Tensor:
    """Return [sequence_length + 1] synthetic tokens.

    They depend only on the seed and the row number.
    """
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + number)
    return torch.randint(
        request.model.vocab_size, (request.training.sequence_length + 1,), generator=generator
    )


def _mean(loss: torch.Tensor | None, *, device: torch.device) -> float:
    sums = torch.tensor(
        [0.0 if loss is None else float(loss), float(loss is not None)],
        dtype=torch.float64,
        device=device,
    )
    distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def _profile_one_step(step: Callable[[], object], *, device: torch.device) -> dict[str, float]:
    """Profile one more step. Return the time of each part in seconds, averaged over the ranks.

    Parts are `compute`, exposed communication by kind, and `idle`. Their sum is the profiled step,
    which is longer than the measured steps because of the profiler. A GPU is idle while no kernel
    runs. A CPU process is idle while no torch operator runs, even if Python code does.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    distributed.barrier()
    with profile(activities=activities) as trace, record_function(_STEP):
        step()
        synchronize(device)
    events = trace.events()
    (step_interval,) = (
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.name == _STEP and "CPU" in str(e.device_type)
    )
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
    own_parts = split_step(whole=step_interval, compute=compute, communication=communication)
    gathered: list[dict[str, float]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own_parts)
    names = sorted({name for each in gathered for name in each})
    return {
        name: 1e-6 * sum(each.get(name, 0.0) for each in gathered) / len(gathered) for name in names
    }


def communication_kind(name: str) -> str | None:
    """Return the kind of a collective; None for other events.

    For example, `all_reduce` for gloo:all_reduce and for NCCL's kernel.
    """
    lower = name.lower()
    if not lower.startswith(("gloo:", "nccl")):
        return None
    return next(
        (kind for pattern, kind in _KINDS if re.search(pattern, lower)), "other_communication"
    )


def split_step(
    *, whole: Interval, compute: Iterable[Interval], communication: Mapping[str, Iterable[Interval]]
) -> dict[str, float]:
    """Split the time window `whole` into compute, communication by kind, and `idle`, in seconds.

    Time covered by several parts counts only for the first of them, in this order.
    """
    covered = _union(compute, within=whole)
    lengths = {"compute": _total_length(covered)}
    for kind in sorted(communication):
        wider = _union([*covered, *communication[kind]], within=whole)
        lengths[kind] = _total_length(wider) - _total_length(covered)
        covered = wider
    return lengths | {"idle": whole[1] - whole[0] - _total_length(covered)}


def _union(intervals: Iterable[Interval], *, within: Interval) -> list[Interval]:
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


def _total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
