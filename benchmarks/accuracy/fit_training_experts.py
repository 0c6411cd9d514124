"""Fit what experts add to a training step: `python -m benchmarks.accuracy.fit_training_experts --data DIR`.

Three constants of today's Megatron Core, on top of those that dense runs gave (fit_frameworks, which runs this too): on recipes
with experts and their knobs from the first release with today's dispatchers on, and DeepSeek-V2 cut to fit 8 B200.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.accuracy.moe_runs import NEWEST
from benchmarks.accuracy.prepared import Prepared, Shares
from hp_tool import documents
from hp_tool.catalog.efficiency import FOLDER
from hp_tool.domain.efficiency import FrameworkEfficiency

PRIORS = {
    # name: (mean, standard deviation, lowest, highest)
    "expert_overhead_s": (2e-3, 2e-3, 0.0, 1e-2),
    "expert_launch_s": (1e-5, 1e-5, 0.0, 1e-4),
    "dispatch_bandwidth_fraction": (0.65, 0.15, 0.2, 1.0),
}
NOISE = 0.06
"""Relative scatter taken for one configuration; its releases share one vote."""
PROFILES = ("default", "a100", "v100")
"""Megatron Core's: what hosts take for experts does not depend on the card."""


def with_experts(runs: Sequence[Prepared], framework: FrameworkEfficiency, shares: Shares | None = None) -> FrameworkEfficiency:
    """The constants with those of experts fitted on these runs; the means of the priors without any run of experts.

    Where there are runs of today's releases, earlier ones do not count.
    """
    experts = [run for run in runs if run.problem.model.num_experts is not None]
    chosen = [run for run in experts if (run.problem.workload.framework_version or NEWEST) >= NEWEST] or experts
    repeats = Counter(run.case.setting for run in chosen)
    weights = np.array([1.0 / (NOISE * np.sqrt(repeats[run.case.setting])) for run in chosen])
    mean, sd, low, high = (np.array(column) for column in zip(*PRIORS.values(), strict=True))

    def constants(z: NDArray[np.float64], *, digits: int = 16) -> FrameworkEfficiency:
        values = (float(f"{value:.{digits}g}") for value in mean + z * sd)
        return dataclasses.replace(framework, **dict(zip(PRIORS, values, strict=True)))  # type: ignore[arg-type]

    def residuals(z: NDArray[np.float64]) -> NDArray[np.float64]:
        found = constants(z)
        return np.concatenate([np.log([run.ratio(found, shares) for run in chosen]) * weights, z])

    if not chosen:
        return constants(np.zeros(len(mean)))
    near = np.full(len(mean), 1e-2)
    bounds = ((low - mean) / sd, (high - mean) / sd)
    fitted = least_squares(residuals, near, bounds=bounds, loss="soft_l1", diff_step=1e-2, xtol=1e-4, ftol=1e-4)
    return constants(fitted.x, digits=4)


def write(framework: FrameworkEfficiency) -> None:
    """These three constants into Megatron Core's profiles, whose others stay."""
    for name in PROFILES:
        path = FOLDER / "frameworks/megatron-core" / f"{name}.yaml"
        head = path.read_text().partition("\n")[0]
        fields = documents.read(path) | {key: getattr(framework, key) for key in PRIORS}
        path.write_text(f"{head}\n{yaml.safe_dump(fields, sort_keys=False, width=120)}")


def main() -> None:
    from benchmarks.accuracy.fit_frameworks import today_runs
    from hp_tool.catalog.efficiency import _framework

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_argument(parser)
    folder = data_folder(parser.parse_args())
    if folder is None:
        return
    found = with_experts(today_runs(folder), _framework("megatron-core", "default"))
    write(found)
    print({name: getattr(found, name) for name in PRIORS})


if __name__ == "__main__":
    main()
