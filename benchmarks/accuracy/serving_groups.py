"""Groups of serving evidence: measured runs beside predictions, with the intervals of answers.

Constants of an engine version come from one half of the groups of runs (`ServingRun.fitted`); what
is quoted as unseen is of the other half, or of models and GPUs left out of a fresh fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import fit_defaults, fit_experts, inference
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_engines import by_gpu, by_precision, by_version, left_out
from benchmarks.accuracy.groups import Group, Rows, named
from benchmarks.accuracy.serving_runs import (
    Predicted,
    ServingRun,
    cached_series,
    dense_runs,
    log_ratios,
)
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import (
    defaults_efficiency,
    engine_profiles,
    expert_efficiency,
    pool_efficiency,
)
from hp_tool.cost.uncertainty import NORMAL_QUANTILE

FIGURES = {
    "tpot": "time per output token",
    "ttft": "time to first token",
    "throughput": "tokens/s per GPU",
}
"""Words of titles."""
Judged = tuple[str, Predicted | fit_defaults.PredictedPool, inference.Scatter | None]
"""(part of a group, run with its prediction, deviations of models left out or None for the
engine's).
"""


def shipped(folder: Path) -> list[Group]:
    """Return the runs as the shipped constants predict them, and as those of another release do.
    Takes seconds.

    Runs that no constant of their release saw are the groups of `evidence` called Serving.
    """
    runs = dense_runs(folder)
    cached = cached_series(runs)
    profiles = {(profile.engine, profile.version) for profile in engine_profiles()}
    pairs = [pair for pair in inference.shipped(runs) if pair.run.series not in cached]
    own = [pair for pair in pairs if (pair.run.engine, pair.run.version) in profiles]
    judged_mixtures = mixtures(inference.shipped(fit_experts.mixtures(folder)))
    return named(
        titled("Engines, fitted groups", by(_series(pair for pair in own if pair.run.fitted)))
        | titled(
            "Engines, versions without constants",
            by(_series(pair for pair in pairs if pair not in own)),
        )
        | titled("Engines, mixtures by the shipped constants", ratios(judged_mixtures))
        | titled("Engines as started, a model left out", ratios(started(folder)))
        | titled("Engines, another release's constants", by(_parts(inference.other_release(runs))))
    )


def refitted(folder: Path) -> list[Group]:
    """Return the runs as constants predict them that saw neither their GPU, precision or model.
    Minutes: many fits.
    """
    fits = _parts(inference.refitted(dense_runs(folder)))
    rows = (
        titled("Engines, a model or GPU left out", by(fits))
        | titled("Engines by kind of model", ratios(unseen_kinds(folder)))
        | pools(folder)
    )
    return named(rows, is_long=True)


def _series(pairs: Iterable[Predicted]) -> list[tuple[str, Predicted]]:
    return [(series(pair.run), pair) for pair in pairs]


def _parts(pairs: Mapping[str, Sequence[Predicted]]) -> list[tuple[str, Predicted]]:
    return [(part, pair) for part, members in pairs.items() for pair in members]


def mixtures(pairs: Iterable[Predicted]) -> list[Judged]:
    """Return runs of mixtures, judged by the shipped deviations of their engine."""
    return [(series(pair.run), pair, expert_efficiency(engine=pair.run.engine)) for pair in pairs]


def started(folder: Path) -> list[Judged]:
    """Return engines as they are started, by the slowdown of other models."""
    stated = defaults_efficiency()
    pairs = fit_defaults.left_out(fit_defaults.started(folder))
    return [(f"{pair.run.engine}, {pair.run.gpu}", pair, stated) for pair in pairs]


def pools(folder: Path) -> Rows:
    """Return pools apart by hops between them that saw neither the engine nor the lengths."""
    unseen = fit_defaults.pools_left_out(folder)
    judged: list[Judged] = [(pair.run.engine, pair, pool_efficiency()) for pair in unseen]
    return titled("Pools, the engine and lengths left out", ratios(judged))


@functools.cache
def unseen_kinds(folder: Path) -> list[Judged]:
    """Return the runs by engine and kind of model, each by constants that saw neither its GPU or
    its precision nor, of mixtures, its model.

    Of a release that was measured on one GPU in one precision alone, constants are those of the
    engine's nearest other release.
    """
    kinds: dict[str, list[Judged]] = defaultdict(list)
    runs = dense_runs(folder)
    releases = inference.other_release(runs)
    for (name, version), members in by_version(runs).items():
        parts = [
            pairs
            for key in (by_gpu, by_precision)
            for pairs in left_out(members, name=name, version=version, key=key).values()
        ]
        own = f"{name} {version} by "
        others = next((pairs for title, pairs in releases.items() if title.startswith(own)), [])
        kinds[f"{name}, dense"] += [
            (f"{name}, dense", pair, None) for pairs in parts or [others] for pair in pairs
        ]
    unseen = fit_experts.left_out(
        fit_experts.mixtures(folder), lambda run: catalogue_model(run.model).name
    )
    for _, pairs in unseen.values():
        for pair in pairs:
            kind = f"{pair.run.engine}, mixtures"
            kinds[kind].append((kind, pair, expert_efficiency(engine=pair.run.engine)))
    return [judged for _, members in sorted(kinds.items()) for judged in members]


def ratios(judged: Iterable[Judged]) -> Rows:
    """Return {figure: predicted over measured as comparisons with 1}, without runs that were not
    measured in it.
    """
    rows: Rows = {what: [] for what in FIGURES}
    for part, pair, scatter in judged:
        for what, found in rows.items():
            log = float(log_ratios([pair], what)[0])
            if math.isfinite(log):
                row = Comparison(
                    source="",
                    model=pair.run.model,
                    what="",
                    published=1.0,
                    predicted=math.exp(log),
                    part=part,
                )
                if isinstance(pair, Predicted):
                    found.append(inference.stated(row, pair, what, scatter=scatter))
                else:
                    width = NORMAL_QUANTILE * getattr(scatter, f"{what}_log_sd")
                    found.append(row.within(width))
    return rows


def by(pairs: Iterable[tuple[str, Predicted]]) -> Rows:
    """Return {figure: comparisons} of (part of a group, run with its prediction)."""
    rows: Rows = {what: [] for what in FIGURES}
    for part, pair in pairs:
        for what, found in rows.items():
            compared = inference.comparisons([pair], what)
            found += [dataclasses.replace(row, part=part) for row in compared]
    return rows


def series(run: ServingRun) -> str:
    """Return what one person measured in one go, in words."""
    return f"{run.engine} {run.version}, {run.model} {run.precision}, {run.gpu}"


def titled(title: str, rows: Rows) -> Rows:
    """Return the rows of each figure by their group's title."""
    return {f"{title}: {words}": rows[what] for what, words in FIGURES.items()}
