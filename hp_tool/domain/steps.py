"""The steps of a run as they end: which of them count, and how they are written down. A run that is
cut off keeps them.
"""

import re
from collections.abc import Sequence

WARMUP_EXTENSION = 4
"""Steps that the warm-up of a search's runs may take beyond those asked for."""
SETTLED_FRACTION = 0.1
"""A step that the next one beats by more than this share was still warming up."""
RUN_PREFIX = "hp-tool run: "
"""Before what is known of a run at its start, as JSON."""
_STEP = re.compile(
    r"^hp-tool step (\d+) \((\d+) to (\d+) to warm up\): (\S+) s, loss (\S+),", re.MULTILINE
)


def count_warmup_steps(times_s: Sequence[float], *, least: int, most: int) -> int:
    """How many of the steps so far are warm-up: `least`, and up to `most` while steps still become
    faster.
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
    """A finished step, for the log. `warmup`: how many steps warm up at least and at most."""
    least, most = warmup
    return (
        f"hp-tool step {number} ({least} to {most} to warm up): {time_s:.6g} s, loss "
        f"{loss:.6g}, gradient norm {norm:.4g}"
    )


def read_steps(log: str) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """(seconds of warm-up steps, of measured ones, losses of all) in a log; of a run that was
    started again, the last.
    """
    steps: list[tuple[int, float, float]] = []
    least = most = 0
    for match in _STEP.finditer(log):
        number, least, most = int(match[1]), int(match[2]), int(match[3])
        steps = [*(steps if number > 1 else []), (number, float(match[4]), float(match[5]))]
    times_s = tuple(time_s for _, time_s, _ in steps)
    warmup = count_warmup_steps(times_s, least=least, most=most)
    return times_s[:warmup], times_s[warmup:], tuple(loss for *_, loss in steps)
