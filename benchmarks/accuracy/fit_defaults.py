"""Fit what engines add that were started with their defaults: `python -m evidence.fit --only
defaults`.

Writes hp_tool/catalog/data/efficiency/defaults.yaml from serving_as_started.csv: one factor on
every pass, on top of the engines' and the experts' constants. Deviations are those of models left
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.accuracy import fitting
from benchmarks.accuracy.data import rows
from benchmarks.accuracy.fitting import conformal_sd
from benchmarks.accuracy.serving_runs import (
    FIGURES,
    Predicted,
    ServingRun,
    batches,
    by_constants,
    log_ratios,
    predict,
    serving_run,
)
from evidence.fitted_file import FittedFile
from hp_tool.catalog import library
from hp_tool.catalog import model as catalogue_model
from hp_tool.domain.engines import DefaultsEfficiency
from hp_tool.loop.calibration.microbenchmarks import short

COMMAND = "python -m evidence.fit --only defaults"
NARROW = ("int4",)
"""Kimi K2.5 in int4 is three to seven times slower than predicted, on H200 and MI350X: no kernels
were there for it yet. Such runs tell nothing about others.
"""
TRIALS = np.geomspace(1.0, 4.0, 15)
"""Slowdowns that are tried; between them lie lines."""


def started(folder: Path) -> list[ServingRun]:
    """The runs whose model the catalogue has and whose layout holds it."""
    runs = [
        dataclasses.replace(serving_run(row), equal_lengths=row["engine"] == "vllm")
        for row in rows(folder, "serving_as_started")
        if library.knows("models", row["model"]) and row["precision"] not in NARROW
    ]
    fitting_ones = {id(pair.run) for pair in predicted(runs, 1.0) if pair.fits}
    return [run for run in runs if id(run) in fitting_ones]


def predicted(runs: Sequence[ServingRun], slowdown: float) -> list[Predicted]:
    """The runs with their passes so much slower."""
    pairs = []
    for profile, members in by_constants(runs):
        for batch in batches(members, profile):
            case = dataclasses.replace(batch.case, slowdown=slowdown)
            pairs += predict([dataclasses.replace(batch, case=case)], profile)
    return pairs


def fit(runs: Sequence[ServingRun]) -> float:
    """Return the slowdown with the least error of TPOT, each model weighing alike."""
    models = list(dict.fromkeys(map(_model, runs)))

    def error(slowdown: float) -> float:
        pairs = predicted(runs, slowdown)
        logs = np.abs(log_ratios(pairs, "tpot"))
        of = [np.array([_model(pair.run) == name for pair in pairs]) for name in models]
        return float(np.mean([logs[each].mean() for each in of]))

    return short(float(TRIALS[int(np.argmin([error(float(each)) for each in TRIALS]))]))


def left_out(runs: Sequence[ServingRun]) -> list[Predicted]:
    """The runs of each model, with the slowdown of the others."""
    parts = fitting.left_out(runs, _model)
    return [pair for _, members, others in parts for pair in predicted(members, fit(others))]


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield defaults.yaml."""
    runs = started(folder)
    unseen = left_out(runs)
    sds = {f"{what}_log_sd": short(conformal_sd(log_ratios(unseen, what))) for what in FIGURES}
    names = ", ".join(dict.fromkeys(f"{_model(run)} on {run.gpu} ({run.engine})" for run in runs))
    profile = DefaultsEfficiency(
        slowdown=fit(runs),
        **sds,
        fitted_on=f"{len(runs)} runs of serving_as_started.csv ({names}) by {COMMAND}; deviations "
        "of models left out",
    )
    yield FittedFile(file="defaults.yaml", fields=dataclasses.asdict(profile))


def _model(run: ServingRun) -> str:
    return catalogue_model(run.model).name
