"""Runs of a search: as text, as columns for charts and tables, and as predicted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.axes import Axis as LayoutAxis
from hp_tool.domain.axes import axes_of_kind
from hp_tool.domain.latencies import TPOT, TTFT
from hp_tool.domain.measurement import Latencies
from hp_tool.domain.parallel import recompute_name
from hp_tool.domain.records import JsonObject, RunFigures, SearchRecord
from hp_tool.domain.serving import RunConfig, ServingConfig
from hp_tool.domain.states import Phase
from hp_tool.domain.targets import Targets
from hp_tool.errors import HpToolError
from hp_tool.loop.search.fidelity import combine_repeats, representative_runs
from hp_tool.loop.search.serving import TARGETS, measured_targets
from hp_tool.loop.tuning.serving_table import serving_candidates
from hp_tool.questions import schema
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.store.columns import decode_configuration
from hp_tool.wording.rankings import Table, runs_columns
from hp_tool.wording.words import missed_words, serving_arithmetic
from service.api.search_results import calibrated_predictions
from service.dashboard import formats

AxisValue = int | str | bool
WHY = {
    "analytic_best": "best by the cost model",
    "coverage": "tests a new value of a setting",
    "expected_improvement": "may be faster than the best run",
    "confirmation": "full run of the best reduced run",
    "repeat": "repeat of the best run, to reduce noise",
    "baseline": "your baseline",
}
"""Descriptions of why a run was chosen, by the search's code for the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Quantities by which a search's runs are compared: a time and a rate."""

    seconds: str
    """Name of the time: step time; for serving, request latency under full load."""
    charged: bool
    """Whether the search minimises this time plus a penalty for missed targets."""
    rate: str
    device: str
    """Name for one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting in which the trials differ."""

    name: str
    """Field of `parallel`."""
    label: str
    values: tuple[AxisValue, ...]
    """One value per trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingColumns:
    """Figures of requests under the full load, one per trial of a serving search; None if
    unknown.
    """

    targets: dict[str, float]
    """Target in seconds, by latency: ttft_s, tpot_s, request_latency_s."""
    ttft_s: tuple[float | None, ...]
    """Measured, like all columns whose name does not start with `predicted`."""
    tpot_s: tuple[float | None, ...]
    request_latency_s: tuple[float | None, ...]
    misses: tuple[tuple[str, ...], ...]
    """Targets that the measurement misses, in words."""
    predicted_ttft_s: tuple[float | None, ...]
    """Predicted by the cost model, before calibration."""
    predicted_tpot_s: tuple[float | None, ...]
    predicted_tokens_per_second_per_gpu: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTable:
    """Profile runs of a search in columns, which are small to send and fast to filter; None if
    unknown.
    """

    quantity: Quantity
    axes: tuple[Axis, ...]
    best: int | None
    """Index of the best configuration's trial."""
    run_id: tuple[str, ...]
    number: tuple[int, ...]
    counts: tuple[int, ...]
    """For each trial, the index of the run that represents its configuration. For repeated and
    reduced runs, this is another trial.
    """
    num_runs: tuple[int, ...]
    """Number of runs that determine its configuration's step time, which ranges from `low_s` to
    `high_s`; 0 if none.
    """
    low_s: tuple[float | None, ...]
    high_s: tuple[float | None, ...]
    why: tuple[str, ...]
    """Why the run was chosen."""
    arithmetic: tuple[str, ...]
    details: tuple[str, ...]
    state: tuple[str, ...]
    now: tuple[str | None, ...]
    """Current phase of a run that has not ended, such as measuring; None until its worker has read
    its log.
    """
    cause: tuple[str | None, ...]
    predicted_step_s: tuple[float | None, ...]
    """Predicted without calibration. This and every other `step_s` is the time named in `quantity`.
    """
    calibrated_step_s: tuple[float | None, ...]
    """Prediction stored when the run was chosen; without one, the prediction calibrated with all
    runs.
    """
    calibrated_low_s: tuple[float | None, ...]
    calibrated_high_s: tuple[float | None, ...]
    final_step_s: tuple[float | None, ...]
    """Prediction calibrated with all runs of the search; only for finished training searches."""
    final_low_s: tuple[float | None, ...]
    final_high_s: tuple[float | None, ...]
    measured_step_s: tuple[float | None, ...]
    reduced: tuple[bool, ...]
    """Whether the time is extrapolated from a reduced run."""
    tokens_per_second_per_gpu: tuple[float | None, ...]
    peak_memory_bytes: tuple[int | None, ...]
    predicted_memory_bytes: tuple[float | None, ...]
    serving: ServingColumns | None = None
    """None for a training search."""
    logs: dict[str, str] | None = None
    """End of each run's log, for a report in one file; None if the server provides the logs."""

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of the runs, fastest first."""
        times = self.measured_step_s
        return tuple(sorted(range(len(times)), key=lambda i: (times[i] is None, times[i] or 0.0)))

    @property
    def listed(self) -> Table:
        """The runs with their columns, fastest first."""
        rows = [TrialRow(self, index) for index in self.order]
        named, further = self.quantity, {axis.name: axis.label for axis in self.axes}
        if self.serving is not None:
            further |= {latency.key: latency.label for latency in (TTFT, TPOT)}
        columns = runs_columns(seconds=named.seconds, rate=named.rate, further=further)
        return Table(columns=columns, rows=rows)


class TrialRow:
    """One run as a table row: its settings and metrics by column name."""

    def __init__(self, table: TrialTable, index: int) -> None:
        """Create the row at `index`."""
        self.chosen = index == table.best
        self.place = table.number[index] + 1
        self._table, self._index = table, index
        vars(self).update({axis.name: axis.values[index] for axis in table.axes})
        if (serving := table.serving) is not None:
            vars(self).update(ttft_s=serving.ttft_s[index], tpot_s=serving.tpot_s[index])

    def __getattr__(self, name: str) -> Any:
        """Return the row's value in a column.

        Raises:
            AttributeError: There is no such column.
        """
        return getattr(self._table, name)[self._index]


def trial_table(
    *, record: SearchRecord, runs: Sequence[RunFigures], logs: Mapping[str, str] | None = None
) -> TrialTable:
    """Return all runs of a search, in the order in which they were chosen."""
    # In the result of a serving search, measured latencies replace the calibrated ones.
    predictions = {} if is_serving(record.query) else calibrated_predictions(record)
    final = [predictions.get(run.parallel, {}) for run in runs]
    calibrated = [_calibrated(run, prediction) for run, prediction in zip(runs, final, strict=True)]
    worded = [configuration_words(run.parallel, record.query) for run in runs]
    place = {run.id: index for index, run in enumerate(runs)}
    counting = representative_runs(runs)
    counts = [place[counting.get(run.parallel, run).id] for run in runs]
    by_configuration = combine_repeats(runs)
    underway = {
        run: Phase(seen["phase"]).label
        for run, seen in (record.progress.get("underway") or {}).items()
    }
    groups = [by_configuration.get(run.parallel) for run in runs]
    return TrialTable(
        quantity=compared_quantity(record.query),
        axes=_axes(runs, axes_of_kind("inference" if is_serving(record.query) else "training")),
        best=_best(record, runs, counts),
        run_id=tuple(run.id for run in runs),
        number=tuple(run.number for run in runs),
        counts=tuple(counts),
        num_runs=tuple(group.num_runs if group else 0 for group in groups),
        low_s=tuple(group.low_s if group else None for group in groups),
        high_s=tuple(group.high_s if group else None for group in groups),
        why=tuple(reason_words(run.chosen_by) for run in runs),
        arithmetic=tuple(arithmetic for arithmetic, _ in worded),
        details=tuple(details for _, details in worded),
        state=tuple(str(run.shown_state) for run in runs),
        now=tuple(None if run.state.ended else underway.get(run.id) for run in runs),
        cause=tuple(run.cause for run in runs),
        predicted_step_s=tuple(run.predicted_step_s for run in runs),
        calibrated_step_s=tuple(step_s for step_s, _, _ in calibrated),
        calibrated_low_s=tuple(low for _, low, _ in calibrated),
        calibrated_high_s=tuple(high for _, _, high in calibrated),
        final_step_s=tuple(each.get("step_s") for each in final),
        final_low_s=tuple((each.get("step_s_interval") or (None, None))[0] for each in final),
        final_high_s=tuple((each.get("step_s_interval") or (None, None))[1] for each in final),
        measured_step_s=tuple(run.objective_s for run in runs),
        reduced=tuple(not run.fidelity.is_whole for run in runs),
        tokens_per_second_per_gpu=_rates(runs),
        peak_memory_bytes=tuple(
            run.peak_memory_bytes if run.fidelity.is_whole else None for run in runs
        ),
        predicted_memory_bytes=tuple(run.predicted_memory_bytes for run in runs),
        serving=_serving(record.query, runs) if is_serving(record.query) else None,
        logs=None if logs is None else dict(logs),
    )


def _calibrated(
    run: RunFigures, prediction: dict[str, Any]
) -> tuple[float | None, float | None, float | None]:
    """Return the calibrated seconds and the bounds of their interval."""
    if run.expected_step_s is not None or not prediction:
        return (run.expected_step_s, *(run.expected_step_s_interval or (None, None)))
    low, high = prediction.get("step_s_interval") or (None, None)
    return prediction.get("step_s"), low, high


def _rates(runs: Sequence[RunFigures]) -> tuple[float | None, ...]:
    """Return the tokens/s per GPU of each full configuration.

    For a reduced run, the rate uses the tokens of a full step.
    """
    done = (run for run in runs if run.status == "ok" and run.fidelity.is_whole)
    tokens = next(
        (
            run.tokens_per_second_per_gpu * run.objective_s
            for run in done
            if run.tokens_per_second_per_gpu and run.objective_s
        ),
        None,
    )
    return tuple(
        run.tokens_per_second_per_gpu
        if run.fidelity.is_whole
        else tokens / run.objective_s
        if tokens and run.objective_s
        else None
        for run in runs
    )


def _best(record: SearchRecord, runs: Sequence[RunFigures], counts: Sequence[int]) -> int | None:
    """Return the index of the search's best run: the best so far, or that of the answer.

    Return None for a search that failed or was cancelled.
    """
    if record.state.failed:
        return None
    rows = (record.result or {}).get("recommendations") or ()
    if not rows:
        best_run = record.progress.get("best_run_id")
        return next((index for index, run in enumerate(runs) if run.id == best_run), None)
    if not rows[0].get("measurement"):
        return None
    chosen = decode_configuration(rows[0]["parallel"])
    return next((counts[index] for index, run in enumerate(runs) if run.parallel == chosen), None)


def _serving(query: JsonObject, runs: Sequence[RunFigures]) -> ServingColumns:
    latencies = [run.latencies for run in runs]
    predicted: dict[str, tuple[float | None, ...]]
    names = ("ttft_s", "tpot_s", "output_tokens_per_second_per_gpu")
    try:
        costs = predicted_costs(query, [run.parallel for run in runs])
        predicted = {
            name: tuple(
                float(value) if math.isfinite(value) else None for value in getattr(costs, name)
            )
            for name in names
        }
    except HpToolError:  # Show only stored values.
        predicted = dict.fromkeys(names, (None,) * len(runs))
    return ServingColumns(
        targets=targets_of(query),
        misses=tuple(missed_targets(each, query) if each else () for each in latencies),
        ttft_s=tuple(each.ttft_s if each else None for each in latencies),
        tpot_s=tuple(each.tpot_s if each else None for each in latencies),
        request_latency_s=tuple(each.request_latency_s if each else None for each in latencies),
        predicted_ttft_s=predicted["ttft_s"],
        predicted_tpot_s=predicted["tpot_s"],
        predicted_tokens_per_second_per_gpu=predicted["output_tokens_per_second_per_gpu"],
    )


def _axes(runs: Sequence[RunFigures], axes: Sequence[LayoutAxis]) -> tuple[Axis, ...]:
    columns = {axis: [getattr(run.parallel, axis.key) for run in runs] for axis in axes}
    return tuple(
        Axis(
            name=axis.key,
            label=axis.label,
            values=tuple(_axis_value(axis.key, value) for value in values),
        )
        for axis, values in columns.items()
        if len(set(values)) > 1
    )


def axis_value(parallel: RunConfig, name: str) -> AxisValue:
    """Format the value of an axis for tables."""
    return _axis_value(name, getattr(parallel, name))


def _axis_value(name: str, value: Any) -> AxisValue:
    if name == "recompute":
        return recompute_name(value)
    return value if value is not None else "default"


def is_serving(query: JsonObject) -> bool:
    """Return True if a stored query is an inference query."""
    return query.get("kind") == "inference"


def configuration_words(config: RunConfig, query: JsonObject) -> tuple[str, str]:
    """Return the arithmetic and the details of a stored query's configuration."""
    if not isinstance(config, ServingConfig):
        return formats.arithmetic(config, formats.device_of(query)), formats.details(config)
    replicas = config.data_parallel_size // config.attention_data_parallel_size
    requests = config.max_num_seqs
    return serving_arithmetic(
        config, replicas=replicas
    ), f"up to {requests} concurrent request{'' if requests == 1 else 's'}"


def reason_words(chosen_by: str | None) -> str:
    """Describe why a run was chosen; empty if no reason is stored."""
    return "" if chosen_by is None else WHY.get(chosen_by, formats.words(chosen_by))


def compared_quantity(query: JsonObject) -> Quantity:
    """Return the quantities by which a search compares its runs."""
    device = formats.device_of(query)
    if not is_serving(query):
        return Quantity(
            seconds="Step time", charged=False, rate=f"Tokens/s per {device}", device=device
        )
    charged = any((query.get("targets") or {}).values())
    return Quantity(
        seconds="Request latency",
        charged=charged,
        rate=f"Output tokens/s per {device}",
        device=device,
    )


def targets_of(query: JsonObject) -> dict[str, float]:
    """Return the query's targets for mean latencies in seconds, by latency."""
    targets = query.get("targets") or {}
    return {name: targets[name] for name in TARGETS if targets.get(name) is not None}


def missed_targets(latencies: Latencies, query: JsonObject) -> tuple[str, ...]:
    """Describe the query's targets that `latencies` miss."""
    return tuple(
        missed_words(name, value=value, limit=limit)
        for name, limit, value in measured_targets(
            latencies, targets=schema.parse(Targets, query.get("targets") or {})
        )
        if value > limit
    )


def predicted_costs(query: JsonObject, configs: Sequence[RunConfig]) -> ServingCosts:
    """Return the cost model's predictions for serving configurations under a stored query's load.

    Raises:
        HpToolError: The query is invalid, for example because another version has other names.
    """
    problem = resolve_serving(schema.parse_query(query))
    serving = [config for config in configs if isinstance(config, ServingConfig)]
    return problem.cost_candidates(serving_candidates(problem, serving)).costs
