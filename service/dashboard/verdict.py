"""Verdicts on runs and configurations in words. Measured values precede predicted ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.records import RunFigures, RunRecord
from hp_tool.domain.states import RUN_STATES, Outcome, RunState
from hp_tool.domain.units import format_count
from hp_tool.wording.figures import REQUEST, STEP
from hp_tool.wording.ratios import (
    MAX_EQUAL_DIFFERENCE,
    Ratio,
    agreement_words,
    difference_words,
    interval_words,
    measured_ratio_words,
    predicted_ratio_words,
    slower_words,
)
from service.dashboard import formats
from service.dashboard.metrics import ComparedRun, measured_peak
from service.dashboard.page import Tone
from service.dashboard.trials import TrialTable

PER = {STEP.label: "a step"} | {each.label: each.per for each in LATENCIES.values()}
"""Unit that a measured time refers to, by the time's label."""
RUN_NOISE = 0.05
"""Assumed relative difference between two runs of one configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A configuration's time relative to the first one's."""

    factor: float
    interval: tuple[float, float] | None
    """90% interval; None for a ratio of measured times."""

    @property
    def words(self) -> str:
        """The speed in words: `17% slower`."""
        return slower_words(self.factor)

    @property
    def ends(self) -> str:
        """The interval in words: `-4% to +42%`; empty without an interval."""
        return "" if self.interval is None else interval_words(self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Prediction of a run before it started, by the calibration of that time."""

    step_s: float | None
    step_s_interval: tuple[float, float] | None
    """90% interval of the predicted step time, in seconds."""
    memory_bytes: float | None
    known_from_runs: int
    """Number of measurements that calibrated the prediction."""


def stored_prediction(record: RunRecord) -> Before:
    """Return the prediction that was stored when the search chose the run."""
    stored = record.predicted
    interval = stored.get("calibrated_step_s_interval")
    return Before(
        step_s=stored.get("calibrated_step_s") or stored.get("step_s"),
        step_s_interval=(interval[0], interval[1]) if interval else None,
        memory_bytes=stored.get("calibrated_memory_allocated_bytes")
        or stored.get("memory_allocated_bytes"),
        known_from_runs=stored.get("calibration_measurements") or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A run's measurement compared with the prediction before it."""

    text: str
    inside: bool | None
    """Whether the measurement is within the interval; None without an interval."""
    word: str
    """Such as `outside its interval`; empty without an interval."""
    tone: Tone


def compare_with_prediction(run: ComparedRun, record: RunRecord) -> Agreement:
    """Compare a run with the prediction that was stored when the search chose it.

    Later predictions are fitted to the run itself, so they would not be a test. The text is, for
    example: Measured 400 ms a step; predicted before the run 46.3 ms (35.6 ms to 60.1 ms): 8.6
    times as long as predicted.
    """
    timed = _measured_time(run)
    if timed is None:
        cause = f": {run.cause}" if run.cause else ""
        happened = RUN_STATES[run.state].happened
        return Agreement(text=f"It {happened}{cause}.", inside=None, word="", tone="bad")
    name, measured_s = timed
    text, compared_s = f"Measured {formats.seconds(measured_s)} {PER[name]}", measured_s
    objective_s = record.measurement.objective_s if record.measurement else None
    if (
        objective_s and abs(objective_s / measured_s - 1.0) > MAX_EQUAL_DIFFERENCE
    ):  # Search predictions are of the quantity that the search minimises.
        text, compared_s = (
            f"{text}, {formats.seconds(objective_s)} with the penalty for missed targets",
            objective_s,
        )
    expected = stored_prediction(record)
    if not expected.step_s:
        return Agreement(text=f"{text}.", inside=None, word="", tone="")
    text += f"; predicted before the run {formats.seconds(expected.step_s)}"
    inside = None
    if expected.step_s_interval:
        low_s, high_s = expected.step_s_interval
        inside = low_s <= compared_s <= high_s
        text += f" ({formats.seconds(low_s)} to {formats.seconds(high_s)})"
    word = "" if inside is None else f"{'inside' if inside else 'outside'} its interval"
    tone: Tone = "" if inside is None else "good" if inside else "bad"
    text += f": {agreement_words(compared_s / expected.step_s)}."
    text += _memory_words(run, expected.memory_bytes)
    return Agreement(text=text, inside=inside, word=word, tone=tone)


def _memory_words(run: ComparedRun, predicted: float | None) -> str:
    """Describe the peak memory if it exceeds the prediction; otherwise return an empty text.

    For example: Its memory peaked at 3.00 GiB, 20% above the 2.50 GiB predicted.
    """
    peak = measured_peak(run)
    if not peak or not predicted or peak <= (1.0 + MAX_EQUAL_DIFFERENCE) * predicted:
        return ""  # Part of the prediction is headroom.
    return (
        f" Its memory peaked at {formats.gib(peak)}, {difference_words(peak / predicted)} above "
        f"the {formats.gib(predicted)} predicted."
    )


def _measured_time(run: ComparedRun | None) -> tuple[str, float] | None:
    """Return (label, seconds) of the run's step or request; None if it measured none."""
    known = {each.name: each.value for each in run.metrics} if run else {}
    return next(
        ((name, value) for name in (STEP.label, REQUEST.label) if (value := known.get(name))), None
    )


def relative_speeds(
    runs: Sequence[ComparedRun | None], ratios: Sequence[Ratio | None]
) -> tuple[Speed | None, ...]:
    """Return the time of each configuration after the first, relative to the first.

    If both were measured, the measured times are compared. The value is None if nothing is known.
    """
    first, *others = [_measured_time(run) for run in runs]
    return tuple(
        Speed(factor=own[1] / first[1], interval=None)
        if own and first
        else None
        if ratio is None or any(run is not None and not run.metrics for run in (runs[0], run))
        else Speed(factor=ratio[0], interval=ratio[1])
        for run, own, ratio in zip(runs[1:], others, ratios, strict=True)
    )


def recommended_index(
    unfit: Sequence[str],
    runs: Sequence[ComparedRun | None],
    speeds: Sequence[Speed | None],
) -> int | None:
    """Return the index of the recommended configuration.

    Return None if none can run or none is clearly faster. `unfit` contains the reason why each
    configuration cannot run, or an empty text. `speeds` are relative to the first configuration.
    Two predictions differ clearly if the 90% interval of their ratio excludes 1.
    """
    usable = [
        index
        for index, (why, run) in enumerate(zip(unfit, runs, strict=True))
        if (run.metrics if run is not None else not why)
    ]
    if len(usable) < 2:
        return next(iter(usable), None)
    ranges = [(1.0, 1.0), *(_range(speed) for speed in speeds[1:])]
    known = [(bounds, index) for index in usable if (bounds := ranges[index]) is not None]
    if len(known) < len(usable):
        return None
    ((_, best_high), best), *others = sorted(known)
    return best if all(best_high < low for (low, _), _ in others) else None


def _range(speed: Speed | None) -> tuple[float, float] | None:
    if speed is None:
        return None
    return speed.interval or (speed.factor / (1.0 + RUN_NOISE), speed.factor * (1.0 + RUN_NOISE))


def comparison_words(
    names: Sequence[str],
    unfit: Sequence[str],
    runs: Sequence[ComparedRun | None],
    ratios: Sequence[Ratio | None],
    recommended: int | None = None,
) -> str:
    """Describe the comparison.

    For example: Use TP 8 x PP 4: TP 1 x PP 1 does not fit; TP 8 x PP 4 is 17% slower than TP 1 x PP
    1 would be (+9% to +25%). If both configurations were measured, the measurements are compared. A
    failed run is neither slower nor faster. `unfit` contains the reason why each configuration
    cannot run, or an empty text; `recommended` is the index of the recommended configuration.
    """
    timed = [_measured_time(run) for run in runs]
    failed = [run is not None and not run.metrics for run in runs]
    parts = [
        f"{names[0]} took {formats.seconds(timed[0][1])} {PER[timed[0][0]]}, measured"
        if timed[0] and any(failed[1:])
        else "",
        *(
            f"{name} is {measured_ratio_words(own[1] / timed[0][1], names[0])}"
            if own and timed[0]
            else f"{name} {'would be' if why else 'is'} "
            f"{predicted_ratio_words(ratio, f'{names[0]} would be' if unfit[0] else names[0])}"
            f"{_unmeasured_words(names[0], name, timed[0], own)}"
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
    use = "" if recommended is None else f"Use {names[recommended]}: "
    return f"{use}{text}." if text else ""


def _unmeasured_words(
    first: str, name: str, one: tuple[str, float] | None, other: tuple[str, float] | None
) -> str:
    """Return `, by predictions alone: TP 8 was not measured; Run 1 took 400 ms a step`.

    The text is empty if neither was measured.
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


def runs_verdict(table: TrialTable) -> str:
    """Return `Run 1 is best: 400 ms, measured; run 2 crashed.`

    Equal failures are counted: `3 runs ran out of memory`.
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


def failure_words(runs: Sequence[RunFigures], *, left: int) -> str | None:
    """Return `The first run crashed: NCCL error. 3 runs left.`; None before a run has ended."""
    ended = [run for run in runs if run.status not in (None, "ok")]
    if not ended:
        return None
    which = "The first run" if len(ended) == 1 else f"All {len(ended):,} runs failed; the last"
    last = ended[-1]
    cause = f": {last.cause}" if last.cause else ""
    return f"{which} {last.shown_state.happened}{cause}. {format_count(left, 'run')} left."
