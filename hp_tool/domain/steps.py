"""Format the steps of a run for its log, and parse them from it. A run that is cut off thus keeps
its steps.
"""

import re
from collections.abc import Sequence

WARMUP_EXTENSION = 4
"""Maximum number of warm-up steps that a search's run may add to the requested ones."""
SETTLED_FRACTION = 0.1
"""Relative speedup of the next step above which a step counts as warm-up."""
RUN_PREFIX = "hp-tool run: "
"""Prefix of a log line with JSON data that are known at the start of a run."""
_STEP = re.compile(
    r"^hp-tool step (\d+) \((\d+) to (\d+) to warm up\): (\S+) s, loss (\S+),", re.MULTILINE
)


def count_warmup_steps(times_s: Sequence[float], *, least: int, most: int) -> int:
    """Return how many of the steps so far are warm-up: at least `least`, and up to `most` while
    steps still get faster.
    """
    count = least
    while count < most and count + 1 < len(times_s):
        if times_s[count + 1] >= (1.0 - SETTLED_FRACTION) * times_s[count]:
            break
        count += 1
    return count


def format_step(
    number: int, *, warmup: tuple[int, int], time_s: float, loss: float, norm: float
) -> str:
    """Return the log line of a finished step. `warmup` is the minimum and maximum number of warm-up
    steps.
    """
    min_warmup, max_warmup = warmup
    return (
        f"hp-tool step {number} ({min_warmup} to {max_warmup} to warm up): {time_s:.6g} s, loss "
        f"{loss:.6g}, gradient norm {norm:.4g}"
    )


def read_steps(log: str) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return (seconds of warm-up steps, seconds of measured steps, all losses) from a log. After a
    restart, only the last attempt counts.
    """
    steps: list[tuple[int, float, float]] = []
    least = most = 0
    for match in _STEP.finditer(log):
        number, least, most = int(match[1]), int(match[2]), int(match[3])
        steps = [*(steps if number > 1 else []), (number, float(match[4]), float(match[5]))]
    times_s = tuple(time_s for _, time_s, _ in steps)
    warmup = count_warmup_steps(times_s, least=least, most=most)
    return times_s[:warmup], times_s[warmup:], tuple(loss for *_, loss in steps)
