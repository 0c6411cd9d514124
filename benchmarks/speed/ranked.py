"""`python -m benchmarks.speed.ranked STEP`: rank the layouts of space number STEP of
`workloads.GROWTH`, and print time and memory as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.workloads import growing_query
from hp_tool.questions.training import recommend

REPEATS = 3
MAX_REPEATED_S = 3.0
"""Processor time after which no further repeat starts."""


def measure_ranking(step: int) -> dict[str, Any]:
    """Return the number of candidates, the best processor time of up to REPEATS rankings, and the
    peak memory of this process.
    """
    query = growing_query(step)
    recommend(query=growing_query(0))
    gc.disable()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < MAX_REPEATED_S:
        start = time.process_time()
        answer = recommend(query=query)
        times.append(time.process_time() - start)
    return {
        "candidates": answer.space.legal,
        "feasible": answer.space.feasible,
        "cpu_s": min(times),
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes; getrusage would include that of
    the parent before exec.
    """
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure_ranking(int(sys.argv[1]))))
