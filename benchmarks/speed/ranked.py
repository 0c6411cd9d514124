"""`python -m benchmarks.speed.ranked STEP`: rank one of the growing spaces, and say what it took as
one line of JSON.
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
ENOUGH_S = 3.0
"""No further repeat once this much processor time is spent."""


def ranked(step: int) -> dict[str, Any]:
    """Best processor time of a few calls, the peak of the process, and how many candidates were
    costed.
    """
    query = growing_query(step)
    recommend(query=growing_query(0))
    gc.disable()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < ENOUGH_S:
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
    """Return the peak of resident memory since this program was started: rusage's figure would
    begin with its parent's.
    """
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(ranked(int(sys.argv[1]))))
