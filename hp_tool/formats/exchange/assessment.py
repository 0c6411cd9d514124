"""Compare a run with its prediction and with the best configuration for the same workload."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hp_tool.cluster.logs import READERS, LogFacts, ServerStart, read_line, read_server_start
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.units import MIN_CHANGE
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange.export import changed_options, supported_axes, tool_options
from hp_tool.formats.reading import Ignored, Missing, Read, Reading, hyphenated, table
from hp_tool.formats.registry import default_format, get_format
from hp_tool.formats.tools.megatron_lm.arguments import TABLE
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.problem import problem_of
from hp_tool.questions.training.problem import resolve_training

WARMUP_LINES = 2
"""Number of first logged steps to drop, if more steps follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Step time and memory of a run, from its log."""

    step_s: float | None
    """Median step time after the first steps, in seconds."""
    steps: int
    """Number of logged steps in the median."""
    tokens_per_second_per_gpu: float | None
    allocated_bytes: float | None
    reserved_bytes: float | None
    out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """Step time and memory from a log whose configuration is unknown."""

    reader: str
    """Name of the log reader (cluster.logs); `server` for the startup log of an engine."""
    logged: LoggedRun | ServerStart
    """Fields per second are set, but not the step time if the batch size is unknown."""
    samples_per_second: float | None = None
    """Median sequences per second of all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A run, its prediction, and the best configuration for its workload on its devices."""

    format: str
    """Format of the configuration."""
    query: dict[str, Any]
    """The configuration as a query, valid input everywhere."""
    search: dict[str, Any]
    """Query of a search for a better layout, with this one as its baseline."""
    estimate: Estimate | InferenceEstimate
    logged: LoggedRun | ServerStart | None
    """Step times of a training's log, or memory of a server's."""
    step_gap_fraction: float | None
    """Logged step time / predicted step time - 1."""
    better: Recommendation | ServingRecommendation | None
    """None if no acceptable configuration is predicted to be at least 0.05% faster."""
    gain_fraction: float | None
    """Predicted relative gain in throughput: 0.2 is 20% more tokens in the same time."""
    gain_interval: tuple[float, float] | None
    """90% interval (low, high) of the gain."""
    switched_on: tuple[str, ...]
    """Overlaps that the better configuration uses and the command does not."""
    parts_gained_s: dict[str, float]
    """Seconds per step that the better configuration saves, by part."""
    read: tuple[Read, ...] = ()
    """Settings that were read, with the query field that each determines."""
    ignored: tuple[Ignored, ...] = ()
    """Settings that were ignored, and why."""
    missing: tuple[Missing, ...] = ()
    """Fields that the query requires and the configuration does not set."""
    changes: tuple[dict[str, str | None], ...] = ()
    """{flag, from, to} for the better configuration; null if absent, empty for a switch."""


def assess(
    query: Query, *, reading: Reading | None = None, log: Iterable[str] | None = None
) -> Assessment:
    """Compare a run with its prediction and with the best configuration that its tool supports.

    `reading` is the source of the query; its tool determines how the log is parsed.

    Raises:
        InputError: The log or the query is invalid.
        UnsupportedError: A feature is not modelled.
    """
    problem = problem_of(query)
    tool = reading.tool if reading is not None else default_format(query.kind).name
    estimate, _ = problem.estimate()
    workload = query.training and replace(query.training.with_open_knobs(), overlap=None)
    logged: LoggedRun | ServerStart | None = None
    if log is not None:
        logged = (
            _summarize_log(query, log, tool) if workload is not None else read_server_start(log)
        )
    search = search_query(query, tool=tool)
    free = replace(search, training=workload, objective=None)
    rows = problem_of(free).rank(top=1).recommendations
    best: Recommendation | ServingRecommendation | None = rows[0] if rows else None
    current_seconds, best_seconds = (
        _seconds_of_work(estimate),
        None if best is None else _seconds_of_work(best.estimate),
    )
    gain = (
        None
        if current_seconds is None or best_seconds is None
        else current_seconds / best_seconds - 1.0
    )
    if estimate.feasible and gain is not None and gain < MIN_CHANGE:
        best, gain = None, None
    gap = (
        None
        if not isinstance(logged, LoggedRun) or logged.step_s is None or current_seconds is None
        else logged.step_s / current_seconds - 1.0
    )
    hidden = (query.training and query.training.overlap) or OverlapSpec()
    off = tuple(f.name for f in fields(hidden) if getattr(hidden, f.name) is False)
    both = None
    if best is not None and estimate.parallel is not None:
        both = (
            Configuration(query=query, parallel=estimate.parallel),
            Configuration.from_row(best, query=free),
        )
    return Assessment(
        format=tool,
        query=schema.query_mapping(query),
        search=schema.query_mapping(search),
        estimate=estimate,
        logged=logged,
        step_gap_fraction=gap,
        better=best,
        gain_fraction=gain,
        gain_interval=None
        if best is None or gain is None
        else _interval_of_gain(
            gain,
            estimate,
            best.estimate,
            problem.ratio_log_sd(estimate, best.estimate, alike=not off and not best.set),
        ),
        switched_on=off if best is not None else (),
        parts_gained_s={} if best is None else _saved_parts_s(estimate, best.estimate),
        changes=() if both is None else _changed_settings(*both, tool, reading),
        **_reading_accounts(reading),
    )


def search_query(query: Query, *, tool: str) -> Query:
    """Return a search query with the query's layout as its baseline (`search.baseline`)."""
    return replace(
        query,
        parallel=ParallelQuery(**supported_axes(tool, query)),
        search=replace(query.search, baseline=query.parallel),
    )


def _seconds_of_work(estimate: Estimate | InferenceEstimate) -> float | None:
    """Return seconds per training step, or GPU-seconds per output token; None if unknown."""
    if isinstance(estimate, Estimate):
        return None if estimate.time is None else estimate.time.step_s
    throughput = estimate.output_tokens_per_second_per_gpu
    return 1.0 / throughput if throughput else None


def _interval_of_gain(
    gain: float,
    current: Estimate | InferenceEstimate,
    better: Estimate | InferenceEstimate,
    log_sd: float,
) -> tuple[float, float]:
    """Return the 90% interval of a gain, given the standard deviation of ln(ratio).

    If the run may use CUDA graphs, the interval includes the step time with CUDA graphs.
    """
    width, recorded = math.exp(NORMAL_QUANTILE * log_sd), current.provenance.get("with_cuda_graphs")
    step_s = _seconds_of_work(current)
    faster = recorded["step_s"] / step_s if step_s and isinstance(recorded, dict) else 1.0
    return (1.0 + gain) * faster / width - 1.0, (1.0 + gain) * width - 1.0


def _saved_parts_s(
    current: Estimate | InferenceEstimate, better: Estimate | InferenceEstimate
) -> dict[str, float]:
    """Return the seconds per training step that the second configuration saves, by part."""
    if (
        not isinstance(current, Estimate)
        or not isinstance(better, Estimate)
        or current.time is None
        or better.time is None
    ):
        return {}
    saved = better.time.parts_s
    return {name: seconds - saved.get(name, 0.0) for name, seconds in current.time.parts_s.items()}


def _reading_accounts(reading: Reading | None) -> dict[str, Any]:
    if reading is None:
        return {}
    return {
        "read": tuple(reading.read),
        "ignored": tuple(reading.ignored),
        "missing": tuple(reading.missing),
    }


def _changed_settings(
    current: Configuration, better: Configuration, tool: str, reading: Reading | None
) -> tuple[dict[str, str | None], ...]:
    """Return the settings that differ between two configurations.

    The names are those of the tool, or else of the query.
    """
    try:
        before = tool_options(current, tool)
        after = tool_options(better, tool, as_predicted=True)
    except UnsupportedError:
        before, after = (
            {
                f"parallel.{name}": str(value)
                for name, value in schema.to_dict(each.parallel).items()
                if value is not None
            }
            for each in (current, better)
        )
        for path, key in _keys_of_paths(before, reading).items():
            before[key] = before.pop(path)
            if path in after:
                after[key] = after.pop(path)
    else:
        if tool == "megatron-lm" and reading is not None and reading.read:
            before = _restore_script_flags(before, after, reading)
    return changed_options(before, after)


def _keys_of_paths(values: Mapping[str, str], reading: Reading | None) -> dict[str, str]:
    """Return the file's key for each query path in `values`, if exactly one key has its value."""
    keys: dict[str, list[str]] = {}
    for setting in reading.read if reading is not None else ():
        if values.get(setting.field) == setting.value:
            keys.setdefault(setting.field, []).append(setting.flag)
    return {path: names[0] for path, names in keys.items() if len(names) == 1}


def _restore_script_flags(
    before: Mapping[str, str], after: Mapping[str, str], reading: Reading
) -> dict[str, str]:
    """Return Megatron flags in the spelling that the script uses.

    For example, --recompute-activations stands for two flags. If the script contains it, the
    changes must remove it rather than the two flags.
    """
    written = {f"--{hyphenated(read_setting.flag)}": read_setting for read_setting in reading.read}
    fields = {name: table(TABLE)[hyphenated(name)].why for name in {**before, **after}}
    changed = {field for name, field in fields.items() if before.get(name) != after.get(name)}
    stands = {
        name: value
        for name, value in before.items()
        if name in written or fields[name] not in changed
    }
    return stands | {
        name: each.value
        for name, each in written.items()
        if each.field in changed and name not in fields
    }


def summarize_log(log: Sequence[str]) -> LogSummary:
    """Return step time and memory from a log without its configuration.

    Raises:
        InputError: No reader finds any.
    """
    start = read_server_start(log)
    if start != ServerStart():
        return LogSummary(reader="server", logged=start)
    reader, facts = _read_log_facts(log, readers=())
    if not facts.has_times and facts.reserved_bytes is None and facts.allocated_bytes is None:
        raise InputError(
            "the log contains no step time, memory or server start; supported: logs of "
            f"{', '.join(READERS)}, and startup logs of vLLM and SGLang",
            field="--log",
        )
    medians = [
        statistics.median(figures[WARMUP_LINES:] or figures) if figures else None
        for figures in (facts.step_s, facts.tokens_per_second_per_gpu, facts.samples_per_second)
    ]
    if medians[0] is None and medians[2] is not None and facts.samples_per_step:
        medians[0] = facts.samples_per_step / medians[2]
    counted = facts.step_s or facts.tokens_per_second_per_gpu or facts.samples_per_second
    return LogSummary(
        reader=reader,
        logged=LoggedRun(
            step_s=medians[0],
            steps=len(counted[WARMUP_LINES:] or counted),
            tokens_per_second_per_gpu=medians[1],
            allocated_bytes=facts.allocated_bytes,
            reserved_bytes=facts.reserved_bytes,
            out_of_memory=facts.out_of_memory,
        ),
        samples_per_second=medians[2],
    )


def _read_log_facts(log: Iterable[str], *, readers: Sequence[str]) -> tuple[str, LogFacts]:
    """Return the name and the result of the first log reader that finds step times.

    The tool's own `readers` are tried first, because a launcher may print lines in another format.
    """
    names = tuple(dict.fromkeys((*readers, *READERS)))
    found = [LogFacts() for _ in names]
    for line in log:
        for name, facts in zip(names, found, strict=True):
            read_line(line, facts, reader=name)
    timed = (pair for pair in zip(names, found, strict=True) if pair[1].has_times)
    return next(timed, (names[0], found[0]))


def _summarize_log(query: Query, log: Iterable[str], tool: str) -> LoggedRun:
    """Return the median step time and the memory in a log of the query's run."""
    workload, num_gpus = query.training, resolve_training(query).cluster.num_gpus
    assert workload is not None  # This is a training query.
    _, facts = _read_log_facts(log, readers=get_format(tool).logs)
    tokens = workload.global_batch_size * workload.sequence_length / num_gpus
    seconds, _ = facts.step_times_s(workload, num_gpus=num_gpus)
    settled = seconds[WARMUP_LINES:] or seconds
    step_s = statistics.median(settled) if settled else None
    return LoggedRun(
        step_s=step_s,
        steps=len(settled),
        tokens_per_second_per_gpu=None if step_s is None else tokens / step_s,
        allocated_bytes=facts.allocated_bytes,
        reserved_bytes=facts.reserved_bytes,
        out_of_memory=facts.out_of_memory,
    )
