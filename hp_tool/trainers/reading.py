"""From what a trainer has printed to a Measurement."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import pairwise

from hp_tool.domain.measurement import Measurement
from hp_tool.formats.logs import LogFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run was to do."""

    sequences: int
    """A step's, of all devices."""
    sequence_length: int
    num_gpus: int
    steps: int
    """To be measured."""
    warmup_steps: int


def measurement(facts: LogFacts, *, ended: Measurement, asked: Asked) -> Measurement:
    """The run's numbers where its log has enough of them, else `ended` with the cause.

    `ended` is what the launcher says of a job that brought no result of its own. Steps that began before the warm-up was
    over are left out; a figure that is a mean over several steps counts as all of them. A job that printed all its steps
    is measured however it ended; one that its time limit or its own exit ended earlier, by the steps it has.
    """
    if ended.status in ("ok", "preempted"):
        return ended
    times_s, steps = _settled(facts, asked)
    done = steps >= asked.steps
    if facts.out_of_memory and not (done and ended.exit_code == 0):
        return replace(ended, status="oom", cause=facts.out_of_memory_line, exit_code=None)
    if not times_s and ended.exit_code == 0:
        return replace(ended, cause=_nothing(facts, asked))
    if not times_s or not (done or ended.exit_code == 0 or ended.status == "timeout"):
        return ended
    step_s = statistics.median(times_s)
    shortfall = f"{steps} of {asked.steps} steps measured"
    return Measurement(
        status="ok",
        step_s=step_s,
        step_s_spread=_interquartile_range(times_s),
        step_times_s=times_s,
        tokens_per_second_per_gpu=asked.sequences * asked.sequence_length / step_s / asked.num_gpus,
        peak_memory_bytes=None if facts.allocated_bytes is None else int(facts.allocated_bytes),
        peak_reserved_bytes=None if facts.reserved_bytes is None else int(facts.reserved_bytes),
        peak_memory_source=None if facts.allocated_bytes is None else "cuda_allocator",
        losses=tuple(facts.losses),
        hardware=ended.hardware,
        wall_s=ended.wall_s,
        cause=None if done else f"{shortfall}: {ended.cause}" if ended.status == "timeout" else shortfall,
    )


def _settled(facts: LogFacts, asked: Asked) -> tuple[tuple[float, ...], int]:
    """Seconds of each figure after the warm-up, and how many steps they stand for.

    Seconds a step by whichever figure the trainer prints: t, or B s / (n tps) from n devices' tokens a second each, or
    B / sps from sequences a second of all of them, for B sequences of s tokens.
    """
    tokens = asked.sequences * asked.sequence_length / asked.num_gpus
    kinds = {
        "step_s": facts.step_s,
        "tokens_per_second_per_gpu": [tokens / rate for rate in facts.tokens_per_second_per_gpu],
        "samples_per_second": [asked.sequences / rate for rate in facts.samples_per_second],
    }
    kind = next((name for name, times_s in kinds.items() if times_s), None)
    if kind is None:
        return (), 0
    spans = _spans(facts.ends_at.get(kind, []), count=len(kinds[kind]))
    settled = [(t, last - first) for t, (first, last) in zip(kinds[kind], spans, strict=True) if first >= asked.warmup_steps]
    return tuple(t for t, _ in settled), sum(steps for _, steps in settled)


def _spans(ends_at: list[int], *, count: int) -> list[tuple[int, int]]:
    """(steps done before, steps done after) for each figure; one step each where the trainer does not number them.

    The first figure spans at most what the second does, so that a run that goes on from a checkpoint counts from its own
    start.
    """
    if len(ends_at) != count:
        return [(number, number + 1) for number in range(count)]
    gap = ends_at[1] - ends_at[0] if count > 1 else ends_at[0]
    start = ends_at[0] - min(gap, ends_at[0])
    edges = [0, *(end - start for end in ends_at)]
    return list(pairwise(edges))


def _nothing(facts: LogFacts, asked: Asked) -> str:
    figures = len(facts.step_s) + len(facts.tokens_per_second_per_gpu) + len(facts.samples_per_second)
    if not figures:
        return "the trainer ended by itself and printed no step that trainer.reader knows; is it the right reader?"
    return (
        f"the trainer ended by itself and printed no step after the {asked.warmup_steps} of the warm-up: let it print every "
        "step and run {train_iters} of them"
    )


def _interquartile_range(times_s: tuple[float, ...]) -> float:
    if len(times_s) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return high - low
