"""Sentences about the verdict and the metrics of a search, for pages, the terminal and reports."""

import statistics

from hp_tool.domain.answer import (
    Answer,
    Baseline,
    Gain,
    Repeats,
    ServingAnswer,
    ServingBaseline,
    VerdictState,
    get_verdict,
)
from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.measurement import Latencies
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.parts import PARTS
from hp_tool.domain.serving import InferenceEstimate, ServingConfig
from hp_tool.domain.units import (
    capitalize_first,
    format_count,
    format_decimal,
    format_duration,
    format_duration_range,
    format_factor,
    format_gib,
)
from hp_tool.wording.words import change_in_words, stopped_words

MIN_SAVED_FRACTION = 0.01
"""Minimum saving of a part, as a fraction of the step, for it to be reported."""
MIN_RISK = 0.005
"""Minimum out-of-memory probability for it to be reported."""
MIN_REPORTED_ERROR_FACTOR = 1.5
"""Minimum error factor of the cost model for a sentence to report it."""
TITLES: dict[VerdictState, str] = {
    "use": "Use this configuration",
    "keep": "Keep your baseline",
    "tied": "No clear winner: take this layout",
    "repeat": "Run this configuration again",
    "unmeasured": "Best by prediction: run it first",
}
BASELINE_OWNERS = {
    "search.baseline": "your baseline's",
    "first run": "the first run's",
    "slowest run": "the slowest run's",
}


def answer_headline(answer: Answer | ServingAnswer) -> str:
    """Return `3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs), 1.31 times the first run's
    speed (1.20 to 1.43), ...`.
    """
    if isinstance(answer, ServingAnswer):
        return _serving_headline(answer)
    source = (
        f"calibrated by {format_count(answer.known_from_runs, 'run')}"
        if answer.source == "calibrated"
        else "predicted, not run"
    )
    interval = answer.step_s_interval
    interval_text = (
        f"{format_duration(interval[0])} to {format_duration(interval[1])}, "
        if interval is not None
        else ""
    )
    parts = [f"{format_duration(answer.step_s)} per step ({interval_text}{source})"]
    if answer.gain is not None and get_verdict(answer).state == "use":
        parts.append(_gain_words(answer.gain, "speed"))
        parts += [saved] if answer.baseline and (saved := _savings_words(answer.baseline)) else []
    if answer.free_memory_bytes > 0:
        parts.append(f"{format_gib(answer.free_memory_bytes)} of memory expected to stay free")
    if answer.out_of_memory_probability >= MIN_RISK:
        parts.append(f"{answer.out_of_memory_probability:.0%} chance of running out of memory")
    return ", ".join(parts)


def _serving_headline(answer: ServingAnswer) -> str:
    """Return `323 ms to the first token and 16.8 ms per output token, calibrated by 4 runs, 304
    output tokens/s per GPU, ...`.
    """
    predicted = answer.source == "predicted"
    known = (
        "predicted, not run"
        if predicted
        else f"calibrated by {format_count(answer.known_from_runs, 'run')}"
    )
    latencies = ((answer.ttft_s, answer.ttft_s_interval), (answer.tpot_s, answer.tpot_s_interval))
    first, each = (
        format_duration(value)
        + (
            f" ({format_duration(interval[0])} to {format_duration(interval[1])})"
            if interval
            else ""
        )
        for value, interval in latencies
    )
    parts = [
        f"{first} to the first token and {each} per output token, {known}",
        f"{_format_number(answer.output_tokens_per_second_per_gpu)} output tokens/s per GPU",
    ]
    if answer.users is not None:
        parts.append(format_count(answer.users, "user"))
    if (cost := answer.cost_per_million_output_tokens) is not None:
        parts.append(f"${_format_number(cost)} per million output tokens")
    use = get_verdict(answer).state == "use"
    if answer.gain is not None and use:
        parts.append(_gain_words(answer.gain, "speed for a request"))
    saved = (
        answer.baseline.saved_cost_per_million_output_tokens if answer.baseline and use else None
    )
    if saved is not None and saved > 0:
        parts.append(f"saves ${_format_number(saved)} per million output tokens")
    return ", ".join(parts)


def _gain_words(gain: Gain, what: str, *, source: bool = True) -> str:
    """Return `1.31 times the first run's speed (1.20 to 1.43, measured)`."""
    (low, high), known = gain.interval, f", {gain.source}" if source else ""
    return (
        f"{gain.factor:.2f} times {BASELINE_OWNERS[gain.against]} {what} ({low:.2f} to "
        f"{high:.2f}{known})"
    )


def answer_title(answer: Answer | ServingAnswer) -> str:
    """Return the recommended action as a title: `Use this configuration` or `Keep your
    baseline`.
    """
    return TITLES[get_verdict(answer).state]


def decision_sentence(answer: Answer | ServingAnswer) -> str | None:
    """Return the reason for the verdict; None for the verdict `use`."""
    state = get_verdict(answer).state
    if state == "unmeasured":
        return (
            "This layout did not run."
            if answer.known_from_runs
            else "No run succeeded, so nothing is measured."
        )
    if state == "repeat":
        return _uncertainty_words(answer)
    if state == "keep":
        if configuration_to_keep(answer) is None or answer.gain is None:
            return "No other layout is clearly faster."
        gain = _gain_words(answer.gain, "speed")
        return f"The fastest layout has {gain}, which is not clearly faster."
    if state == "tied":
        others = rivals_words(answer)
        return f"{capitalize_first(others)}." if others else "No layout is clearly faster."
    return None


def _uncertainty_words(answer: Answer | ServingAnswer) -> str:
    """Return the reason why a single run does not determine the step time."""
    runs = answer.measured
    assert isinstance(answer, Answer) and runs is not None
    if answer.outside and answer.calibrated_step_s_interval is not None:
        low, high = map(format_duration, answer.calibrated_step_s_interval)
        return f"Expected {low} to {high}, but one run measured {format_duration(runs.step_s)}."
    low, high = map(format_duration, answer.step_s_interval or (runs.step_s, runs.step_s))
    return f"After one run, the step time is between {low} and {high}."


def configuration_to_keep(
    answer: Answer | ServingAnswer | None,
) -> ParallelConfig | ServingConfig | None:
    """Return the configuration to keep instead of the answer's; None unless the verdict is to keep
    one.
    """
    if answer is None:
        return None
    chosen = get_verdict(answer).parallel
    return None if chosen == answer.parallel else chosen


def stop_reason(code: str, state: VerdictState | None) -> str:
    """Return the reason why a search with this verdict stopped."""
    if code == "no_expected_gain" and state == "repeat":
        return "no other layout is likely to be faster"
    return stopped_words(code)


def gains_words(answer: Answer | ServingAnswer) -> str | None:
    """Return `It has 2.61 times the slowest run's speed (2.31 to 2.95). Speeds are ratios of mean
    measured step times ...`; None if no gain was measured.
    """
    measured = [gain for gain in answer.gains if gain.source == "measured" and gain.factor != 1.0]
    if not measured or measured[0].noise_fraction is None:
        return None
    by_figures = {
        (gain.factor, gain.interval): gain for gain in reversed(measured)
    }  # The first run and the slowest run may have the same layout.
    others = [gain for gain in reversed(by_figures.values()) if gain != answer.gain]
    comparison = (
        f"It has {' and '.join(_gain_words(gain, 'speed', source=False) for gain in others)}. "
        if others
        else ""
    )
    slowest = next((gain for gain in measured if gain.against == "slowest run"), None)
    if slowest is not None and slowest not in by_figures.values():
        whose = by_figures[slowest.factor, slowest.interval].against
        comparison += (
            "The slowest run was "
            f"{'your baseline' if whose == 'search.baseline' else 'the first run'}. "
        )
    noise = f"{measured[0].noise_fraction:.0%}"
    source = (
        "from repeated runs and the usual noise"
        if measured[0].noise_from == "repeats"
        else "assumed, because no layout ran twice"
    )
    return (
        f"{comparison}Speeds are ratios of mean measured step times with {noise} run-to-run noise "
        f"({source})."
    )


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measured_words(runs: Repeats) -> str:
    """Return `measured 5.18 s in the last of 2 runs (4.18-5.18 s)`."""
    if runs.reduced:
        return f"a reduced run implies {format_duration(runs.step_s)}"
    if runs.num_runs == 1:
        return f"measured {format_duration(runs.step_s)} in one run"
    span = format_duration_range(runs.low_s, runs.high_s)
    return f"measured {format_duration(runs.step_s)} in the last of {runs.num_runs} runs ({span})"


def prediction_check_words(answer: Answer | ServingAnswer) -> str | None:
    """Return `Predicted 3.70 s before it ran (2.90 s to 4.70 s), measured 4.20 s: 14% slower,
    inside the interval.`
    """
    if (
        isinstance(answer, ServingAnswer)
        or (before := answer.foreseen) is None
        or answer.measured is None
    ):
        return None
    step_s, (low_s, high_s) = answer.measured.step_s, before.step_s_interval
    difference = (
        f"{abs(before.off_fraction):.0%} {'slower' if before.off_fraction > 0 else 'faster'}"
    )
    position = "inside" if low_s <= step_s <= high_s else "outside"
    predicted = (
        f"{format_duration(before.step_s)} before it ran ({format_duration(low_s)} to "
        f"{format_duration(high_s)})"
    )
    return (
        f"Predicted {predicted}, measured {format_duration(step_s)}: {difference}, "
        f"{position} the interval."
    )


def rivals_words(answer: Answer | ServingAnswer) -> str:
    """Return `5 other layouts may be as fast`; empty if there are no rivals."""
    return (
        f"{format_count(answer.as_good, 'other layout')} may be as fast" if answer.as_good else ""
    )


def answer_sentences(answer: Answer | ServingAnswer, *, measured: str | None = None) -> list[str]:
    """Return the sentences that describe an answer, the verdict first.

    If `measured` is set, it replaces the sentence about the measurements.
    """
    subject = "request latency: " if isinstance(answer, ServingAnswer) and answer.measured else ""
    state = get_verdict(answer).state
    facts = [
        measured or ("" if answer.measured is None else subject + measured_words(answer.measured)),
        "" if state in ("tied", "repeat") else rivals_words(answer),
    ]
    runs_text = "; ".join(filter(None, facts))
    return [
        each
        for each in (
            decision_sentence(answer),
            f"{answer_headline(answer)}.",
            f"{capitalize_first(runs_text)}." if runs_text else None,
            prediction_check_words(answer),
            gains_words(answer),
            explain_change(answer),
            disagreement_words(answer),
        )
        if each
    ]


def disagreement_words(answer: Answer | ServingAnswer) -> str | None:
    """Return a sentence if repeated runs of the answer contradict the calibration, else None."""
    if not isinstance(answer, Answer) or not answer.outside or answer.measured is None:
        return None
    interval = answer.calibrated_step_s_interval
    if interval is None or answer.measured.num_runs == 1:
        return None
    low, high = map(format_duration, interval)
    return f"Its runs contradict the calibrated prediction of {low} to {high} and count more."


def explain_change(answer: Answer | ServingAnswer) -> str | None:
    """Return how the answer differs from the baseline, and the parts of a step in which this saves
    time; None if it does not differ.
    """
    baseline = answer.baseline
    if baseline is None or baseline.parallel == answer.parallel:
        return None
    change = change_in_words(baseline.parallel, answer.parallel, gpus=(1, 1)).replace(
        " -> ", " \u2192 "
    )
    floor = MIN_SAVED_FRACTION * answer.objective_s
    by_size = sorted(baseline.saved_parts_s.items(), key=lambda item: item[1])
    less = [
        f"{format_duration(seconds)} less {PARTS[name].in_words}"
        for name, seconds in reversed(by_size)
        if seconds > floor
    ][:2]
    more = [
        f"{format_duration(-seconds)} more {PARTS[name].in_words}"
        for name, seconds in by_size
        if seconds < -floor
    ][:1]
    effect = ", ".join(less + more) or "about the same time in every part"
    return f"Compared with the {_baseline_name(baseline)}, {change}: predicted {effect}."


def _baseline_name(baseline: Baseline | ServingBaseline) -> str:
    return "baseline" if baseline.source == "search.baseline" else "first run"


def _savings_words(baseline: Baseline) -> str | None:
    """Return the saved cost over the training run, else the saved days; None if neither is
    known.
    """
    if baseline.saved_cost is not None and baseline.saved_cost > 0:
        return f"saves ${baseline.saved_cost:,.0f} over the training"
    if baseline.saved_days is not None and baseline.saved_days > 0:
        return f"saves {format_decimal(baseline.saved_days)} days of training"
    return None


def measured_load_words(load: Latencies, runs: Repeats | None) -> str:
    """Return the measured latencies in words.

    For example `measured 323.1 ms to the first token, 16.8 ms per output token and 843.9 ms per
    request in one run.`
    """
    first, each, whole = (
        f"{format_duration(getattr(load, name))} {each.per}" for name, each in LATENCIES.items()
    )
    several = (
        "in one run"
        if runs is None or runs.num_runs == 1
        else f"in the last of {runs.num_runs} runs"
    )
    return f"measured {first}, {each} and {whole} {several}"


def cost_model_error_words(
    predicted: InferenceEstimate, measured: Latencies | None
) -> tuple[str, ...]:
    """Return the error of the cost model in words; empty if the error is small.

    For example `The cost model alone was 3.0 times too fast: 107.7 ms to the first token, measured
    323.1 ms.` The latency shown is the one whose error ratio is the median of the three.
    """
    latencies = (
        {name: (getattr(measured, name), getattr(predicted, name)) for name in LATENCIES}
        if measured
        else {}
    )
    factors = [
        measured_s / predicted_s for measured_s, predicted_s in latencies.values() if predicted_s
    ]
    if len(factors) < len(LATENCIES) or not (
        all(each > MIN_REPORTED_ERROR_FACTOR for each in factors)
        or all(each < 1.0 / MIN_REPORTED_ERROR_FACTOR for each in factors)
    ):
        return ()
    typical = statistics.median_low(factors)
    name, (measured_s, predicted_s) = next(
        pair for pair, factor in zip(latencies.items(), factors, strict=True) if factor == typical
    )
    direction = (
        f"{format_factor(typical)} too fast"
        if typical > 1.0
        else f"{format_factor(1.0 / typical)} too slow"
    )
    return (
        f"The cost model alone was {direction}: {format_duration(predicted_s)} "
        f"{LATENCIES[name].per}, measured "
        f"{format_duration(measured_s)}.",
    )
