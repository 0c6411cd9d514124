"""The timed steps of a training run, the same for both engines: all of them, or until their time is known well enough."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from hp_tool.domain.measurement import ProfileRequest
from hp_tool.profiler import breakdown
from hp_tool.profiler.clock import slowest, synchronize

MIN_STEPS = 4
"""The median lies between the shortest and the longest of n steps with probability 1 - 2^(1-n): 7 in 8 for four."""
Step = Callable[[], tuple[torch.Tensor | None, float]]
"""One optimizer step -> (its mean loss; None on a rank that does not know it, gradient norm)."""


@dataclass(frozen=True, slots=True)
class Steps:
    """All steps, warm-up included, as every rank knows them."""

    times_s: tuple[float, ...]
    """The slowest rank's seconds, step by step."""
    losses: tuple[float, ...]
    """Mean over the global batch."""
    stopped: str | None
    """Why there are fewer steps than requested."""
    breakdown_s: dict[str, float] | None
    """Where the seconds of one more step went, if requested."""


def run(request: ProfileRequest, step: Step, *, device: torch.device) -> Steps:
    """Run warm-up and measured steps. Raises ArithmeticError if a loss is not finite."""
    times: list[float] = []
    losses: list[float] = []
    stopped = None
    while stopped is None and len(times) < request.warmup_steps + request.steps:
        distributed.barrier()
        synchronize(device)
        started = time.perf_counter()
        loss, norm = step()
        synchronize(device)
        times.append(slowest(time.perf_counter() - started, device=device))
        losses.append(_mean(loss, device=device))
        if distributed.get_rank() == 0:
            print(f"step {len(times)}: {times[-1]:.4f} s, loss {losses[-1]:.4f}, gradient norm {norm:.4f}", flush=True)
        stopped = why_stop(request, times)
    if not all(map(math.isfinite, losses)):
        raise ArithmeticError(f"the loss is not finite: {losses}")
    parts_s = breakdown.of_one_step(step, device=device) if request.breakdown else None
    return Steps(times_s=tuple(times), losses=tuple(losses), stopped=stopped, breakdown_s=parts_s)


def why_stop(request: ProfileRequest, times_s: Sequence[float]) -> str | None:
    """Why no further step is needed after these (warm-up included), for the measurement's cause; None to go on.

    Every rank calls it with the same times, those of the slowest rank, so that all stop together.
    """
    measured = times_s[request.warmup_steps :]
    if not measured or len(measured) >= request.steps:
        return None
    done = f"stopped after {len(measured)} of {request.steps} steps"
    if request.longest_step_s is not None and min(measured) > request.longest_step_s:
        return f"{done}: {min(measured):.4g} s is beyond {request.longest_step_s:.4g} s, hopeless against the best so far"
    spread = (max(measured) - min(measured)) / statistics.median(measured)
    if request.step_tolerance_fraction is not None and len(measured) >= MIN_STEPS and spread <= request.step_tolerance_fraction:
        return f"{done}: all within {spread:.2%}"
    return None


def sample(request: ProfileRequest, number: int) -> torch.Tensor:
    """[sequence_length + 1] synthetic tokens that depend only on the seed and the row's number."""
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + number)
    return torch.randint(request.model.vocab_size, (request.training.sequence_length + 1,), generator=generator)


def _mean(loss: torch.Tensor | None, *, device: torch.device) -> float:
    """The mean over the ranks that know a loss; a collective call."""
    sums = torch.tensor([0.0 if loss is None else float(loss), float(loss is not None)], dtype=torch.float64, device=device)
    distributed.all_reduce(sums)
    return float(sums[0] / sums[1])
