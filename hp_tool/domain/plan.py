"""Expected cost of a search before anything runs."""

from dataclasses import dataclass, field
from typing import Any

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A planned run, and what it would request from the cluster."""

    chosen_by: str
    """Why it would run; `confirmation`: a complete run of a configuration that only ran reduced."""
    parallel: ParallelConfig
    fidelity: Fidelity
    """What the run leaves out."""
    num_gpus: int
    num_nodes: int
    step_s: float
    """Predicted step time of the run in seconds."""
    configurations: int
    """Number of configurations that the run's job trains in sequence: its own and those that the
    search would run next.
    """
    wall_s: float
    """Predicted seconds of the job: start-up and all steps, without waiting for devices."""
    wall_s_interval: tuple[float, float] | None = None
    """Range of `wall_s` due to the start-up time; None if runs on this cluster have measured it."""
    time_limit_s: float
    """Seconds after which the run is cut off."""
    cut_off: bool = False
    """Whether the run is expected to exceed `search.run_timeout_s`."""
    hold_probability: float
    """Probability that the run fits, works and does not stall."""

    @property
    def gpu_seconds(self) -> float:
        return self.num_gpus * self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """Expected cost of a search that uses its whole budget; one that ends early costs less."""

    launcher: str
    first: PlannedRun
    confirmation: PlannedRun | None
    """The complete run of the best configuration, if its other runs are reduced; None if runs are
    complete or the budget is too small.
    """
    runs: int
    """Maximum number of runs, including the confirmation."""
    stopped_by: str
    """The budget that ends the search: budget_runs, budget_gpu_seconds or space_exhausted."""
    wall_s: float
    """Predicted seconds of all runs, without waiting for devices."""
    wall_s_interval: tuple[float, float] | None = None
    """Range of `wall_s` due to start-up times; None if runs on this cluster have measured them. The
    two following ranges are the same.
    """
    gpu_seconds: float
    gpu_seconds_interval: tuple[float, float] | None = None
    gpu_hours: float
    cost: float | None
    """US dollars; None if the price of a GPU-hour is unknown."""
    cost_interval: tuple[float, float] | None = None
    most_gpu_seconds: float
    """GPU-seconds if every run takes all of its time limit; never below the expected ones."""
    most_cost: float | None
    set: ChosenValues = field(default_factory=dict)
    """Query values besides the layout that all runs would share, by path."""
    unrun: dict[str, Any] | None = None
    """Usual settings that `recommend` assumes for the first run's layout and runs do not have, as
    in `provenance.unrun` of its estimate; None if there are none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """Answer to a request for a plan."""

    id: str | None
    plan: SearchPlan
    job: str | None = None
    """The first run as its launcher would submit it; only if this process would run the search."""
    status: str = field(default="ok")
