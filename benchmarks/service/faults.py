"""`python -m benchmarks.service.faults [--times 20] [--database sqlite|postgresql|both] [--fault NAME] [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.service.campaign import COUNTS, campaign
from benchmarks.service.databases import Database, Postgres, Sqlite
from benchmarks.service.injections import FAULTS
from benchmarks.service.processes import preload

ONLY_POSTGRESQL = frozenset({"PostgreSQL restarted"})


def one(*, fault: str, kind: str, times: int, seed: int) -> dict[str, Any] | None:
    """A campaign on a database of its own; None where this fault cannot befall it, or not on this machine."""
    if kind == "sqlite" and fault in ONLY_POSTGRESQL:
        return None
    with tempfile.TemporaryDirectory(prefix="hp-faults-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        database: Database = Sqlite(home) if kind == "sqlite" else Postgres()
        try:
            if isinstance(database, Postgres) and fault == "database full" and not database.move_to_small_disk():
                sys.stderr.write("database full, postgresql: left out, this user may not mount a small disk\n")
                return None
            return campaign(faults=[fault] * times, database=database, home=home, seed=seed)
        finally:
            database.close()


def main() -> None:
    """Run the campaigns, one after another; exit 1 where something was lost, doubled, orphaned or unbooked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.faults", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="how often each fault happens")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    preload()
    kinds = ("sqlite", "postgresql") if arguments.database == "both" else (arguments.database,)
    rows = []
    for kind in kinds:
        for fault in arguments.fault or FAULTS:
            row = one(fault=fault, kind=kind, times=arguments.times, seed=arguments.seed)
            if row is not None:
                rows.append(row)
                sys.stderr.write(as_text(row) + "\n")
    bad = [row for row in rows if not is_clean(row)]
    if arguments.json:
        print(json.dumps({"faults": rows, "clean": not bad}))
    else:
        times = sum(row["times"] for row in rows)
        runs = sum(row["runs"] for row in rows)
        print(f"{times} faults under {runs} runs: {len(bad)} of {len(rows)} campaigns are not clean")
    sys.exit(1 if bad else 0)


def is_clean(row: dict[str, Any]) -> bool:
    """Nothing lost, doubled, orphaned or unbooked, and no search left without an end."""
    return bool(row["drained"]) and not any(row[name] for name in COUNTS)


def as_text(row: dict[str, Any]) -> str:
    """One campaign on one line, and what it found below."""
    counts = ", ".join(f"{name} {row[name]}" for name in COUNTS)
    end = "" if row["drained"] else "; NOT DRAINED"
    line = (
        f"{row['fault']}, {row['database']}: {row['times']} times under {row['searches']} searches, {row['runs']} runs: "
        f"{counts}{end} ({row['wall_s']} s)"
    )
    return "\n".join([line, *(f"  {kind}: {what}" for kind, whats in row["details"].items() for what in whats)])


if __name__ == "__main__":
    main()
