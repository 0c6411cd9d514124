"""How a recommendation depends on the number of devices, the axes and the hardware."""

from dataclasses import dataclass

from hp_tool.domain.parallel import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """Rank 1 on a given number of devices."""

    num_gpus: int
    step_s: float
    tokens_per_second_per_gpu: float
    gpu_seconds_per_step: float
    """GPU-seconds per step, to which the cost is proportional."""
    days: float | None
    """As in an estimate: None without training.total_tokens."""
    cost: float | None
    parallel: ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """Step time of rank 1 after one change."""

    change: str
    step_s: float | None
    """Step time in seconds; None if nothing fits."""
    change_fraction: float | None
    """Relative change of the step time, such as 0.1 for 10% longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Answers to what-if questions, each from a separate ranking."""

    start: ScalingPoint | None
    """Rank 1 of the recommendation, with which changes are compared; None if nothing is
    acceptable.
    """
    scaling: tuple[ScalingPoint, ...]
    """Rank 1 for each number of devices, ascending. Numbers on which nothing fits are omitted."""
    fewest_gpus_near_cheapest: int | None
    """Smallest number of devices whose cost is at most 5% above the lowest cost."""
    fastest_gpus_near_cheapest: int | None
    """Largest number of devices whose cost is at most 5% above the lowest cost. It gives the
    fastest training at about that cost.
    """
    axes: tuple[Influence, ...]
    """Step time without each axis that splits the work or saves memory, largest effect first."""
    hardware: tuple[Influence, ...]
    """Step time with a faster network, with faster links within a node, and with more memory."""
