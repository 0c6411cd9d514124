"""Assumed constants of calibration, search and learning, read from `assumptions.yaml`.

The file states the unit and meaning of each constant, and the reason for its value. It is read at
first use, so predictions without a calibration never parse it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from hp_tool.catalog import documents
from hp_tool.domain.hardware import Kind

FILE = Path(__file__).with_suffix(".yaml")
ByKind = Mapping[Kind, float]
ByName = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePriors:
    """Prior deviations of a calibration by kind of device; see `calibration.Prior`."""

    common_log_sd: ByKind
    group_log_sd: ByKind
    part_log_sd: ByKind
    step_overhead_s: ByKind
    layer_overhead_s: ByKind
    model_log_sd: ByKind
    residual_log_sd: ByKind
    residual_runs: ByKind
    stated_share: ByKind
    memory_log_sd: ByKind
    memory_overhead_bytes: ByKind
    memory_residual_log_sd: ByKind
    slow_share: ByKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Length scales of configuration features, and the features of configurations that stall."""

    distances: ByName
    other_distance: float
    precisions: ByName
    one_node_stall_log_risk: float
    pipeline_stall_log_risk: float
    node_doubling_stall_log_risk: float
    held_up_stall_log_risk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Variances:
    """Weights of stated variances in equivalent runs; correlations of similar configurations."""

    memory_runs: ByName
    similar_share: float
    similar_distance: float
    stated_errors: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How the step-time variance stated by the cost model is split between components."""

    regular_log_sd_limit: float
    stall_share_limit: float
    own_share_least: float
    own_share_most: float
    carried_share: float
    carried_log_sd_limit: float
    model_share_least: float
    plain_least_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Frequency, size and correlation length of stalls, and frequency of outliers."""

    mean_log_excess: float
    slip_share: float
    unseen_share: float
    configuration_runs: float
    share_runs: float
    distance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """How part times measured by traces carry over to other configurations."""

    link_log_sd: float
    part_scatter_log_sd: float
    least_part_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Deviations of memory needs."""

    excess_log_sd: float
    model_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Deviations between repeated runs of a configuration, and the number of repeats that a fit
    uses.
    """

    fitted_runs: int
    step_log_sd: ByKind
    step_prior_runs: float
    peak_log_sd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowDevices:
    """Thresholds above which devices and links count as slower than their peers."""

    least_slowdown: float
    deviations: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Assumed costs of runs, and criteria for choosing runs and stopping."""

    local_startup_s: float
    cluster_startup_s: float
    startup_doubt: float
    next_startup_share: float
    least_runs: int
    roughly_known_log_sd: float
    coverage_slowdown: float
    stall_factor: float
    stored_slowdown: float
    stored_gain: float
    attempts: int
    reduced_cost_share: float
    least_repeat_gain: float
    single_step_sd: float
    extrapolation_bias_log_sd: float
    extrapolation_log_sd: float
    carried_runs: int
    node_failures: int
    startup_slack: float
    least_start_limit_s: float
    profiled_steps: int
    target_penalty: float
    quantile_answers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Rules for which measurements calibrate predictions and which are held for review."""

    measurements: int
    repeats: int
    crashes: int
    folds: int
    outlier_score: float
    least_scatter: float
    doubtful_factor: float
    impossible_factor: float
    rate_disagreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Thresholds for reporting a running job as slower than before or than predicted."""

    least_slowdown: float
    false_alarm_steps: float
    warmup_steps: int
    least_baseline_steps: int
    baseline_steps: int
    reference_steps: int
    creep: float
    unlikely_sds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """All assumptions, grouped by topic."""

    device_priors: DevicePriors
    features: Features
    variances: Variances
    step_time: StepTime
    stalls: Stalls
    traces: Traces
    memory: Memory
    repeats: Repeats
    slow_devices: SlowDevices
    search: Search
    learning: Learning
    watch: Watch


@functools.cache
def assumed() -> Assumptions:
    """Return the constants in `assumptions.yaml`. The file is read once per process."""
    document, groups = documents.read(FILE), get_type_hints(Assumptions)
    return Assumptions(
        **{
            each.name: _group(groups[each.name], document[each.name])
            for each in fields(Assumptions)
        }
    )


def _group(kind: type[Any], entries: Mapping[str, Mapping[str, Any]]) -> Any:
    values = {name: entry["value"] for name, entry in entries.items()}
    return kind(**{name: _fixed(each) for name, each in values.items()})


def _fixed(value: Any) -> Any:
    return (
        MappingProxyType(value)
        if isinstance(value, dict)
        else tuple(value)
        if isinstance(value, list)
        else value
    )
