"""Expected cost of a search, before its first run."""

from dataclasses import dataclass, field
from typing import Any

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A planned run, and what it would request from the cluster."""

    chosen_by: str
    """Reason for the run; `confirmation`: a complete run of a configuration that only ran
    reduced.
    """
    parallel: ParallelConfig
    fidelity: Fidelity
    """Reductions of the run."""
    num_gpus: int
    num_nodes: int
    step_s: float
    """Predicted step time of the run in seconds."""
    configurations: int
    """Number of configurations that the job trains in sequence: that of the run and those that the
    search would run next.
    """
    wall_s: float
    """Predicted duration of the job in seconds: start-up and all steps, without queueing."""
    wall_s_interval: tuple[float, float] | None = None
    """Range of `wall_s` due to the start-up time; None if the start-up time was measured on this
    cluster.
    """
    time_limit_s: float
    """Time limit of the run in seconds."""
    cut_off: bool = False
    """Whether the run is expected to exceed `search.run_timeout_s`."""
    hold_probability: float
    """Probability that the run fits in memory, succeeds and does not stall."""

    @property
    def gpu_seconds(self) -> float:
        return self.num_gpus * self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """Expected cost of a search that uses its whole budget. A search that stops early costs
    less.
    """

    launcher: str
    first: PlannedRun
    confirmation: PlannedRun | None
    """The complete run of the best configuration after reduced runs; None if all runs are complete
    or the budget is too small.
    """
    runs: int
    """Maximum number of runs, including the confirmation."""
    stopped_by: str
    """The budget that ends the search: budget_runs, budget_gpu_seconds or space_exhausted."""
    wall_s: float
    """Predicted duration of all runs in seconds, without queueing."""
    wall_s_interval: tuple[float, float] | None = None
    """Range of `wall_s` due to start-up times; None if start-up times were measured on this
    cluster. The two following ranges have the same cause.
    """
    gpu_seconds: float
    gpu_seconds_interval: tuple[float, float] | None = None
    gpu_hours: float
    cost: float | None
    """US dollars; None if the price of a GPU-hour is unknown."""
    cost_interval: tuple[float, float] | None = None
    most_gpu_seconds: float
    """GPU-seconds if every run reaches its time limit; never below the expected GPU-seconds."""
    most_cost: float | None
    set: ChosenValues = field(default_factory=dict)
    """Query values other than the layout that all runs have in common, by path."""
    unrun: dict[str, Any] | None = None
    """Usual settings that `recommend` assumes for the first run's layout but that profile runs do
    not use, as in `provenance.unrun` of its estimate; None if there are none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """Answer to a request for a plan."""

    id: str | None
    plan: SearchPlan
    job: str | None = None
    """The first run as its launcher would submit it; set only if this process would run the
    search.
    """
    status: str = field(default="ok")
