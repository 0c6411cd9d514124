"""Groups of serving evidence: what `benchmarks.accuracy.inference` reports, as comparisons with
intervals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy import fit_experts, fit_pools, inference, serving_by_engine
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.groups import Group, LeftOut
from benchmarks.accuracy.serving_rows import dense_runs
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, cached_series, log_ratios
from hp_tool.catalog.efficiency import engine_profiles, expert_efficiency, pool_efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE

SAW = "other served runs, as benchmarks.accuracy.inference says"
FIGURES = {
    "tpot": ("time per output token", "s"),
    "ttft": ("time to first token", "s"),
    "throughput": ("tokens/s per GPU", "1/s"),
}


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
    groups = [
        _group(f"Engines, {kind}", what, left_out, _by(_series, members, what))
        for kind, (left_out, members) in kinds.items()
        for what in FIGURES
    ]
    experts = inference.shipped(fit_experts.mixtures(folder))
    for what in FIGURES:
        rows = [row for pair in experts for row in _mixture(pair, what)]
        groups.append(_group("Engines, mixtures by the shipped constants", what, "seen", rows))
    other = inference.other_release(runs)
    return groups + _by_name(
        "Engines, another release's constants", other, "setting", foreign=True, borrowed=True
    )


def refitted(folder: Path) -> list[Group]:
    """Return the runs as constants predict them that saw neither their GPU, precision or model.
    Minutes: many fits.
    """
    runs = dense_runs(folder)
    groups = _by_name(
        "Engines, a model or GPU left out", inference.refitted(runs), "GPU", foreign=True
    )
    releases = inference.other_release(runs)

    def others(name: str, version: str) -> list[Predicted]:
        return next(
            (
                pairs
                for title, pairs in releases.items()
                if title.startswith(f"{name} {version} by ")
            ),
            [],
        )

    unseen = serving_by_engine.dense(
        runs, widths=inference.widths, others=others
    ) | serving_by_engine.mixtures(folder)
    for what in FIGURES:
        rows = [
            row for name, group in sorted(unseen.items()) for row in _with_widths(name, group, what)
        ]
        groups.append(_group("Engines by kind of model", what, "GPU", rows))
    return [dataclasses.replace(group, is_long=True) for group in (*groups, *_pools(folder))]


def _mixture(pair: Predicted, what: str) -> list[Comparison]:
    """Return one figure of a mixture's run, in the part of its engine, model and GPU; nothing if it
    was not measured.
    """
    scatter, log = expert_efficiency(engine=pair.run.engine), float(log_ratios([pair], what)[0])
    width = None if what == "throughput" else NORMAL_QUANTILE * getattr(scatter, f"{what}_log_sd")
    return [_ratio(_series(pair.run), pair.run.model, log, width)] if math.isfinite(log) else []


def _pools(folder: Path) -> list[Group]:
    scatter = pool_efficiency()
    pairs = [
        pair for members in fit_pools.left_out(fit_pools.told(folder)).values() for pair in members
    ]
    groups = []
    for what in FIGURES:
        width = NORMAL_QUANTILE * getattr(scatter, f"{what}_log_sd")
        rows = [
            _ratio(pair.run.engine, pair.run.model, pair.log_ratio(what), width) for pair in pairs
        ]
        groups.append(_group("Pools, the engine and lengths left out", what, "setting", rows))
    return groups


def _with_widths(name: str, group: serving_by_engine.Unseen, what: str) -> list[Comparison]:
    """Return the ratios of one engine's runs; offline runs have a throughput only, mixtures state
    no interval of theirs.
    """
    logs = log_ratios(group.pairs, what)
    return [
        _ratio(name, pair.run.model, float(log), widths.get(what))
        for pair, log, widths in zip(group.pairs, logs, group.widths, strict=True)
        if math.isfinite(log)
    ]


def _ratio(part: str, model: str, log_ratio: float, width: float | None) -> Comparison:
    """Return predicted over measured as a comparison with 1."""
    ratio = math.exp(log_ratio)
    low, high = (
        (None, None) if width is None else (ratio * math.exp(-width), ratio * math.exp(width))
    )
    return Comparison(
        source="",
        model=model,
        what="",
        published=1.0,
        predicted=ratio,
        low=low,
        high=high,
        part=part,
    )


def _by_name(
    title: str,
    named: Mapping[str, Sequence[Predicted]],
    left_out: LeftOut,
    *,
    foreign: bool = False,
    borrowed: bool = False,
) -> list[Group]:
    groups = []
    for what in FIGURES:
        rows = [
            row
            for name, members in named.items()
            for row in _by(
                lambda _, name=name: name, members, what, foreign=foreign, borrowed=borrowed
            )  # type: ignore[misc]
        ]
        groups.append(_group(title, what, left_out, rows))
    return groups


def _by(
    part: Callable[[ServingRun], str],
    pairs: Iterable[Predicted],
    what: str,
    *,
    foreign: bool = False,
    borrowed: bool = False,
) -> list[Comparison]:
    rows = []
    for pair in pairs:
        for row in inference.comparisons([pair], what, foreign=foreign, borrowed=borrowed):
            rows.append(dataclasses.replace(row, part=part(pair.run)))
    return rows


def _series(run: ServingRun) -> str:
    return f"{run.engine} {run.version}, {run.model} {run.precision}, {run.gpu}"


def _group(title: str, what: str, left_out: LeftOut, rows: list[Comparison]) -> Group:
    words, unit = FIGURES[what]
    return Group(title=f"{title}: {words}", left_out=left_out, saw=SAW, rows=rows, unit=unit)
