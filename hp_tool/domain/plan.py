"""The bill of a search before anything runs."""

from dataclasses import dataclass, field

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run to come, and what it would ask of the site."""

    chosen_by: str
    """Why it would be run; `confirmation`: the whole of a configuration that was only seen
    reduced.
    """
    parallel: ParallelConfig
    fidelity: Fidelity
    """What is left out of it."""
    num_gpus: int
    num_nodes: int
    step_s: float
    """Predicted, of what is run."""
    configurations: int
    """How many the run's job trains, one after another: itself and those that the search would run
    after it.
    """
    wall_s: float
    """Start-up and all steps of its job, as predicted; waiting for devices is not in it."""
    wall_s_interval: tuple[float, float] | None = None
    """By how long a start-up may take; None once runs on this cluster have shown that."""
    time_limit_s: float
    """After which it is cut off."""
    cut_off: bool = False
    """`search.run_timeout_s` is below what the run is expected to need."""
    hold_probability: float
    """That it fits, works and does not stall."""

    @property
    def gpu_seconds(self) -> float:
        return self.num_gpus * self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The bill of a search at its whole budget; one that ends early costs less."""

    launcher: str
    first: PlannedRun
    confirmation: PlannedRun | None
    """The whole run that would prove a leader that was only seen reduced; None where runs are
    whole, or nothing pays for it.
    """
    runs: int
    """Runs at most, the confirmation included."""
    stopped_by: str
    """The budget that ends the search: budget_runs, budget_gpu_seconds or space_exhausted."""
    wall_s: float
    """Of all runs, as predicted, without waiting for devices."""
    wall_s_interval: tuple[float, float] | None = None
    """By how long start-ups may take; None once runs on this cluster have shown that. So are the
    two others.
    """
    gpu_seconds: float
    gpu_seconds_interval: tuple[float, float] | None = None
    gpu_hours: float
    cost: float | None
    """US dollars, where the price of a GPU-hour is known."""
    cost_interval: tuple[float, float] | None = None
    most_gpu_seconds: float
    """Where every run takes all of its time limit; never below what is expected."""
    most_cost: float | None
    set: ChosenValues = field(default_factory=dict)
    """Values of the query that all runs would have beside their layouts, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer to a plan's request."""

    id: str | None
    plan: SearchPlan
    job: str | None = None
    """The first run as its launcher hands it over; only where the search would run."""
    status: str = field(default="ok")
