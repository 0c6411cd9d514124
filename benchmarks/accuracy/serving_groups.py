"""Groups of serving evidence: measured runs beside predictions, with the intervals of answers.

Constants of an engine version come from one half of the groups of runs (`ServingRun.fitted`); what
is quoted as unseen is of the other half, or of models and GPUs left out of a fresh fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import fit_defaults, fit_experts, fit_pools, inference
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.fit_engines import by_gpu, by_precision, by_version, left_out
from benchmarks.accuracy.groups import Group, LeftOut
from benchmarks.accuracy.serving_rows import dense_runs
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, cached_series, log_ratios
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import (
    defaults_efficiency,
    engine_profiles,
    expert_efficiency,
    pool_efficiency,
)
from hp_tool.cost.uncertainty import NORMAL_QUANTILE

SAW = "other served runs, as benchmarks.accuracy.inference says"
FIGURES = {
    "tpot": ("time per output token", "s"),
    "ttft": ("time to first token", "s"),
    "throughput": ("tokens/s per GPU", "1/s"),
}
Judged = tuple[str, Predicted | fit_pools.PredictedPool, inference.Scatter | None]
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
    kinds: dict[str, tuple[LeftOut, list[Predicted]]] = {
        "fitted groups": ("seen", [pair for pair in own if pair.run.fitted]),
        "versions without constants": ("setting", [pair for pair in pairs if pair not in own]),
    }
    mixtures = [
        (series(pair.run), pair, expert_efficiency(engine=pair.run.engine))
        for pair in inference.shipped(fit_experts.mixtures(folder))
    ]
    return [
        *(
            group
            for kind, (left, members) in kinds.items()
            for group in groups(f"Engines, {kind}", left, by(members, series))
        ),
        *groups("Engines, mixtures by the shipped constants", "seen", ratios(mixtures)),
        *groups(
            "Engines as started, a model left out",
            "model",
            ratios(started(folder)),
            saw=f"{SAW}; one prior of SGLang's mixtures was tightened after these rows were seen",
        ),
        *_by_name(
            "Engines, another release's constants",
            inference.other_release(runs),
            "setting",
        ),
    ]


def refitted(folder: Path) -> list[Group]:
    """Return the runs as constants predict them that saw neither their GPU, precision or model.
    Minutes: many fits.
    """
    runs = dense_runs(folder)
    found = [
        *_by_name("Engines, a model or GPU left out", inference.refitted(runs), "GPU"),
        *groups("Engines by kind of model", "GPU", ratios(unseen_kinds(folder))),
        *pools(folder),
    ]
    return [dataclasses.replace(group, is_long=True) for group in found]


def started(folder: Path) -> list[Judged]:
    """Return engines as they are started, by the slowdown of other models."""
    stated = defaults_efficiency()
    pairs = fit_defaults.left_out(fit_defaults.started(folder))
    return [(f"{pair.run.engine}, {pair.run.gpu}", pair, stated) for pair in pairs]


def pools(folder: Path) -> list[Group]:
    """Return pools apart by hops between them that saw neither the engine nor the lengths."""
    left_out = fit_pools.left_out(fit_pools.told(folder)).values()
    judged: list[Judged] = [
        (pair.run.engine, pair, pool_efficiency()) for pairs in left_out for pair in pairs
    ]
    return groups("Pools, the engine and lengths left out", "setting", ratios(judged))


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
    mixtures = fit_experts.left_out(
        fit_experts.mixtures(folder), lambda run: catalogue_model(run.model).name
    )
    for _, pairs in mixtures.values():
        for pair in pairs:
            kind = f"{pair.run.engine}, mixtures"
            kinds[kind].append((kind, pair, expert_efficiency(engine=pair.run.engine)))
    return [judged for _, members in sorted(kinds.items()) for judged in members]


def ratios(judged: Iterable[Judged]) -> dict[str, list[Comparison]]:
    """Return {figure: predicted over measured as comparisons with 1}, without runs that were not
    measured in it.
    """
    rows: dict[str, list[Comparison]] = {what: [] for what in FIGURES}
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


def by(
    pairs: Iterable[Predicted],
    part: Callable[[ServingRun], str],
) -> dict[str, list[Comparison]]:
    """Return {figure: comparisons}, in parts of a group."""
    pairs = list(pairs)
    return {
        what: [
            dataclasses.replace(row, part=part(pair.run))
            for pair in pairs
            for row in inference.comparisons([pair], what)
        ]
        for what in FIGURES
    }


def _by_name(
    title: str,
    named: Mapping[str, Sequence[Predicted]],
    left_out: LeftOut,
) -> list[Group]:
    rows: dict[str, list[Comparison]] = {what: [] for what in FIGURES}
    for name, members in named.items():
        for what, each in by(
            members,
            lambda _, name=name: name,
        ).items():
            rows[what] += each
    return groups(title, left_out, rows)


def series(run: ServingRun) -> str:
    """Return what one person measured in one go, in words."""
    return f"{run.engine} {run.version}, {run.model} {run.precision}, {run.gpu}"


def groups(
    title: str, left_out: LeftOut, rows: Mapping[str, list[Comparison]], *, saw: str = SAW
) -> list[Group]:
    return [
        Group(title=f"{title}: {words}", left_out=left_out, saw=saw, rows=rows[what], unit=unit)
        for what, (words, unit) in FIGURES.items()
    ]
