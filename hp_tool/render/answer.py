"""The answer of a search in two sentences, the same on a page, in a terminal and in a report."""

from hp_tool.domain.answer import Answer, Baseline, Gain, Repeats, ServingAnswer, ServingBaseline
from hp_tool.render.words import change_in_words
from hp_tool.units import counted, decimal, duration, gib

LEAST_SAVED = 0.01
"""Share of a step below which a part is not worth a word."""
LEAST_RISK = 0.005


def headline(answer: Answer | ServingAnswer) -> str:
    """`3.70 s per step (3.60 s to 3.90 s, calibrated by 4 runs), 1.31 times the first run's speed (1.20 to 1.43), ...`."""
    if isinstance(answer, ServingAnswer):
        return _served(answer)
    known = f"calibrated by {counted(answer.known_from_runs, 'run')}" if answer.source == "calibrated" else "predicted, not run"
    interval = answer.step_s_interval
    between = f"{duration(interval[0])} to {duration(interval[1])}, " if interval is not None else ""
    parts = [f"{duration(answer.step_s)} per step ({between}{known})"]
    if answer.gain is not None and answer.clearly_better:
        parts.append(_gain(answer.gain, "speed"))
        parts += [saved] if answer.baseline and (saved := _saved(answer.baseline)) else []
    if answer.free_memory_bytes > 0:
        parts.append(f"{gib(answer.free_memory_bytes)} of memory free")
    if answer.out_of_memory_probability >= LEAST_RISK:
        parts.append(f"{answer.out_of_memory_probability:.0%} chance of running out of memory")
    return ", ".join(parts)


def _served(answer: ServingAnswer) -> str:
    """`323 ms to the first token and 16.8 ms per output token (measured), 304 output tokens/s per GPU, 16 users, ...`."""
    known = {"measured": "measured", "predicted": "predicted, not run"}.get(answer.source)
    latencies = ((answer.ttft_s, answer.ttft_s_interval), (answer.tpot_s, answer.tpot_s_interval))
    first, each = (
        duration(value) + (f" ({duration(interval[0])} to {duration(interval[1])})" if interval else "")
        for value, interval in latencies
    )
    known = known or f"calibrated by {counted(answer.known_from_runs, 'run')}"
    parts = [
        f"{first} to the first token and {each} per output token, {known}",
        f"{_number(answer.output_tokens_per_second_per_gpu)} output tokens/s per GPU",
    ]
    if answer.users is not None:
        parts.append(counted(answer.users, "user"))
    if (cost := answer.cost_per_million_output_tokens) is not None:
        parts.append(f"${_number(cost)} per million output tokens")
    if answer.gain is not None and answer.clearly_better:
        parts.append(_gain(answer.gain, "speed for a request"))
    saved = answer.baseline.saved_cost_per_million_output_tokens if answer.baseline and answer.clearly_better else None
    if saved is not None and saved > 0:
        parts.append(f"saves ${_number(saved)} per million output tokens")
    return ", ".join(parts)


def _gain(gain: Gain, what: str) -> str:
    """`1.31 times the first run's speed (1.20 to 1.43)`."""
    whose = "your baseline's" if gain.against == "search.baseline" else "the first run's"
    return f"{gain.factor:.2f} times {whose} {what} ({gain.interval[0]:.2f} to {gain.interval[1]:.2f})"


def not_better(answer: Answer | ServingAnswer) -> str | None:
    """`No layout is clearly better than your first`; None where one is, or where there is nothing to compare with."""
    if answer.gain is None or answer.clearly_better:
        return None
    return f"No layout is clearly better than your {'baseline' if answer.gain.against == 'search.baseline' else 'first'}"


def _doubt(answer: Answer | ServingAnswer) -> str | None:
    """`not_better` as a sentence, with what the answer's speed may be where it differs."""
    words = not_better(answer)
    if words is None or answer.gain is None or answer.baseline is None or answer.baseline.parallel == answer.parallel:
        return words and f"{words}."
    return f"{words}: this one has {_gain(answer.gain, 'speed')}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def measured_words(runs: Repeats | None) -> str:
    """`measured 5.18 s by the last of 2 runs, which took 4.18 s to 5.18 s`."""
    if runs is None:
        return "it was not run itself"
    if runs.reduced:
        return f"a reduced run implies {duration(runs.step_s)}"
    if runs.num_runs == 1:
        return f"measured {duration(runs.step_s)} in one run"
    took = f"{duration(runs.low_s)} to {duration(runs.high_s)}"
    return f"measured {duration(runs.step_s)} by the last of {runs.num_runs} runs, which took {took}"


def as_good_words(answer: Answer | ServingAnswer) -> str:
    """`5 other configurations may be as good`; empty without any."""
    return f"{counted(answer.as_good, 'other configuration')} may be as good" if answer.as_good else ""


def sentences(answer: Answer | ServingAnswer) -> list[str]:
    """All that is said of an answer, a sentence each."""
    whole = "a whole request was " if isinstance(answer, ServingAnswer) and answer.measured else ""
    known = "; ".join(each for each in (whole + measured_words(answer.measured), as_good_words(answer)) if each)
    doubt = _doubt(answer)
    return [
        *([doubt] if doubt else []),
        f"{headline(answer)}.",
        f"{known[0].upper()}{known[1:]}.",
        *(each for each in (why(answer), warning(answer)) if each),
    ]


def warning(answer: Answer | ServingAnswer) -> str | None:
    """What to do where measurement and calibration contradict each other; None where they agree."""
    if isinstance(answer, ServingAnswer) or not answer.outside or answer.measured is None:
        return None
    interval = answer.calibrated_step_s_interval or answer.step_s_interval
    if interval is None:
        return None
    low, high = interval
    return (
        f"Its measured {duration(answer.measured.step_s)} lies outside {duration(low)} to {duration(high)}, where the "
        "calibration by all runs puts it: run it again before you rely on it."
    )


def why(answer: Answer | ServingAnswer) -> str | None:
    """What the answer changes against the baseline, and where that saves time; None without one that differs."""
    baseline = answer.baseline
    if baseline is None or baseline.parallel == answer.parallel:
        return None
    change = change_in_words(baseline.parallel, answer.parallel, gpus=(1, 1)).replace(" -> ", " \u2192 ")
    floor = LEAST_SAVED * answer.objective_s
    by_size = sorted(baseline.saved_parts_s.items(), key=lambda item: item[1])
    less = [f"{duration(seconds)} less {_part(name)}" for name, seconds in reversed(by_size) if seconds > floor][:2]
    more = [f"{duration(-seconds)} more {_part(name)}" for name, seconds in by_size if seconds < -floor][:1]
    effect = ", ".join(less + more) or "about the same time in every part"
    return f"Against the {_name(baseline)}, {change}: {effect}."


def _name(baseline: Baseline | ServingBaseline) -> str:
    return "baseline" if baseline.source == "search.baseline" else "first run"


def _saved(baseline: Baseline) -> str | None:
    """What the whole training saves, money before days; None where nothing is saved or known."""
    if baseline.saved_cost is not None and baseline.saved_cost > 0:
        return f"saves ${baseline.saved_cost:,.0f} over the training"
    if baseline.saved_days is not None and baseline.saved_days > 0:
        return f"saves {decimal(baseline.saved_days)} days of training"
    return None


def _part(name: str) -> str:
    """A part of a step in words, as in `0.9 s less pipeline bubble`."""
    words = name.replace("_", " ")
    if name in ("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel"):
        return f"{words} communication"
    return {"pipeline_p2p": "pipeline transfer", "compute": "compute time", "recompute": "recomputation"}.get(name, words)
