"""Time repeated calls by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP = 2
MOST = 50


def median_ms(call: Callable[[], object], *, budget_s: float = 0.3) -> float:
    """Return the median milliseconds of `call` on the current stream. It is repeated 3 to 50 times,
    within `budget_s`.
    """
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = min(MOST, max(3, int(budget_s / max(time.perf_counter() - start, 1e-6))))
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for first, last in marks:
        first.record()
        call()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks)
