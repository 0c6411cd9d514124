"""The job of a fault run: a few timed steps of arithmetic, in place of a training, so that a run
takes a moment.

Started in its job's folder; standard library only. What it measures is real, and small. It keeps a
ledger that the database knows nothing of: every start, and every result as it was written. A file
laid into the folder of faults is taken by exactly one job, which then hangs or leaves half a
result.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

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


def lines_of(ledger: Path) -> list[dict[str, Any]]:
    """What a ledger tells, the oldest first."""
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def damage(*, way: str, name: str) -> None:
    """Do to the own folder, or to a file in it, what a careless job or a malicious one might."""
    here = Path.cwd()
    if name == "":
        here.rename(here.with_name(f"~{here.name}.gone"))
        if way == "link":
            here.symlink_to(here.with_name(f"~{here.name}.gone"))
        return
    (here / name).unlink(missing_ok=True)
    if way == "pipe":
        os.mkfifo(here / name)
    elif way == "link":
        (here / name).symlink_to("/nowhere")
    elif way == "folder":
        (here / name).mkdir()


def main(*, job: str, ledger: Path, faults: Path, pause_s: float) -> None:
    """Run, and leave result.json by rename."""
    begun = time.monotonic()
    append_line(ledger, {"event": "started", "job": job, "pid": os.getpid()})
    time.sleep(pause_s)
    if taken(faults / "hang"):
        time.sleep(3600)
    if taken(faults / "damage"):
        damage(**json.loads((faults / f"damage.{os.getpid()}").read_text()))
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
    Path("~result.json").write_text(text)
    Path("~result.json").rename("result.json")
    gpu_seconds = request["num_gpus"] * (time.monotonic() - begun)
    append_line(
        ledger,
        {"event": "finished", "job": job, "step_s": result["step_s"], "gpu_seconds": gpu_seconds},
    )


if __name__ == "__main__":
    main(
        job=sys.argv[1],
        ledger=Path(sys.argv[2]),
        faults=Path(sys.argv[3]),
        pause_s=float(sys.argv[4]),
    )
