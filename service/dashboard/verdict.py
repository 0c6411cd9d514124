"""Verdicts on runs and configurations in words; measured values come before predicted ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.records import JsonObject, RunFigures, RunRecord
from hp_tool.domain.states import RUN_STATES, Outcome, RunState
from hp_tool.domain.units import format_count, format_factor
from hp_tool.wording.figures import REQUEST, STEP
from service.dashboard import formats
from service.dashboard.metrics import ComparedRun, measured_peak
from service.dashboard.page import Tone
from service.dashboard.trials import TrialTable

MUCH = 1.5
"""Ratio from which a factor is written instead of a percentage."""
SAME = 0.005
"""Relative difference below which two figures are equal."""
PER = {STEP.label: "a step"} | {each.label: each.per for each in LATENCIES.values()}
"""Unit of a measured time, by its label."""

Ratio = tuple[float, tuple[float, float]]
"""A ratio of times, and its 90% interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A run's measurement, compared with the prediction before it."""

    text: str
    inside: bool | None
    """Whether the interval contains the measurement; None without an interval."""
    word: str
    """`outside its interval`; empty without an interval."""
    tone: Tone


def agreement(run: ComparedRun, record: RunRecord) -> Agreement:
    """Compare a run with the prediction stored when the search chose it.

    Later predictions of the search are fitted on the run itself, so they do not test it. The result
    is, for example: Measured 400 ms a step; predicted before the run 46.3 ms (35.6 ms to 60.1 ms):
    8.6 times as long as predicted.
    """
    timed = _timed(run)
    if timed is None:
        cause = f": {run.cause}" if run.cause else ""
        happened = RUN_STATES[run.state].happened
        return Agreement(text=f"It {happened}{cause}.", inside=None, word="", tone="bad")
    name, measured_s = timed
    text, compared_s = f"Measured {formats.seconds(measured_s)} {PER[name]}", measured_s
    objective_s = record.measurement.objective_s if record.measurement else None
    if (
        objective_s and abs(objective_s / measured_s - 1.0) > SAME
    ):  # the search predicts what it minimises
        text, compared_s = (
            f"{text}, {formats.seconds(objective_s)} with the penalty for missed targets",
            objective_s,
        )
    before = record.predicted
    predicted_s = before.get("calibrated_step_s") or before.get("step_s")
    if not predicted_s:
        return Agreement(text=f"{text}.", inside=None, word="", tone="")
    text += f"; predicted before the run {formats.seconds(predicted_s)}"
    inside = None
    if interval := before.get("calibrated_step_s_interval"):
        low_s, high_s = interval
        inside = low_s <= compared_s <= high_s
        text += f" ({formats.seconds(low_s)} to {formats.seconds(high_s)})"
    word = "" if inside is None else f"{'inside' if inside else 'outside'} its interval"
    tone: Tone = "" if inside is None else "good" if inside else "bad"
    text = f"{text}: {_off(compared_s / predicted_s)}.{_memory(run, before)}"
    return Agreement(text=text, inside=inside, word=word, tone=tone)


def _memory(run: ComparedRun, before: JsonObject) -> str:
    """Return the memory peak in words if it exceeds the prediction, else an empty text.

    For example: Its memory peaked at 3.00 GiB, 20 % above the 2.50 GiB that were predicted.
    """
    peak = measured_peak(run)
    predicted = before.get("calibrated_memory_allocated_bytes") or before.get(
        "memory_allocated_bytes"
    )
    if not peak or not predicted or peak <= (1.0 + SAME) * predicted:
        return ""  # less than predicted is harmless: some of it is headroom
    return (
        f" Its memory peaked at {formats.gib(peak)}, {_percent(peak / predicted)} above the "
        f"{formats.gib(predicted)} predicted."
    )


def _off(factor: float) -> str:
    """Return `8.6 times as long as predicted` or `12 % longer than predicted`."""
    if factor >= MUCH:
        return f"{format_factor(factor)} as long as predicted"
    if factor <= 1.0 / MUCH:
        return f"{format_factor(1.0 / factor)} as fast as predicted"
    if abs(factor - 1.0) < SAME:
        return "as predicted"
    return f"{_percent(factor)} {'longer' if factor > 1.0 else 'shorter'} than predicted"


def _timed(run: ComparedRun | None) -> tuple[str, float] | None:
    """Return (label, seconds) of the run's step or whole request; None if it measured none."""
    known = {each.name: each.value for each in run.metrics} if run else {}
    return next(
        ((name, value) for name in (STEP.label, REQUEST.label) if (value := known.get(name))), None
    )


def verdict(
    names: Sequence[str],
    unfit: Sequence[str],
    runs: Sequence[ComparedRun | None],
    ratios: Sequence[Ratio | None],
) -> str:
    """Return the comparison in words.

    For example: First does not fit; Second is 17 % slower than First would be, 9 to 25 %. If both
    sides were measured, the measurements are compared. A run that failed is neither slower nor
    faster. `unfit` has the reason why each cannot run, empty if it can.
    """
    timed = [_timed(run) for run in runs]
    failed = [run is not None and not run.metrics for run in runs]
    parts = [
        f"{names[0]} took {formats.seconds(timed[0][1])} {PER[timed[0][0]]}, measured"
        if timed[0] and any(failed[1:])
        else "",
        *(
            f"{name} is {_measured(own[1] / timed[0][1], names[0])}"
            if own and timed[0]
            else f"{name} {'would be' if why else 'is'} "
            f"{_slower(ratio, f'{names[0]} would be' if unfit[0] else names[0])}"
            f"{_unmeasured(names[0], name, timed[0], own)}"
            if ratio is not None
            else ""
            for name, why, ratio, own, failure in zip(
                names[1:], unfit[1:], ratios, timed[1:], failed[1:], strict=True
            )
            if not failure and not failed[0]
        ),
    ]
    if failed[0]:
        done = zip(names[1:], timed[1:], strict=True)
        parts = [
            f"{name} took {formats.seconds(own[1])} {PER[own[0]]}, measured"
            for name, own in done
            if own
        ]
    ended = [
        f"{name} {RUN_STATES[run.state].happened}"
        for name, run, failure in zip(names, runs, failed, strict=True)
        if run and failure
    ]
    cannot = [
        f"{name} {why}"
        for name, why, failure, own in zip(names, unfit, failed, timed, strict=True)
        if why and not failure and not own
    ]
    text = "; ".join(filter(None, [" and ".join(cannot), *parts]))
    if ended:
        text += f"{'; but ' if text else ''}{' and '.join(ended)}"
    return f"{text}." if text else ""


def _unmeasured(
    first: str, name: str, one: tuple[str, float] | None, other: tuple[str, float] | None
) -> str:
    """Return `, by predictions alone: Second was not measured; First took 400 ms a step`.

    Empty if neither was measured.
    """
    if one is None and other is None:
        return ""
    (ran, (label, seconds)), lacks = (
        ((first, one), name) if one else ((name, other or ("", 0.0)), first)
    )
    return (
        f", by predictions alone: {lacks} was not measured; {ran} took "
        f"{formats.seconds(seconds)} {PER[label]}"
    )


def _measured(factor: float, first: str) -> str:
    """Return `17 % slower than First, measured`."""
    if abs(factor - 1.0) < SAME:
        return f"as fast as {first}, measured"
    if factor >= MUCH:
        return f"{format_factor(factor)} as slow as {first}, measured"
    if factor <= 1.0 / MUCH:
        return f"{format_factor(1.0 / factor)} as fast as {first}, measured"
    return f"{_percent(factor)} {'slower' if factor > 1.0 else 'faster'} than {first}, measured"


def _slower(ratio: Ratio, first: str) -> str:
    """Return `17 % slower than First, 9 to 25 %`; both ends have a direction if the interval
    contains 0.
    """
    factor, (low, high) = ratio
    if low < 1.0 < high:
        return f"about as fast as {first}: from {_percent(low)} faster to {_percent(high)} slower"
    ends = sorted(abs(end - 1.0) for end in (low, high))
    word = "slower" if factor > 1.0 else "faster"
    return f"{_percent(factor)} {word} than {first}, {100 * ends[0]:.0f} to {100 * ends[1]:.0f} %"


def _percent(factor: float) -> str:
    return f"{100 * abs(factor - 1.0):.0f} %"


def runs_verdict(table: TrialTable) -> str:
    """Return `Run 1 is best: 400 ms, measured; run 2 crashed.`; equal failures are counted.

    For example `3 runs ran out of memory`.
    """
    best = table.best
    seconds = None if best is None else table.measured_step_s[best]
    parts = []
    if best is not None and seconds:
        parts.append(f"Run {table.number[best] + 1} is best: {formats.seconds(seconds)}, measured")
    states: dict[RunState | Outcome, list[int]] = {}
    for number, key in zip(table.number, table.state, strict=True):
        if (state := RUN_STATES[key]).tone in ("warn", "bad"):
            states.setdefault(state, []).append(number + 1)
    failed = [
        f"run {runs[0]} {state.happened}"
        if len(runs) == 1
        else f"{len(runs):,} runs {state.happened.replace('was ', 'were ', 1)}"
        for state, runs in states.items()
    ]
    text = "; ".join([*parts, *([" and ".join(failed)] if failed else [])])
    return formats.sentence(text)


def failed_so_far(runs: Sequence[RunFigures], *, left: int) -> str | None:
    """Return `The first run crashed: NCCL error. 3 runs left.`; None before a run has ended."""
    ended = [run for run in runs if run.status not in (None, "ok")]
    if not ended:
        return None
    which = "The first run" if len(ended) == 1 else f"All {len(ended):,} runs failed; the last"
    last = ended[-1]
    cause = f": {last.cause}" if last.cause else ""
    return f"{which} {last.shown_state.happened}{cause}. {format_count(left, 'run')} left."
