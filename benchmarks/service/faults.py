"""`python -m benchmarks.service.faults [--times 20] [--database sqlite|postgresql|both] [--fault NAME] [--json]`.

The long test `tests/service/test_faults.py` causes each fault once; this command causes each many times.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.service.faults.campaign import as_text, is_clean, own_campaign
from tests.service.faults.injections import FAULTS
from tests.service.faults.processes import preload


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
    rows = []
    for kind in ("sqlite", "postgresql") if arguments.database == "both" else (arguments.database,):
        for fault in arguments.fault or FAULTS:
            row = own_campaign(fault=fault, kind=kind, times=arguments.times, seed=arguments.seed)
            if row is not None:
                rows.append(row)
                sys.stderr.write(as_text(row) + "\n")
    bad = [row for row in rows if not is_clean(row)]
    if arguments.json:
        print(json.dumps({"faults": rows, "clean": not bad}))
    else:
        times, runs = (sum(row[name] for row in rows) for name in ("times", "runs"))
        print(f"{times} faults under {runs} runs: {len(bad)} of {len(rows)} campaigns are not clean")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
