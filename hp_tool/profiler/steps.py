"""What every rank knows after training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Steps:
    """Of all steps, warm-up included."""

    times_s: tuple[float, ...]
    """The slowest rank's seconds, step by step."""
    losses: tuple[float, ...]
    """Mean over the global batch."""
    stopped: str | None
    """Why there are fewer steps than asked for."""
    breakdown_s: dict[str, float] | None
    """Where one further step's seconds went, where that was asked for."""
