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
from hp_tool.catalog.efficiency import gpu_efficiency, sustained
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.step_time import without_host
from hp_tool.domain.efficiency import Clocks, EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import GpuSpec, Precision
from hp_tool.training.evaluate import resolve_config
from hp_tool.training.problem import TrainingProblem, resolve_training

CLOCKS = Path(hp_tool.__file__).parent / "catalog/data/efficiency/clocks"
REFERENCE = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "b200": "b200-sxm-180gb", "mi300x": "mi300x-192gb"}
"""Card under whose power limit a die's shares are stated."""
Shares = Mapping[tuple[str, Precision], float]
"""Share of boost that matmuls sustain, by die and input precision."""


def clocks(die: str, shares: Shares) -> Clocks:
    """The shipped clocks of a die, with these shares in their place."""
    own = {precision: share for (name, precision), share in shares.items() if name == die}
    return Clocks(gpu=REFERENCE.get(die), share={**_shipped(die), **own}, fitted_on={})


@functools.cache
def _shipped(die: str) -> dict[Precision, float]:
    path = CLOCKS / f"{die}.yaml"
    return documents.read(path)["share"] if path.is_file() else {"bf16": 0.8}


def write_clocks(shares: Shares, *, fitted_on: str) -> None:
    """Add these shares to their dies' files, and renew the files that borrow from them."""
    for die, card in REFERENCE.items():
        own = {precision: float(f"{share:.4g}") for (name, precision), share in shares.items() if name == die}
        if own:
            _write(die, card, own, dict.fromkeys(own, fitted_on))
    b200 = documents.read(CLOCKS / "b200.yaml")
    _write("b300", b200["gpu"], b200["share"], {precision: f"b200: {rows}" for precision, rows in b200["fitted_on"].items()})
    measured = [documents.read(CLOCKS / f"{die}.yaml")["share"] for die in ("a100", "h100", "b200")]
    typical = {}
    for precision in ("bf16", "fp8"):
        known = [share[precision] for share in measured if precision in share]
        typical[precision] = float(f"{np.exp(np.mean(np.log(known))):.4g}")
    _write("generic", None, typical, dict.fromkeys(typical, "geometric means over a100, h100, b200"))


def _write(die: str, card: str | None, share: Mapping[str, float], fitted_on: Mapping[str, str]) -> None:
    path = CLOCKS / f"{die}.yaml"
    known = documents.read(path) if path.is_file() else {"share": {}, "fitted_on": {}}
    fields = {"gpu": card} if card else {}
    fields |= {key: {**known[key], **new} for key, new in (("share", share), ("fitted_on", fitted_on))}  # type: ignore[dict-item]
    text = yaml.safe_dump(fields, sort_keys=False, width=120)
    path.write_text(f"# Written by python -m benchmarks.accuracy.fit_*; do not edit by hand.\n{text}")


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
        die = self.gpu.silicon or "generic"
        kernels = sustained(gpu_efficiency(self.gpu), gpu=self.gpu, clocks=clocks(die, shares) if shares else None)
        profile = EfficiencyProfile(gpu=kernels, framework=framework)
        return float(dataclasses.replace(self.problem, profile=profile).costs(self.candidate).step_s)

    def ratio(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> float:
        """Predicted over published step time."""
        return self.step_s(framework, shares) / self.case.step_s

    def compare(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> Comparison:
        case = self.case
        predicted = self.step_s(framework, shares)
        return Comparison(source="run", model=case.name, what=case.what, published=case.step_s, predicted=predicted)
