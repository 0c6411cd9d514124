"""Published runs ready to be predicted under trial constants, and the clocks that fits write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import yaml

import hp_tool
from benchmarks.accuracy.heldout import Case
from benchmarks.accuracy.korthikanti import Comparison
from hp_tool import documents
from hp_tool.catalog.efficiency import gpu_efficiency, sustained, usual_clocks
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.roofline import below_16_bits, is_narrow
from hp_tool.cost.step_time import without_host
from hp_tool.domain.efficiency import Clocks, EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import GpuSpec
from hp_tool.training.evaluate import resolve_config
from hp_tool.training.problem import TrainingProblem, resolve_training

CLOCKS = Path(hp_tool.__file__).parent / "catalog/data/efficiency/clocks"
REFERENCE = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "b200": "b200-sxm-180gb", "mi300x": "mi300x-192gb"}
"""Card under whose power limit a die's shares are stated."""
ACCUMULATION = "fp32_accumulation"
Shares = Mapping[tuple[str, str], float]
"""By die: share of boost that matmuls of a precision sustain, and the slowdown of accumulation in fp32."""


def clocks(die: str, shares: Shares) -> Clocks:
    """The shipped clocks of a die, with these shares in their place."""
    share = {**_shipped(die), **{name: value for (one, name), value in shares.items() if one == die}}
    slowdown = share.pop(ACCUMULATION, 1.0)
    return Clocks(gpu=REFERENCE.get(die), share=share, fp32_accumulation=slowdown, fitted_on={})  # type: ignore[arg-type]


@functools.cache
def _shipped(die: str) -> dict[str, float]:
    path = CLOCKS / f"{die}.yaml"
    found = documents.read(path) if path.is_file() else {"share": {"bf16": 0.8}}
    return {**found["share"], ACCUMULATION: found.get(ACCUMULATION, 1.0)}


def write_clocks(shares: Shares, *, fitted_on: str) -> None:
    """Add these shares to their dies' files, and renew the files that borrow from them."""
    for die, card in REFERENCE.items():
        own = {name: float(f"{value:.4g}") for (one, name), value in shares.items() if one == die}
        if own:
            _write(die, card, own, dict.fromkeys(own, fitted_on))
    _shipped.cache_clear()
    for die, origin in (("b300", "b200"), ("v100", "a100")):
        card = REFERENCE[origin] if die == "b300" else None
        _write(die, card, _shipped(origin), dict.fromkeys(_shipped(origin), f"nobody measured it: as {origin}"))
    known = [_shipped(die) for die in ("a100", "h100", "b200")]
    typical = {}
    for name in ("bf16", "fp8", ACCUMULATION):
        logarithms = [np.log(values[name]) for values in known if name in values]
        typical[name] = float(f"{np.exp(np.mean(logarithms)):.4g}")
    _write("generic", None, typical, dict.fromkeys(typical, "geometric means over a100, h100, b200"))


def _write(die: str, card: str | None, values: Mapping[str, float], fitted_on: Mapping[str, str]) -> None:
    path = CLOCKS / f"{die}.yaml"
    known = documents.read(path) if path.is_file() else {"share": {}, "fitted_on": {}}
    share = {**known["share"], **{name: value for name, value in values.items() if name != ACCUMULATION}}
    fields = ({"gpu": card} if card else {}) | {
        "share": share,
        ACCUMULATION: values.get(ACCUMULATION, known.get(ACCUMULATION, 1.0)),
        "fitted_on": {**known["fitted_on"], **fitted_on},
    }
    text = yaml.safe_dump(fields, sort_keys=False, width=120)
    path.write_text(f"# Written by python -m benchmarks.accuracy.fit_frameworks; do not edit by hand.\n{text}")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case whose names are looked up once, however often it is predicted."""

    case: Case
    problem: TrainingProblem
    candidate: Candidates

    @classmethod
    def of(cls, case: Case) -> Prepared:
        problem = resolve_training(case.query)
        config = resolve_config(case.query.parallel, num_gpus=problem.cluster.num_gpus)
        return cls(case=case, problem=problem, candidate=Candidates.alone(config))

    @property
    def gpu(self) -> GpuSpec:
        return self.problem.cluster.gpu

    def step_s(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> float:
        """Predicted by these constants, under the run's own switches of overlap and CUDA graphs."""
        workload = self.problem.workload
        framework = with_overlap(framework, overlap=workload.overlap, newest=framework)
        if workload.cuda_graphs:
            framework = without_host(framework)
        if is_narrow(workload):
            framework = below_16_bits(framework)
        die = self.gpu.silicon or "generic"
        kernels = sustained(
            gpu_efficiency(self.gpu), gpu=self.gpu, clocks=clocks(die, shares) if shares else usual_clocks(self.gpu)
        )
        profile = EfficiencyProfile(gpu=kernels, framework=framework)
        return float(dataclasses.replace(self.problem, profile=profile).costs(self.candidate).step_s)

    def ratio(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> float:
        """Predicted over published step time."""
        return self.step_s(framework, shares) / self.case.step_s

    def compare(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> Comparison:
        case = self.case
        predicted = self.step_s(framework, shares)
        return Comparison(source="run", model=case.name, what=case.what, published=case.step_s, predicted=predicted)
