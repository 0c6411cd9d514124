"""`python -m benchmarks.learning.repeated [--measurements N] [--data DIR]`: a calibration of many
measurements, and whether a few repeats of a configuration say what all of them do.

First a database of that many measurements is calibrated, with every repeat that the newest
measurements hold and with a few of each configuration: processor seconds and peak memory of a
process of its own. Then, where the reference data is, calibrations learn from random runs of each
published set, each repeated with noise as a training reports it, and predict the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.learning.sets import RunSet, run_sets
from benchmarks.learning.trials import predict_calibrated, random_orders, score
from benchmarks.service import bulk
from hp_tool.loop import learning
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Evidence, calibration
from hp_tool.loop.learning import evidence as stored
from hp_tool.loop.learning.make import import_fit_modules
from hp_tool.store import open_store, schema

TAUGHT, REPEATED, NOISE_LOG_SD = 10, 20, 0.03
"""Distinct runs that a calibration learns from, reports of each run, and scatter of the reports."""
SEEDS = 3


def every_repeat() -> Any:
    """Patch fits so that they use every repeat of a configuration."""
    return patch.object(calibration, "limit_repeats", lambda evidence: evidence)


def calibrate(url: str, *, every: bool) -> tuple[float, float]:
    """Calibrate all clusters; return the processor seconds and the peak memory of the process in
    MiB.
    """
    with closing(open_store(url)) as store:
        import_fit_modules()
        begun = time.process_time()
        if every:
            unlimited = replace(assumed(), learning=replace(assumed().learning, repeats=None))  # type: ignore[arg-type]
            with every_repeat(), patch.object(stored, "assumed", lambda: unlimited):
                learning.calibrate(store=store)
        else:
            learning.calibrate(store=store)
    return time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_times(measurements: int) -> None:
    """Time the calibration of one database with every repeat and with a few repeats."""
    with tempfile.TemporaryDirectory(prefix="hp-repeated-") as folder:
        url = f"sqlite:///{Path(folder) / 'hp.sqlite3'}"
        schema.upgrade(url)
        counts = bulk.seed_everything(url=url, measurements=measurements)
        print(f"{counts['measurements']:,} measurements of {bulk.CLUSTERS} clusters:")
        for name, every in (("every repeat", True), ("a few repeats", False)):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, mebibytes = pool.apply(calibrate, (url,), {"every": every})
            print(f"  {name:14} {seconds:6.1f} processor seconds, {mebibytes:5.0f} MiB", flush=True)


def repeat_with_noise(taught: Evidence, dice: np.random.Generator) -> Evidence:
    """Return each run REPEATED times, with noise on its step time."""
    rows = np.repeat(np.arange(len(taught)), REPEATED)
    runs = taught.take(rows)
    noise = np.exp(NOISE_LOG_SD * dice.standard_normal(len(rows)))
    columns = {name: getattr(runs, name) for name in runs.__dataclass_fields__}
    names = tuple(f"{name}-{number}" for number, name in enumerate(runs.measurement_ids))
    return Evidence(
        **columns | {"measurement_ids": names, "measured_step_s": runs.measured_step_s * noise}
    )


def compare_errors(runs: RunSet) -> dict[str, dict[str, float]]:
    """Return mean scores on runs outside the calibration, for each selection of repeats."""
    trials: dict[str, list[dict[str, float]]] = {"every repeat": [], "a few repeats": []}
    for seed, order in enumerate(random_orders(runs, SEEDS)):
        taught, tested = order[:TAUGHT], runs.evidence.take(order[TAUGHT:])
        seen = repeat_with_noise(runs.evidence.take(taught), np.random.default_rng(seed))
        trials["a few repeats"].append(
            score(predict_calibrated(seen, tested), tested.measured_step_s)
        )
        with every_repeat():
            trials["every repeat"].append(
                score(predict_calibrated(seen, tested), tested.measured_step_s)
            )
    keys = ("error", "coverage", "width")
    return {
        name: {key: fmean(trial[key] for trial in each) for key in keys}
        for name, each in trials.items()
    }


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.repeated", description=__doc__
    )
    add_data_argument(parser)
    parser.add_argument(
        "--measurements", type=int, default=300_000, help="0 leaves the first comparison out"
    )
    parser.add_argument("--sets", nargs="*", metavar="NAME", help="only sets whose name begins so")
    arguments = parser.parse_args()
    if arguments.measurements:
        print_times(arguments.measurements)
    folder = data_folder(arguments)
    print(
        f"{TAUGHT} runs, {REPEATED} reports of each; mean error, coverage and ln(high / low) of 90 "
        "% intervals on the others:"
    )
    with threadpool_limits(limits=1):
        for runs in run_sets(folder):
            if len(runs) > TAUGHT and (
                not arguments.sets or runs.name.startswith(tuple(arguments.sets))
            ):
                by_name = compare_errors(runs)
                cells = [
                    f"{name} {100 * each['error']:5.2f} %, {100 * each['coverage']:3.0f} %, "
                    f"{each['width']:.3f}"
                    for name, each in by_name.items()
                ]
                print(f"  {runs.name:32} {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
