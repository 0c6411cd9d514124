"""Cause faults repeatedly while searches run, and check that the guarantees hold.

`python -m benchmarks.service.faults [--times 20] [--database sqlite|postgresql|both] [--engine
local|slurm|ray] [--fault NAME] [--json]`. The long test `tests/service/test_faults.py` causes each
fault once; this command causes each many times. Jobs run on this host, or on a real Slurm or Ray
cluster that the command starts, with a SQLite database.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.service.faults import false_clock
from tests.service.faults.campaign import as_text, is_clean, own_campaign
from tests.service.faults.engines import ENGINES
from tests.service.faults.injections import CLOCK, FAULTS
from tests.service.faults.processes import preload


def main() -> None:
    """Run the campaigns one after another; exit with 1 if a guarantee was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service.faults", description=__doc__
    )
    parser.add_argument(
        "--times", type=int, default=20, help="number of times that each fault happens"
    )
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="local")
    parser.add_argument(
        "--fault", action="append", choices=sorted(FAULTS), help="only this fault; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of faults")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    preload()
    rows = []
    engine = ENGINES[arguments.engine]()
    kinds = ("sqlite",) if arguments.engine != "local" else ("sqlite", "postgresql")
    try:
        for kind in kinds if arguments.database == "both" else (arguments.database,):
            for fault in arguments.fault or FAULTS:
                campaign = {
                    "fault": fault,
                    "kind": kind,
                    "times": arguments.times,
                    "seed": arguments.seed,
                }
                under_false_clock = fault != CLOCK or false_clock.FILE in os.environ
                row = (
                    own_campaign(**campaign, engine=engine)
                    if under_false_clock
                    else clock_campaign(**campaign, engine=engine.name)
                )
                if row is not None:
                    rows.append(row)
                    sys.stderr.write(as_text(row) + "\n")
    finally:
        engine.close()
    bad = [row for row in rows if not is_clean(row)]
    if arguments.json:
        print(json.dumps({"faults": rows, "clean": not bad}))
    else:
        times, runs = (sum(row[name] for row in rows) for name in ("times", "runs"))
        print(
            f"{times} faults under {runs} runs: {len(bad)} of {len(rows)} campaigns are not clean"
        )
    sys.exit(1 if bad else 0)


def clock_campaign(
    *, fault: str, kind: str, times: int, seed: int, engine: str
) -> dict[str, Any] | None:
    """Run a campaign in a process whose clock, and that of its child processes, can be set.

    Return None if this machine has no libfaketime, or on clusters, whose daemons reject messages
    from another time.
    """
    with tempfile.TemporaryDirectory(prefix="hp-clock-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL may run as another user
        environment = false_clock.environment(Path(folder) / "clock")
        if not environment or engine != "local":
            sys.stderr.write(
                f"{fault}, {kind}: skipped, "
                f"{'no libfaketime' if not environment else f'not on {engine}'}\n"
            )
            return None
        command = [
            sys.executable,
            "-m",
            "benchmarks.service.faults",
            "--json",
            "--fault",
            fault,
            "--database",
            kind,
        ]
        command += ["--times", str(times), "--seed", str(seed)]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
    row: dict[str, Any] = json.loads(done.stdout)["faults"][0]
    return row


if __name__ == "__main__":
    main()
