"""What a recommendation depends on: the number of devices, the axes, and the hardware."""

from dataclasses import dataclass

from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """Rank 1 on a number of devices."""

    num_gpus: int
    step_s: float
    tokens_per_second_per_gpu: float
    gpu_seconds_per_step: float
    """What the cost is proportional to."""
    days: float | None
    """As in an estimate: None without training.total_tokens."""
    cost: float | None
    parallel: ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The step of rank 1 after one change."""

    change: str
    step_s: float | None
    """None where nothing fits any more."""
    change_fraction: float | None
    """0.1: steps take 10% longer than those of rank 1 without the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Answers to what if, each by a ranking of its own."""

    start: ScalingPoint | None
    """Rank 1 of the recommendation, from which changes are counted; None if nothing is
    acceptable.
    """
    scaling: tuple[ScalingPoint, ...]
    """Fewest devices first; counts on which nothing fits are left out."""
    fewest_gpus_near_cheapest: int | None
    """The fewest devices whose cost is at most 5% above the lowest."""
    fastest_gpus_near_cheapest: int | None
    """The most devices of that cost: the fastest training for the money."""
    axes: tuple[Influence, ...]
    """Without each way of dividing the work or saving memory, the most important first."""
    hardware: tuple[Influence, ...]
    """With a faster network, faster links in a node, more memory."""
