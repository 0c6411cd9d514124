"""Write profiles of engine releases without measured runs, from isolated kernels: `python -m
evidence.fit --only releases`.

Writes hp_tool/catalog/data/efficiency/engines/*.yaml for RELEASES. The slowdowns of matmuls and
one-kernel all-reduces are medians of the engine's kernel times in ops/, relative to the die's
constants (SGLang's kernels were not timed). All other constants are the prior means of
`fit_engines`. The doubt about such a profile is the error that the same method has for a release
with measured rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.fit_engines import (
    as_fields,
    by_version,
    engine,
    priors_of,
    scatter,
    settings,
    stored_fields,
)
from benchmarks.accuracy.fit_gpus import PRECISIONS, SYSTEMS, timed_rows
from benchmarks.accuracy.fitting import fit_settings, rounded
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, batches, dense_runs, predict
from evidence.fitted_file import FittedFile
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog import model as catalogue_model
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import all_reduce_seconds, matmuls_seconds
from hp_tool.domain.engines import EngineEfficiency
from hp_tool.domain.hardware import ClusterQuery, Precision
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.questions.serving.problem import serving_case

COMMAND = "python -m evidence.fit --only releases"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """A release without measured runs."""

    engine: str
    version: str
    kernels: str | None
    """The release of the kernel timings in ops/; None if the engine has none."""
    doubted_by: str
    """The release whose measured rows determine the error of such a profile."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


RELEASES = [Release(**release) for release in fit_settings("releases")]
LEAST_WIDTH = 1024
"""Minimum inner and outer dimension of the matmuls of a layer."""


def profile(release: Release, folder: Path) -> EngineEfficiency:
    """Return the constants of the release, without its doubt."""
    means = {name: prior.mean for name, prior in priors_of(release.engine).items()}
    values = means | {
        "matmul_slowdown": 1.0,
        "attention_slowdown": 1.0,
    }
    if release.kernels is not None:
        isolated = engine(
            rounded(values | {"communication_slowdown": 1.0, "cast_share": 1.0}),
            name=release.engine,
            version="",
        )
        rows = {
            name: _release_rows(release, timed_rows(folder, name))
            for name in ("gemm", "custom_allreduce")
        }
        values |= {
            "matmul_slowdown": _median(_matmuls(rows["gemm"], isolated)),
            "communication_slowdown": _median(_all_reduces(rows["custom_allreduce"], isolated)),
        }
    made = engine(rounded(values), name=release.engine, version=release.version)
    return dataclasses.replace(made, **as_fields(release.settings), kernels_alone=True)


def _release_rows(release: Release, rows: Iterable[Row]) -> list[Row]:
    source = f"/{release.engine}/{release.kernels}"
    # vLLM's one-kernel all-reduce runs in CUDA graphs.
    return [
        row
        for row in rows
        if row["source"].endswith(source) and not row.get("kernel_source", "").endswith("_eager")
    ]


def _case(system: str, constants: EngineEfficiency, precision: Precision = "bf16") -> ServingCase:
    machine = cluster(ClusterQuery(gpu=SYSTEMS[system], num_gpus=8))
    load = InferenceWorkload(
        input_length=1, output_length=1, concurrency=1, precision=precision, engine=constants.engine
    )
    return serving_case(
        model=catalogue_model("qwen3-32b"), cluster=machine, workload=load, engine=constants
    )


def _matmuls(rows: Iterable[Row], constants: EngineEfficiency) -> list[float]:
    """Return the measured seconds of each matmul relative to the prediction by `constants`."""
    ratios = []
    cases = {}
    for row in rows:
        m, n, k = (int(row[name]) for name in ("m", "n", "k"))
        precision = PRECISIONS.get(row["gemm_dtype"])
        if (
            precision is None
            or min(n, k) < LEAST_WIDTH
            or precision not in gpu(SYSTEMS[row["system"]]).peak_flops_per_second
        ):
            continue
        key = row["system"], precision
        cases[key] = cases.get(key) or _case(*key[:1], constants, precision)
        expected = matmuls_seconds(cases[key], np.array([float(m)]), [(n, k)])
        ratios.append(float(row["latency_ms"]) * 1e-3 / float(expected[0]))
    return ratios


def _all_reduces(rows: Iterable[Row], constants: EngineEfficiency) -> list[float]:
    ratios = []
    for row in rows:
        size = np.array([2.0 * float(row["message_size"])])
        expected = all_reduce_seconds(
            _case(row["system"], constants), size, group_size=np.array([int(row["num_gpus"])])
        )
        ratios.append(float(row["latency_ms"]) * 1e-3 / float(expected[0]))
    return ratios


def _median(ratios: list[float]) -> float:
    return float(np.median(ratios))


def release_errors(
    release: Release, constants: EngineEfficiency, runs: list[ServingRun]
) -> list[Predicted]:
    """Return the measured rows of the earlier release, predicted by constants from kernels alone,
    with that release's settings.
    """
    members = by_version(runs)[release.engine, release.doubted_by]
    # What no kernel tells stays as it was run: limits, memory, the client.
    as_run = dataclasses.replace(constants, **settings(release.engine, release.doubted_by))
    return predict(batches(members, as_run), as_run)


def timed_dies(release: Release, folder: Path) -> tuple[str, ...]:
    """Return the dies on which the release's kernels were timed; if none of the engine's kernels
    were timed, all dies with kernel timings.
    """
    systems = {
        row["system"]
        for row in timed_rows(folder, "gemm")
        if release.kernels is None or row["source"].endswith(release.kernels)
    }
    return tuple(sorted({die for system in systems if (die := gpu(SYSTEMS[system]).silicon)}))


def fitted(folder: Path) -> Iterator[FittedFile]:
    runs = dense_runs(folder)
    for release in RELEASES:
        constants = profile(release, folder)
        pairs = release_errors(release, constants, runs)
        sds = {f"{what}_log_sd": float(f"{value:.3g}") for what, value in scatter(pairs).items()}
        kernels = f"kernels of {release.kernels}" if release.kernels else "kernels of other engines"
        constants = dataclasses.replace(
            constants,
            **sds,
            fitted_silicon=timed_dies(release, folder),
            fitted_on=f"timed {kernels} alone by {COMMAND}; deviations: {len(pairs)} runs of "
            f"{release.doubted_by} by the like",
        )
        yield FittedFile(
            file=f"engines/{release.engine}-{release.version}.yaml",
            fields=stored_fields(constants),
        )
