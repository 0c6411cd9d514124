"""The job of a fault run: a few timed steps of arithmetic, in place of a training, so that a run takes a moment.

Started in its job's folder; standard library only. What it measures is real, and small. It keeps a ledger that the
database knows nothing of: every start, and every result as it was written. A file laid into the folder of faults is
taken by exactly one job, which then hangs or leaves half a result.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

STEPS = 5
ADDITIONS = 100_000


def step_seconds() -> float:
    """One step: a fixed amount of work."""
    begun = time.perf_counter()
    sum(range(ADDITIONS))
    return time.perf_counter() - begun


def append_line(ledger: Path, line: dict[str, object]) -> None:
    """One line in one write, which concurrent jobs cannot tear apart."""
    with ledger.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def taken(fault: Path) -> bool:
    """Whether this job is the one that the fault hits."""
    try:
        fault.rename(fault.with_name(f"{fault.name}.{os.getpid()}"))
    except FileNotFoundError:
        return False
    return True


def main(*, ledger: Path, faults: Path, pause_s: float) -> None:
    """Run, and leave result.json by rename."""
    job = Path.cwd().name
    append_line(ledger, {"event": "started", "job": job, "pid": os.getpid()})
    time.sleep(pause_s)
    if taken(faults / "hang"):
        time.sleep(3600)
    times = [step_seconds() for _ in range(STEPS)]
    request = json.loads(Path("request.json").read_text())
    result = {
        "status": "ok",
        "step_s": statistics.median(times),
        "step_times_s": times,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "peak_memory_source": "resident_set_growth",
        "fidelity": request["fidelity"],
        "hardware": {"gpu": request["gpu"], "num_gpus": request["num_gpus"]},
    }
    text = json.dumps(result)
    if taken(faults / "truncate"):
        Path("result.json").write_text(text[: len(text) // 2])
        append_line(ledger, {"event": "truncated", "job": job})
        return
    # Told first: whoever dies in between left no result, and the line says only what would have been.
    append_line(ledger, {"event": "finished", "job": job, "step_s": result["step_s"]})
    Path("~result.json").write_text(text)
    Path("~result.json").rename("result.json")


if __name__ == "__main__":
    main(ledger=Path(sys.argv[1]), faults=Path(sys.argv[2]), pause_s=float(sys.argv[3]))
