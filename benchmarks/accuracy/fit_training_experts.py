"""Fit what experts add to a training step: `python -m evidence.fit --only training_experts`.

Three constants of today's Megatron Core, on top of those that dense runs gave (fit_frameworks,
which runs this too): on recipes with experts and their knobs from the first release with today's
dispatchers on, and DeepSeek-V2 cut to fit 8 B200.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy.fitting import Fit, Prior, errors_by_setting, with_constants
from benchmarks.accuracy.prepared import Prepared, Shares
from benchmarks.accuracy.runs import NEWEST
from evidence.fitted_file import FittedFile
from hp_tool.domain.efficiency import FrameworkEfficiency

PRIORS = {
    "expert_overhead_s": Prior(2e-3, 2e-3, 0.0, 1e-2),
    "expert_launch_s": Prior(1e-5, 1e-5, 0.0, 1e-4),
    "dispatch_bandwidth_fraction": Prior(0.65, 0.15, 0.2, 1.0),
}
NOISE = 0.06
"""Relative scatter taken for one configuration; its releases share one vote."""
PROFILES = ("default", "a100", "v100")
"""Megatron Core's: what hosts take for experts does not depend on the card."""


def with_experts(
    runs: Sequence[Prepared], framework: FrameworkEfficiency, shares: Shares | None = None
) -> FrameworkEfficiency:
    """The constants with those of experts fitted on these runs; the means of the priors without any
    run of experts.

    Where there are runs of today's releases, earlier ones do not count.
    """
    experts = [run for run in runs if run.has_experts]
    chosen = [
        run for run in experts if (run.problem.workload.framework_version or NEWEST) >= NEWEST
    ] or experts
    if not chosen:
        return with_constants(framework, {name: prior.mean for name, prior in PRIORS.items()})

    fit = Fit[Prepared, FrameworkEfficiency](
        priors=PRIORS,
        constants=functools.partial(with_constants, framework),
        errors=functools.partial(errors_by_setting, noise=NOISE, shares=shares),
    )
    return fit(chosen)


def fitted(folder: Path) -> Iterator[FittedFile]:
    """Yield these three constants of each of Megatron Core's profiles."""
    from benchmarks.accuracy.fit_frameworks import today_runs
    from hp_tool.catalog.efficiency import _framework

    framework = with_experts(today_runs(folder), _framework("megatron-core", "default"))
    constants = {name: getattr(framework, name) for name in PRIORS}
    for name in PROFILES:
        yield FittedFile(file=f"frameworks/megatron-core/{name}.yaml", fields=constants, keeps=None)
