"""Fit what layers with experts add to isolated kernels while serving: `python -m benchmarks.accuracy.fit_experts --data DIR`.

Writes hp_tool/catalog/data/efficiency/experts.yaml, one profile for all engines, from the served mixtures of
inference_measured_2.csv, on top of the engines' constants, which come from dense models (`fit_engines`, which runs first).
Priors keep every constant physical. Deviations are those of whole groups (engine, version, model) left out of a fit.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import t as student

from benchmarks.accuracy.data import add_data_argument, data_folder, write_constants
from benchmarks.accuracy.serving_rows import later_runs
from benchmarks.accuracy.serving_runs import Batch, Predicted, ServingRun, batches, predict
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import FOLDER, engine_efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.serving import EngineEfficiency, ExpertEfficiency

Floats = NDArray[np.float64]

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "grouped_slowdown": (1.2, 0.3, 0.5, 4.0),
    "widened_slowdown": (1.2, 0.3, 0.5, 4.0),
    "layer_overhead_s": (1.2e-5, 1e-5, 0.0, 1e-4),
    # An engine's own work on prompts is in its constants of dense models: a mixture adds none unless its rows say so.
    "prompt_layer_overhead_s": (0.0, 2e-5, 0.0, 2e-3),
    "popularity_variance": (1.0, 1.0, 0.0, 10.0),
    "load_variance": (0.25, 0.25, 0.0, 10.0),  # routers are trained to load experts alike; EP 4 and 8 hardly tell
}
NOISE = {"ttft": 0.5, "tpot": 0.06}
"""Relative scatter taken for one measured figure."""
ROBUST = {"ttft": 0.25, "tpot": 0.06}
"""Log ratio from which a residual counts linearly."""
STRANGE = ("trtllm", "1.2.0rc6.post1")
"""One run alone, whose requests wait 29 s for a first token that their prompts need 2 s for: no setting told explains it."""
Prepared = Sequence[tuple[Batch, EngineEfficiency]]


def mixtures(folder: Path) -> list[ServingRun]:
    """Served mixtures on one replica."""
    found = (run for run in later_runs(folder) if catalogue_model(run.model).num_experts)
    return [run for run in found if (run.engine, run.version) != STRANGE]


def prepared(found: Sequence[ServingRun]) -> Prepared:
    """The runs in batches, each with its engine's constants."""
    versions: dict[tuple[str, str], list[ServingRun]] = defaultdict(list)
    for run in found:
        versions[(run.engine, run.version)].append(run)
    pairs: list[tuple[Batch, EngineEfficiency]] = []
    for (name, version), members in versions.items():
        profile = engine_efficiency(engine=name, version=version or None)
        pairs += [(batch, profile) for batch in batches(members, profile)]
    return pairs


def predicted(pairs: Prepared, experts: ExpertEfficiency) -> list[Predicted]:
    """Every run with these constants of experts."""
    found = []
    for batch, profile in pairs:
        changed = dataclasses.replace(batch, case=dataclasses.replace(batch.case, experts=experts))
        found += predict([changed], profile)
    return found


def fit(seen: Sequence[ServingRun]) -> ExpertEfficiency:
    """Maximum a posteriori constants from the runs seen."""
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))
    pairs = prepared(seen)
    runs = [run for batch, _ in pairs for run in batch.runs]
    count = Counter(run.model for run in runs)
    # Runs of one model share its errors: each model weighs alike.
    weights = np.sqrt([len(runs) / len(count) / count[run.model] for run in runs])

    def profile(x: Floats) -> ExpertEfficiency:
        return ExpertEfficiency(**{name: float(f"{v:.4g}") for name, v in zip(PRIORS, x, strict=True)})

    def residuals(x: Floats) -> Floats:
        found = predicted(pairs, profile(x))
        ratios = {what: log_ratios(found, what) / ROBUST[what] for what in NOISE}
        bent = [weights * _linear_beyond(z) * ROBUST[what] / NOISE[what] for what, z in ratios.items()]
        return np.concatenate([*bent, (x - mean) / sd])

    return profile(least_squares(residuals, mean, bounds=(low, high), x_scale=sd, diff_step=1e-2).x)


def _linear_beyond(z: Floats) -> Floats:
    """Residuals whose square is the pseudo-Huber loss."""
    bent: Floats = np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z**2) - 1.0))
    return bent


def log_ratios(found: Sequence[Predicted], what: str) -> Floats:
    """log(predicted / measured) of ttft, tpot or throughput."""
    name = what if what == "throughput" else f"{what}_s"
    return np.array([np.log(getattr(pair, name) / getattr(pair.run, name)) for pair in found])


def left_out(
    found: Sequence[ServingRun], key: Callable[[ServingRun], object]
) -> dict[object, tuple[ExpertEfficiency, list[Predicted]]]:
    """Return, by the value of `key`, the constants of all other runs and what they predict of these."""
    results = {}
    for value in dict.fromkeys(key(run) for run in found):
        constants = fit([run for run in found if key(run) != value])
        results[value] = (constants, predicted(prepared([run for run in found if key(run) == value]), constants))
    return results


def with_scatter(constants: ExpertEfficiency, unseen: Sequence[Sequence[Predicted]]) -> ExpertEfficiency:
    """The constants with the root mean square of log ratios of groups left out, each group weighing alike, wider by as much as
    Student's distribution of so few groups is wider than the normal one (at 90 %).
    """
    few = float(student.ppf(0.95, len(unseen))) / NORMAL_QUANTILE

    def scatter(what: str) -> float:
        return few * float(np.sqrt(np.mean([np.mean(log_ratios(group, what) ** 2) for group in unseen])))

    names = ("ttft", "tpot", "throughput")
    return dataclasses.replace(constants, **{f"{what}_log_sd": float(f"{scatter(what):.3g}") for what in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    found = mixtures(folder)
    groups = left_out(found, lambda run: run.model)
    models = ", ".join(dict.fromkeys(f"{run.model} on {run.gpu} ({run.engine})" for run in found))
    profile = dataclasses.replace(
        with_scatter(fit(found), [pairs for _, pairs in groups.values()]),
        fitted_on=f"{len(found)} runs of inference_measured_2.csv ({models}) by python -m benchmarks.accuracy.fit_experts; "
        "deviations of models left out",
    )
    path = FOLDER / "experts.yaml"
    write_constants(path, dataclasses.asdict(profile), command="benchmarks.accuracy.fit_experts")
    print(path.read_text())


if __name__ == "__main__":
    main()
