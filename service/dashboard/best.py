"""The best configuration of a search, for its page and its report."""

from dataclasses import dataclass, field, replace
from typing import Any

from hp_tool.domain.answer import (
    Answer,
    Gain,
    Repeats,
    ServingAnswer,
    VerdictState,
    get_verdict,
)
from hp_tool.domain.axes import AXES_BY_KEY
from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.measurement import Latencies, Measurement
from hp_tool.domain.ports import Store
from hp_tool.domain.records import JsonObject, RunRecord, SearchRecord
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, RunConfig, ServingRecommendation
from hp_tool.domain.states import RunState
from hp_tool.domain.units import capitalize_first
from hp_tool.errors import HpToolError
from hp_tool.loop.search.serving import TARGETS
from hp_tool.questions import anatomy, schema
from hp_tool.wording import answer as words
from hp_tool.wording.fit import unrun_settings_words
from service.api.search_results import first_recommendation
from service.dashboard import formats, trials
from service.dashboard.page import stored_configuration
from service.dashboard.rivals import Rival, list_rivals


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One latency of a serving configuration."""

    name: str
    known_s: float | None
    """Seconds, calibrated and corrected by the configuration's runs; None before there is an
    answer.
    """
    measured_s: float | None
    """Seconds measured by the configuration's representative run; None if it did not run."""
    predicted_s: float | None
    """Seconds predicted by the cost model without calibration."""
    target_s: float | None
    """Target in seconds; None if the query has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best configuration measured so far; after the end of a search, the recommended one,
    measured or not.
    """

    parallel: RunConfig
    arithmetic: str
    details: str
    measured: bool
    step_s: float | None
    """Step time in seconds: measured, or predicted if `measured` is false."""
    tokens_per_second_per_gpu: float | None
    peak_memory_bytes: int | None = None
    predicted_step_s: float | None = None
    """Step time in seconds, predicted by the cost model without calibration."""
    calibrated_step_s: float | None = None
    """Step time in seconds, predicted by the calibrated cost model."""
    predicted_memory_bytes: float | None = None
    latencies: tuple[Latency, ...] = ()
    """Latencies of a serving configuration under full load."""
    predicted_tokens_per_second_per_gpu: float | None = None
    """Serving throughput predicted by the cost model."""
    calibrated_tokens_per_second_per_gpu: float | None = None
    """Serving throughput predicted by the calibrated cost model."""
    misses: tuple[str, ...] = ()
    """Targets that its measurement misses."""
    step_s_interval: tuple[float, float] | None = None
    """90% interval of `calibrated_step_s`."""
    runs: Repeats | None = None
    """Runs of the configuration. One of them represents it."""
    sentences: tuple[str, ...] = ()
    """The answer in sentences, as on the command line. The first `num_verdict` are the verdict."""
    num_verdict: int = 1
    gain: Gain | None = None
    """Speedup over the baseline, the first run or the slowest run."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by part. They sum to the measured step time, ideal compute first; for serving, to the
    latency of a request.
    """
    verdict: VerdictState | None = None
    """None before a search has ended."""
    title: str = ""
    """The verdict in words."""
    kept: tuple[str, str] | None = None
    """Arithmetic and details of the configuration to keep, if it is not this one."""
    recommended: RunConfig | None = None
    """The configuration to run, according to the verdict; before a verdict, this one."""
    rivals: tuple[Rival, ...] = ()
    """Untested configurations of the result that may be as good, most likely first."""
    set: dict[str, Any] = field(default_factory=dict)
    """Query values that the ranking chose besides `parallel`, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisValue:
    """The best known configuration with one value of an axis."""

    value: str
    step_s: float
    loss_fraction: float
    """Relative slowdown of its step time against the fastest."""
    chosen: bool
    """Whether the answer has this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisEffect:
    """Effect of one setting on the step time."""

    label: str
    values: tuple[AxisValue, ...]
    """Fastest first."""


def best_of_search(record: SearchRecord, store: Store) -> Best | None:
    """Return the first row of a search's result; without a result, its best run so far.

    Return None for a search that failed or was cancelled.
    """
    if record.state.failed:
        return None
    row, run_id = first_recommendation(record), record.progress.get("best_run_id")
    answer = (record.result or {}).get("answer")
    if isinstance(row, ServingRecommendation):
        best = _serving_best(row, record.query, answer and schema.parse(ServingAnswer, answer))
        return _add_rivals(best, record)
    if row is not None:
        best = _training_best(row, record.query, answer and schema.parse(Answer, answer))
        return _add_details(_add_rivals(best, record), record)
    if run_id is None:
        return None
    only = len(store.list_runs(search_id=record.id, state=RunState.FINISHED, limit=2).items) == 1
    leading = _best_so_far(store.get_run(search_id=record.id, run_id=run_id), record, only=only)
    return leading and _add_details(leading, record)


def _add_rivals(best: Best, record: SearchRecord) -> Best:
    """Add the untested layouts that may be as fast, unless the verdict is to repeat the run."""
    return best if best.verdict == "repeat" else replace(best, rivals=list_rivals(record))


def _add_details(best: Best, record: SearchRecord) -> Best:
    """Add the settings that the ranking chose to the details."""
    configuration = (
        None if trials.is_serving(record.query) else stored_configuration(record.query, best)
    )
    return (
        best
        if configuration is None
        else replace(best, details=formats.configuration_details(configuration))
    )


def _training_best(row: Recommendation, query: JsonObject, answer: Answer | None) -> Best:
    predicted, known, measurement = row.estimate, row.preferred_estimate, row.measurement
    calibrated_step_s = known.time.step_s if known.time else None
    arithmetic, details = trials.configuration_words(row.parallel, query)
    interval = known.intervals.step_s if known.intervals else None
    return Best(
        parallel=row.parallel,
        set=row.set,
        arithmetic=arithmetic,
        details=details,
        step_s_interval=interval,
        runs=answer.measured if answer else None,
        sentences=(
            *(
                map(formats.arrows, words.answer_sentences(answer))
                if answer
                else _measured_alone(measurement)
            ),
            *filter(None, (unrun_settings_words(predicted.provenance.get("unrun")),)),
        ),
        parts=anatomy.step_excess(known, measurement.objective_s if measurement else None),
        **_verdict_fields(answer, query),
        measured=measurement is not None,
        step_s=measurement.objective_s if measurement else calibrated_step_s,
        tokens_per_second_per_gpu=_rate(known, measurement),
        peak_memory_bytes=_peak_memory_bytes(measurement) if measurement else None,
        predicted_step_s=predicted.time.step_s if predicted.time else None,
        calibrated_step_s=calibrated_step_s,
        predicted_memory_bytes=predicted.memory.allocated_bytes if predicted.memory else None,
    )


def _verdict_fields(answer: Answer | ServingAnswer | None, query: JsonObject) -> JsonObject:
    """Return the verdict's fields; empty for a stored result without an answer."""
    if answer is None:
        return {}
    verdict, yours = get_verdict(answer), words.configuration_to_keep(answer)
    gains = [gain for gain in (answer.gain, *answer.gains) if gain and gain.factor != 1.0]
    return {
        "verdict": verdict.state,
        "title": words.answer_title(answer),
        "num_verdict": 1 if words.decision_sentence(answer) is None else 2,
        "gain": next(iter(gains), None),
        "kept": None if yours is None else trials.configuration_words(yours, query),
        "recommended": verdict.parallel,
    }


def _measured_alone(measurement: Measurement | None) -> tuple[str, ...]:
    """Return the sentences for a stored result without an answer."""
    return (
        (f"Measured {formats.seconds(measurement.objective_s)}.",)
        if measurement and measurement.objective_s
        else ()
    )


def _best_so_far(run: RunRecord, record: SearchRecord, *, only: bool) -> Best | None:
    """Return the best run so far with its predictions; None without a measurement.

    `only` means that no other run has finished.
    """
    query, progress = record.query, record.progress
    if (measurement := run.measurement) is None or measurement.objective_s is None:
        return None
    low_s, high_s = progress.get("best_step_s_range") or [measurement.objective_s] * 2
    runs = Repeats(
        run_id=run.id,
        step_s=measurement.objective_s,
        num_runs=progress.get("best_num_runs") or 1,
        low_s=low_s,
        high_s=high_s,
        reduced=not run.fidelity.is_whole,
    )
    arithmetic, details = trials.configuration_words(run.parallel, query)
    standing = "the only run so far" if only else "the fastest so far"
    best = Best(
        parallel=run.parallel,
        set=run.set,
        arithmetic=arithmetic,
        details=details,
        measured=True,
        runs=runs,
        sentences=(f"{_measured_words(measurement, runs)}, {standing}.",),
        step_s=measurement.objective_s,
        tokens_per_second_per_gpu=None if runs.reduced else measurement.tokens_per_second_per_gpu,
        peak_memory_bytes=_peak_memory_bytes(measurement),
        predicted_step_s=run.predicted.get("step_s"),
        calibrated_step_s=run.predicted.get("calibrated_step_s"),
        predicted_memory_bytes=run.predicted.get("memory_allocated_bytes"),
    )
    if not trials.is_serving(query):
        return best
    try:
        costs = trials.predicted_costs(query, [run.parallel])
    except HpToolError:  # Show only stored values.
        return best
    return replace(
        best,
        predicted_tokens_per_second_per_gpu=float(costs.output_tokens_per_second_per_gpu[0]),
        misses=trials.missed_targets(measurement.load, query) if measurement.load else (),
        latencies=_latencies(
            {name: float(getattr(costs, name)[0]) for name in TARGETS},
            known=None,
            measured=measurement.load,
            query=query,
        ),
    )


def _measured_words(measurement: Measurement, runs: Repeats) -> str:
    """Describe the measured latencies for serving, else the measured step time.

    The objective of a serving search may include a penalty, so it is not shown. The text has no
    full stop.
    """
    load = measurement.load
    return capitalize_first(
        words.measured_words(runs) if load is None else words.measured_load_words(load, runs)
    )


def _rate(known: Estimate, measurement: Measurement | None) -> float | None:
    """Return the tokens/s per GPU of the full configuration; for a reduced run, extrapolated."""
    if measurement is None:
        return known.tokens_per_second_per_gpu
    if measurement.fidelity.is_whole:
        return measurement.tokens_per_second_per_gpu
    rate, time, step_s = known.tokens_per_second_per_gpu, known.time, measurement.objective_s
    return rate * time.step_s / step_s if rate and time and step_s else None


def _peak_memory_bytes(measurement: Measurement) -> int | None:
    """Return the peak memory in bytes; None for a reduced run, whose memory differs."""
    return measurement.peak_memory_bytes if measurement.fidelity.is_whole else None


def _serving_best(
    row: ServingRecommendation, query: JsonObject, answer: ServingAnswer | None
) -> Best:
    predicted, known, measurement = row.estimate, row.preferred_estimate, row.measurement
    load = measurement.load if measurement else None
    arithmetic, details = trials.configuration_words(row.parallel, query)
    measured_rate = measurement.tokens_per_second_per_gpu if measurement else None
    measured = words.measured_load_words(load, answer.measured) if load and answer else None
    sentences = words.answer_sentences(answer, measured=measured) if answer else ()
    device = f"per {formats.device_of(query)}"
    return Best(
        parallel=row.parallel,
        set=row.set,
        arithmetic=arithmetic,
        details=details,
        runs=answer.measured if answer else None,
        sentences=(
            *(formats.arrows(each).replace("per GPU", device) for each in sentences),
            *words.cost_model_error_words(predicted, load),
        ),
        **_verdict_fields(answer, query),
        parts={
            formats.words(name): seconds
            for name, seconds in (known.parts_s or {}).items()
            if seconds
        },
        measured=measurement is not None,
        step_s=load.request_latency_s if load else known.request_latency_s,
        tokens_per_second_per_gpu=measured_rate or known.output_tokens_per_second_per_gpu,
        calibrated_tokens_per_second_per_gpu=known.output_tokens_per_second_per_gpu,
        peak_memory_bytes=measurement.peak_memory_bytes if measurement else None,
        predicted_step_s=predicted.request_latency_s,
        calibrated_step_s=known.request_latency_s,
        predicted_tokens_per_second_per_gpu=predicted.output_tokens_per_second_per_gpu,
        latencies=_latencies(
            {name: getattr(predicted, name) for name in TARGETS},
            known=known,
            measured=load,
            query=query,
        ),
    )


def _latencies(
    predicted_s: dict[str, float | None],
    *,
    known: InferenceEstimate | None,
    measured: Latencies | None,
    query: JsonObject,
) -> tuple[Latency, ...]:
    targets = trials.targets_of(query)
    return tuple(
        Latency(
            name=LATENCIES[name].noun,
            known_s=getattr(known, name) if known else None,
            measured_s=getattr(measured, name) if measured else None,
            predicted_s=predicted_s[name],
            target_s=targets.get(name),
        )
        for name in TARGETS
    )


def list_axis_effects(record: SearchRecord) -> tuple[AxisEffect, ...]:
    """Return the effect of each setting in the result of a finished search, largest first."""
    weighed, answer = [], first_recommendation(record)
    for name, best_s in ((record.result or {}).get("axes") or {}).items():
        fastest = min(best_s.values())
        values = sorted(best_s.items(), key=lambda item: item[1])
        chosen = None if answer is None else str(trials.axis_value(answer.parallel, name))
        rows = tuple(
            AxisValue(
                value=value,
                step_s=step_s,
                loss_fraction=step_s / fastest - 1.0,
                chosen=value == chosen,
            )
            for value, step_s in values
        )
        weighed.append(
            AxisEffect(
                label=AXES_BY_KEY[name].label if name in AXES_BY_KEY else formats.words(name),
                values=rows,
            )
        )
    return tuple(sorted(weighed, key=lambda axis: -axis.values[-1].loss_fraction))
