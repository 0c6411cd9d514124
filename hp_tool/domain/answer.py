"""The answer of a search in figures: what to run, what is known of it, and what it saves."""

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The runs of one configuration that tell its step time: whole ones that worked, or the reduced one that counts."""

    run_id: str
    """The run that counts."""
    step_s: float
    """Its step time. A repeat takes twice the steps, and was not picked for having been fast, so it counts for both."""
    num_runs: int
    low_s: float
    """The fastest of them."""
    high_s: float
    reduced: bool
    """Implied by a reduced run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the answer is compared with."""

    parallel: ParallelConfig
    source: Literal["search.baseline", "first run"]
    step_s: float
    """As the answer's: calibrated where there are measurements."""
    speedup: float
    """Its step time by the answer's."""
    saved_days: float | None = None
    """Of the whole training; None without total_tokens."""
    saved_cost: float | None = None
    """US dollars; None without total_tokens or a price."""
    saved_parts_s: dict[str, float]
    """Seconds of a step that the answer saves (below 0: spends besides), by part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search recommends. Every page, command and client states these figures."""

    parallel: ParallelConfig
    step_s: float
    step_s_interval: tuple[float, float] | None
    """90 %"""
    source: Literal["calibrated", "predicted"]
    """calibrated: corrected by all measured runs, its own among them. predicted: nothing was measured."""
    known_from_runs: int
    """Runs of the search that succeeded."""
    measured: Repeats | None
    """Its own runs; None if it never ran."""
    outside: bool
    """Its measured step time lies outside the interval."""
    as_good: int
    """Other configurations whose step time cannot be told apart from this one's."""
    free_memory_bytes: float
    """Of the device on its fullest rank."""
    out_of_memory_probability: float
    baseline: Baseline | None
