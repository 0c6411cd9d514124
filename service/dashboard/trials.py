"""From a search's runs to the columns that its charts and its table show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.records import RunFigures, SearchRecord
from service.api.trials import calibrated_predictions, stored_parallel
from service.dashboard.contexts import Axis, AxisValue, Tone, TrialTable
from service.dashboard.formats import arithmetic, details

TONES: dict[str, Tone] = {
    "intended": "",
    "submitted": "busy",
    "abandoned": "",
    "ok": "good",
    "oom": "warn",
    "timeout": "warn",
    "crashed": "bad",
    "preempted": "",
}
AXES = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "virtual_pipeline_parallel_size": "Chunks",
    "context_parallel_size": "CP",
    "expert_parallel_size": "EP",
    "expert_tensor_parallel_size": "Expert TP",
    "data_parallel_size": "DP",
    "micro_batch_size": "Micro-batch",
    "sequence_parallel": "Sequence parallel",
    "recompute": "Recomputation",
    "zero_stage": "ZeRO",
    "data_parallel_shard_size": "Shard group",
    "pipeline_schedule": "Schedule",
}
"""What is shown of `parallel`, where trials differ on it."""


def trial_table(*, record: SearchRecord, runs: Sequence[RunFigures], logs: Mapping[str, str] | None = None) -> TrialTable:
    """All runs of a search, in order of intent."""
    learnt = calibrated_predictions(record)
    calibrated = [_calibrated(run, learnt.get(run.parallel)) for run in runs]
    return TrialTable(
        axes=_axes(runs),
        tones=TONES,
        best=_best(record, runs),
        run_id=tuple(run.id for run in runs),
        number=tuple(run.number for run in runs),
        arithmetic=tuple(arithmetic(run.parallel) for run in runs),
        details=tuple(details(run.parallel) for run in runs),
        state=tuple(run.status or str(run.state) for run in runs),
        cause=tuple(run.cause for run in runs),
        predicted_step_s=tuple(run.predicted_step_s for run in runs),
        calibrated_step_s=tuple(step_s for step_s, _, _ in calibrated),
        calibrated_low_s=tuple(low for _, low, _ in calibrated),
        calibrated_high_s=tuple(high for _, _, high in calibrated),
        measured_step_s=tuple(run.known_step_s for run in runs),
        reduced=tuple(not run.fidelity.is_whole for run in runs),
        tokens_per_second_per_gpu=tuple(run.tokens_per_second_per_gpu for run in runs),
        peak_memory_bytes=tuple(run.peak_memory_bytes if run.fidelity.is_whole else None for run in runs),
        predicted_memory_bytes=tuple(run.predicted_memory_bytes for run in runs),
        logs=None if logs is None else dict(logs),
    )


def _calibrated(run: RunFigures, learnt: dict[str, Any] | None) -> tuple[float | None, float | None, float | None]:
    """Seconds and their interval."""
    if run.expected_step_s is not None or learnt is None:
        return (run.expected_step_s, *(run.expected_step_s_interval or (None, None)))
    low, high = learnt.get("step_s_interval") or (None, None)
    return learnt.get("step_s"), low, high


def _best(record: SearchRecord, runs: Sequence[RunFigures]) -> int | None:
    """The run that the search itself calls the best: while it runs by id, in its result by configuration."""
    rows = (record.result or {}).get("recommendations") or ()
    if not rows:
        best_run = record.progress.get("best_run_id")
        return next((index for index, run in enumerate(runs) if run.id == best_run), None)
    if not rows[0].get("measurement"):
        return None
    chosen = stored_parallel(rows[0]["parallel"])
    measured = [index for index, run in enumerate(runs) if run.parallel == chosen and run.status == "ok"]
    return min(measured, key=lambda index: (not runs[index].fidelity.is_whole, -index), default=None)


def _axes(runs: Sequence[RunFigures]) -> tuple[Axis, ...]:
    columns = {name: tuple(_value(run.parallel, name) for run in runs) for name in AXES}
    return tuple(Axis(name=name, label=AXES[name], values=values) for name, values in columns.items() if len(set(values)) > 1)


def _value(parallel: ParallelConfig, name: str) -> AxisValue:
    value = getattr(parallel, name)
    if name == "recompute":
        return recompute_name(value)
    return value if value is not None else "default"
