"""Shared code of the fits of frameworks and engines.

A fit declares its free constants with their priors, a function from their values to a profile, and
a function that returns errors of rows. This module provides least squares, fits without held-out
rows, the scatter, and the profile files.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.accuracy.comparison import Comparison
from evidence.fitted_file import FittedFile
from hp_tool.catalog.efficiency import FOLDER
from hp_tool.cost.uncertainty import CONFIDENCE, NORMAL_QUANTILE
from hp_tool.domain.efficiency import FrameworkEfficiency, Link
from hp_tool.loop.calibration.microbenchmarks import round_timing

Floats = NDArray[np.float64]
Row = TypeVar("Row")
Constants = TypeVar("Constants")
Values = dict[Any, float]
"""Free constants by name, or by die and precision."""

FRAMEWORKS = FOLDER / "frameworks"
SCATTER = (
    "time_log_sd",
    "expert_time_log_sd",
    "earlier_expert_time_log_sd",
    "pair_log_sd",
    "expert_pair_log_sd",
    "tuning_log_sd",
    "tuning_memory_log_sd",
)
"""Fields of a framework's profile that fit_intervals writes."""
KEPT = (*SCATTER, "memory_log_sd", "reserved_log_sd", "state_scan_flops_per_second")
"""Fields that fit_intervals and the fit of the scan write."""


class Prior(NamedTuple):
    """Prior mean and deviation of a constant, and its bounds."""

    mean: float
    sd: float
    lowest: float
    highest: float


SPECIFICATIONS = Path(__file__).with_name("fits.yaml")


@functools.cache
def fit_settings(fit: str) -> Mapping[str, Any]:
    """Return a fit's entries in fits.yaml: priors, fixed values, and the noise of rows."""
    specification: Mapping[str, Any] = yaml.safe_load(SPECIFICATIONS.read_text("utf-8"))[fit]
    return specification


def priors(fit: str, name: str = "priors") -> dict[str, Prior]:
    """Return the free constants of a fit with their priors and bounds."""
    return {constant: Prior(*prior) for constant, prior in fit_settings(fit).get(name, {}).items()}


def fixed_constants(fit: str) -> FrameworkEfficiency:
    """Return a framework's constants before its fit."""
    fields = dict(fit_settings(fit)["fixed"])
    return FrameworkEfficiency(network=Link(**fields.pop("network")), **fields)


ROBUST = {"loss": "soft_l1", "diff_step": 1e-2, "xtol": 1e-4, "ftol": 1e-4}
"""Least-squares options for a robust loss, so that a few outliers do not distort the constants."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit(Generic[Row, Constants]):
    """A maximum a posteriori fit by least squares."""

    priors: Mapping[Any, Prior]
    constants: Callable[[Values], Constants]
    errors: Callable[[Sequence[Row]], Callable[[Constants], Floats]]
    """Function that returns, for some rows, the log ratios of predicted to published values under
    given constants, divided by the assumed noise.
    """
    in_deviations: bool = True
    """Whether the search steps are in standard deviations from the prior means; if not, in the
    constants themselves, with four digits.
    """
    near: float = 0.01
    """Starting point, in standard deviations from the means."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=lambda: ROBUST)
    """Options of scipy.optimize.least_squares."""

    def __call__(self, rows: Sequence[Row], *, starts: Iterable[Values] = ({},)) -> Constants:
        """Return the constants fitted to these rows, with four digits."""
        return self.constants(rounded(self.values(rows, starts=starts)))

    def values(self, rows: Sequence[Row], *, starts: Iterable[Values] = ({},)) -> Values:
        """Return the unrounded constants fitted to these rows, the best result of all starting
        points. A start without some constants uses `near` for them.
        """
        mean, sd, low, high = (
            np.array(column) for column in zip(*self.priors.values(), strict=True)
        )
        zero, unit = (mean, sd) if self.in_deviations else (np.zeros(len(mean)), np.ones(len(mean)))
        errors = self.errors(rows)

        def named(x: Floats) -> Values:
            return dict(zip(self.priors, (float(value) for value in zero + x * unit), strict=True))

        def residuals(x: Floats) -> Floats:
            trial = named(x) if self.in_deviations else rounded(named(x))
            return np.concatenate(
                [errors(self.constants(trial)), x if self.in_deviations else (x - mean) / sd]
            )

        near = dict(zip(self.priors, mean + self.near * sd, strict=True))
        first = [(np.array(list((near | start).values())) - zero) / unit for start in starts]
        bounds = ((low - zero) / unit, (high - zero) / unit)
        solutions = [least_squares(residuals, x, bounds=bounds, **self.options) for x in first]
        return named(min(solutions, key=lambda solution: solution.cost).x)


def compare_left_out(
    rows: Iterable[Row],
    key: Callable[[Row], Hashable],
    fit: Callable[[list[Row]], Callable[[Row], Comparison]],
) -> list[Comparison]:
    """Return every row, predicted by constants fitted without the rows that share its `key`. `fit`
    returns a function that compares one row.
    """
    return [
        compared
        for _, members, others in split_by_key(rows, key)
        for compared in map(fit(others), members)
    ]


def errors_of(noise: float) -> Callable[[Sequence[Any]], Callable[[Any], Floats]]:
    """Return the errors of prepared runs: the log ratio of each run under given constants, divided
    by the noise. The constants need a method `ratio`.
    """
    return lambda runs: lambda trial: np.log([trial.ratio(run) for run in runs]) / noise


def errors_by_setting(
    runs: Sequence[Any], *, noise: float, shares: Any = None
) -> Callable[[FrameworkEfficiency], Floats]:
    """Return the log ratios of these prepared runs under given constants, divided by the noise.
    Repeats of a setting, such as its releases, share one vote.
    """
    repeats = Counter(run.case.setting for run in runs)
    weights = np.array([1.0 / (noise * np.sqrt(repeats[run.case.setting])) for run in runs])
    return lambda trial: np.log([run.ratio(trial, shares) for run in runs]) * weights


def rounded(values: Values) -> Values:
    """Return the values with four digits each."""
    return {name: round_timing(value) for name, value in values.items()}


def split_by_key(
    rows: Iterable[Row], key: Callable[[Row], Hashable]
) -> Iterator[tuple[Hashable, list[Row], list[Row]]]:
    """Yield (value of `key`, rows with that value, rows with other values)."""
    rows = list(rows)
    for value in dict.fromkeys(map(key, rows)):
        yield (
            value,
            [row for row in rows if key(row) == value],
            [row for row in rows if key(row) != value],
        )


def linear_beyond(logs: Floats, scale: float) -> Floats:
    """Return residuals whose square is the pseudo-Huber loss: log ratios beyond `scale` count
    linearly.
    """
    bent: Floats = np.sign(logs) * np.sqrt(2.0 * (np.sqrt(1.0 + (logs / scale) ** 2) - 1.0))
    return bent * scale


def conformal_sd(logs: Floats) -> float:
    """Return the standard deviation of log ratios whose 90% interval contains 90% of these values
    and one more.
    """
    off = np.sort(np.abs(logs))
    return float(off[min(math.ceil(CONFIDENCE * (len(off) + 1)), len(off)) - 1]) / NORMAL_QUANTILE


def weighted_sd(groups: Sequence[Floats]) -> float:
    """Return the standard deviation of log ratios whose 90% interval contains 90% of these values;
    each group has the same weight.
    """
    off = np.concatenate([np.abs(each) for each in groups])
    weights = np.concatenate([np.full(len(each), 1.0 / len(each) / len(groups)) for each in groups])
    order = np.argsort(off)
    place = int(np.searchsorted(np.cumsum(weights[order]), CONFIDENCE))
    return float(off[order][min(place, len(off) - 1)]) / NORMAL_QUANTILE


def with_constants(start: FrameworkEfficiency, values: Mapping[str, Any]) -> FrameworkEfficiency:
    """Return `start` with these fields replaced; names that begin with network_ are fields of the
    network.
    """
    of_network = {
        name.removeprefix("network_"): value
        for name, value in values.items()
        if name.startswith("network_")
    }
    own = {name: value for name, value in values.items() if not name.startswith("network_")}
    return dataclasses.replace(
        start, network=dataclasses.replace(start.network, **of_network), **own
    )


def framework_file(
    name: str, constants: FrameworkEfficiency, *, keeps: tuple[str, ...] = KEPT
) -> FittedFile:
    """Return the profile of one die (or `default`) as a file; the fields in `keeps` are
    preserved.
    """
    fields = dataclasses.asdict(constants)
    return FittedFile(
        file=f"frameworks/{constants.framework}/{name}.yaml",
        fields={key: value for key, value in fields.items() if key not in keeps},
        keeps=keeps,
    )
