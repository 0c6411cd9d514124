"""Published runs prepared for predictions with trial constants, and the clock files that fits
write.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import hp_tool
from benchmarks.accuracy.comparison import Comparison
from evidence.cases import Case
from evidence.fitted_file import FittedFile
from hp_tool.catalog import documents
from hp_tool.catalog.efficiency import (
    efficiency_profile,
    gpu_efficiency,
    sustained_efficiency,
    usual_clocks,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.host import without_host
from hp_tool.cost.network import with_local_ramp
from hp_tool.cost.overlap import with_overlap
from hp_tool.cost.precision import is_narrow
from hp_tool.cost.roofline import attention_kernel, below_16_bits, with_attention_kernel
from hp_tool.cost.uncertainty import (
    NORMAL_QUANTILE,
    nearest_runs,
    step_log_sd,
    training_setting,
    unmeasured_features,
)
from hp_tool.domain.efficiency import Clocks, EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.familiarity import Index, group_settings
from hp_tool.domain.graphs import recorded_modules
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.result import Estimate
from hp_tool.domain.units import GIB
from hp_tool.errors import InputError
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, with_scatter
from hp_tool.questions.training.releases import release_factor

CLOCKS = Path(hp_tool.__file__).parent / "catalog/data/efficiency/clocks"
REFERENCE = {
    "a100": "a100-sxm-80gb",
    "h100": "h100-sxm-80gb",
    "b200": "b200-sxm-180gb",
    "mi300x": None,
    "v100": "v100-sxm-32gb",
}
"""Card whose power limit the sustained fractions of a die refer to. None for AMD: its kernels limit
matmuls, equally at 750 W and 1,000 W.
"""
Shares = Mapping[tuple[str, str], float]
"""Fraction of boost clocks that matmuls of a precision sustain, by (die, precision)."""


def clocks(die: str, shares: Shares) -> Clocks:
    """Return the shipped clocks of a die, with these fractions replaced."""
    share = {
        **_shipped(die),
        **{name: value for (one, name), value in shares.items() if one == die},
    }
    return Clocks(gpu=REFERENCE.get(die), share=share, fitted_on={})  # type: ignore[arg-type]


@functools.cache
def _shipped(die: str) -> dict[str, float]:
    path = CLOCKS / f"{die}.yaml"
    return documents.read(path)["share"] if path.is_file() else {"bf16": 0.8}


def clock_files(*fits: tuple[Shares, str]) -> Iterator[FittedFile]:
    """Yield the clock files of all dies. Each argument is (fractions, description of the rows that
    they were fitted to). Dies without fitted fractions use those of another die.
    """
    fitted: dict[str, dict[str, tuple[float, str]]] = {}
    for shares, rows in fits:
        for (die, name), value in shares.items():
            fitted.setdefault(die, {})[name] = (float(f"{value:.4g}"), rows)
    cards: dict[str, str | None] = {die: REFERENCE[die] for die in fitted}
    for die, origin in {"b300": "b200", "mi355x": "mi300x"}.items():
        cards[die] = REFERENCE[origin]
        borrowed_note = f"nobody measured it: as {origin}"
        fitted[die] = {name: (share, borrowed_note) for name, (share, _) in fitted[origin].items()}
    known = [fitted[die] for die in ("a100", "h100", "b200")]
    typical, cards["generic"] = {}, None
    for name in ("bf16", "fp8"):
        logarithms = [np.log(shares[name][0]) for shares in known if name in shares]
        mean = float(f"{np.exp(np.mean(logarithms)):.4g}")
        typical[name] = (mean, "geometric means over a100, h100, b200")
    for die, shares in (fitted | {"generic": typical}).items():
        yield FittedFile(
            file=f"clocks/{die}.yaml",
            fields={
                **({"gpu": cards[die]} if cards[die] else {}),
                "share": {name: share for name, (share, _) in shares.items()},
                "fitted_on": {name: rows for name, (_, rows) in shares.items()},
            },
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A case with its names resolved once for all predictions. `from_case` returns the same object
    for equal cases.
    """

    case: Case
    problem: TrainingProblem
    candidate: Candidates

    @classmethod
    @functools.cache
    def from_case(cls, case: Case) -> Prepared:
        resolved = resolve_configuration(case.query)
        return cls(case=case, problem=resolved.problem, candidate=resolved.candidate)

    @property
    def has_experts(self) -> bool:
        return self.problem.model.num_experts is not None

    @property
    def gpu(self) -> GpuSpec:
        return self.problem.cluster.gpu

    def step_s(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> float:
        """Return the step time predicted by these constants, with the run's settings for overlap
        and CUDA graphs.
        """
        workload = self.problem.workload
        kernel = attention_kernel(workload, self.problem.model)
        if (
            kernel is not None and framework.framework == workload.framework
        ):  # another framework's constants include its kernel
            timed = gpu_efficiency(self.gpu).attention_kernels
            framework = with_attention_kernel(framework, name=kernel, timed=timed)
        framework = with_overlap(framework, overlap=workload.overlap, newest=framework)
        if workload.cuda_graphs:
            framework = without_host(
                framework, modules=recorded_modules(workload, self.problem.model)
            )
        if is_narrow(workload):
            framework = below_16_bits(framework)
        die = self.gpu.silicon or "generic"
        kernels = sustained_efficiency(
            with_local_ramp(gpu_efficiency(self.gpu), gpu=self.gpu),
            gpu=self.gpu,
            clocks=clocks(die, shares) if shares else usual_clocks(self.gpu),
        )
        factor = release_factor(framework, workload.framework_version)
        profile = EfficiencyProfile(gpu=kernels, framework=framework, release_factor=factor)
        return float(
            dataclasses.replace(self.problem, profile=profile).costs(self.candidate).step_s
        )

    @functools.cached_property
    def estimate(self) -> Estimate:
        """Return the estimate by the shipped constants, with its interval."""
        return resolve_configuration(self.case.query).estimate(with_fixes=False)

    def ratio(self, framework: FrameworkEfficiency, shares: Shares | None = None) -> float:
        """Return predicted over published step time."""
        return self.step_s(framework, shares) / self.case.step_s

    def compare(
        self,
        framework: FrameworkEfficiency,
        shares: Shares | None = None,
        *,
        saw: Sequence[Prepared] | None = None,
    ) -> Comparison:
        """Return the step time predicted by these constants. Its interval is that of an estimate if
        only the runs in `saw` had been measured; None: all measured runs of the catalog.
        """
        predicted = self.step_s(framework, shares)
        if self.estimate.parallel is None or self.estimate.intervals is None:
            return self._comparison(self.case.step_s, predicted)
        case = self._case(framework, None if saw is None else index_of(tuple(saw)))
        bound = math.exp(NORMAL_QUANTILE * self._log_sd(case))
        row = self._comparison(self.case.step_s, predicted, self._with_graphs / bound, bound)
        return self._with_familiarity(row, case)

    @property
    def _with_graphs(self) -> float:
        """Return the step time with CUDA graphs relative to that without, if launches limit the
        step and the query does not set cuda_graphs; else 1.
        """
        graphs, time = self.estimate.provenance.get("with_cuda_graphs"), self.estimate.time
        return (
            float(graphs["step_s"]) / time.step_s
            if isinstance(graphs, dict) and time is not None
            else 1.0
        )

    def _case(self, framework: FrameworkEfficiency, index: Index | None) -> TrainingProblem:
        """Return the problem with the shipped scatter of the framework and the measured runs of
        `index`.
        """
        shipped = efficiency_profile(gpu=self.gpu, framework=framework.framework)
        profile = with_scatter(
            shipped if index is None else dataclasses.replace(shipped, index=index),
            model=self.problem.model,
            workload=self.problem.workload,
            gpu=self.problem.cluster.gpu,
        )
        return dataclasses.replace(self.problem, profile=profile)

    def _log_sd(self, case: TrainingProblem) -> float:
        assert self.estimate.parallel is not None
        unmeasured = unmeasured_features(
            case=self.problem, candidate=Candidates.alone(self.estimate.parallel)
        )
        return step_log_sd(case=case, unmeasured=len(unmeasured))

    def _with_familiarity(self, row: Comparison, case: TrainingProblem) -> Comparison:
        """Return the row with the dimensions in which the nearest measured runs differ."""
        if self.estimate.parallel is None:
            return row
        near = nearest_runs(case)
        kind = "mixture" if self.has_experts else "dense"
        return dataclasses.replace(
            row,
            differs=near.differs,
            kind=kind if self.problem.workload.lora is None else "adapters",
            base_log_sd=math.sqrt(self._log_sd(case) ** 2 - near.variance),
        )

    def shipped(self) -> Comparison:
        """Return the step time and interval of the estimate."""
        time, intervals = self.estimate.time, self.estimate.intervals
        if time is None or intervals is None:
            row = self._comparison(self.case.step_s, math.nan if time is None else time.step_s)
        else:
            bounds = [bound / time.step_s for bound in intervals.step_s]
            row = self._comparison(self.case.step_s, time.step_s, *bounds)
        return self._with_familiarity(row, self.problem)

    def allocated(self) -> Comparison:
        """Return the allocated GiB of the fullest rank, as estimated."""
        published, memory = self.case.allocated_bytes, self.estimate.memory
        assert memory is not None and self.estimate.intervals is not None and published is not None
        bounds = [
            bound / memory.total_bytes for bound in self.estimate.intervals.memory_total_bytes
        ]
        return self._comparison(published / GIB, memory.allocated_bytes / GIB, *bounds)

    def reserved(self) -> Comparison:
        """Return the GiB that the allocator of the fullest rank reserves, as estimated, with their
        interval.
        """
        published, memory = self.case.reserved_bytes, self.estimate.memory
        assert memory is not None and self.estimate.intervals is not None and published is not None
        stated = self.estimate.intervals.memory_reserved_bytes
        assert stated is not None
        typical = memory.reserved_bytes / memory.allocated_bytes
        bounds = [bound / memory.total_bytes / typical for bound in stated]
        return self._comparison(published / GIB, memory.reserved_bytes / GIB, *bounds)

    def _comparison(
        self,
        published: float,
        predicted: float,
        low: float | None = None,
        high: float | None = None,
    ) -> Comparison:
        """Return the comparison of two figures; `low` and `high` are fractions of the
        prediction.
        """
        reasons = self.estimate.reasons
        return dataclasses.replace(
            without_prediction(self.case),
            published=published,
            predicted=predicted,
            low=None if low is None else low * predicted,
            high=None if high is None else high * predicted,
            gpu=self.gpu.name,
            part=self.gpu.name,
            refused=reasons[0].code if reasons else None,
        )


def without_prediction(case: Case) -> Comparison:
    """Return the comparison of a case that has no prediction."""
    return Comparison(
        source=case.source,
        model=case.name,
        what=case.what,
        published=case.step_s,
        predicted=math.nan,
        gpu=case.card,
        part=case.card,
        setting=case.setting,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Constants:
    """A framework's constants, and the clocks fitted with them. Objects are equal only if they are
    identical.
    """

    framework: FrameworkEfficiency
    shares: Shares
    saw: tuple[Prepared, ...] | None = None
    """Runs to which the constants were fitted; None: all measured runs of the catalog."""

    def ratio(self, run: Prepared) -> float:
        return run.ratio(self.framework, self.shares)

    def compare(self, run: Prepared) -> Comparison:
        return run.compare(self.framework, self.shares, saw=self.saw)


def compare_all(cases: Iterable[Case], by: Callable[[Prepared], Comparison]) -> list[Comparison]:
    """Return the comparison of every case, predicted by these constants. Cases that no query can
    describe get a row without a prediction.
    """
    rows = []
    for case in cases:
        try:
            rows.append(by(Prepared.from_case(case)))
        except InputError as error:
            rows.append(dataclasses.replace(without_prediction(case), refused=error.code))
    return rows


@functools.lru_cache(maxsize=256)
def index_of(runs: tuple[Prepared, ...]) -> Index:
    """Return an index in which only these runs are measured."""
    return group_settings(
        training_setting(
            model=dataclasses.replace(run.problem.model, name=run.case.name),
            gpu=run.gpu,
            workload=run.problem.workload,
            num_gpus=run.problem.cluster.num_gpus,
        )
        for run in runs
    )


def with_fitted_release(
    framework: FrameworkEfficiency, runs: Iterable[Prepared]
) -> FrameworkEfficiency:
    """Return the constants with the newest release among the runs that they were fitted to."""
    return dataclasses.replace(framework, newest_release=newest_release(runs))


def newest_release(runs: Iterable[Prepared]) -> str | None:
    """Return the newest release of these runs; None if no release is known."""
    releases = [run.case.release for run in runs if run.case.release]
    return max(
        releases, default=None, key=lambda release: [int(part) for part in release.split(".")]
    )
