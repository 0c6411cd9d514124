"""`python -m benchmarks.speed [--json]`: candidates and estimates a second on one core, growth, memory, and the command."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

import numpy as np

from benchmarks.speed import measure


def evaluate() -> dict[str, Any]:
    """Every measurement, and whether the limits hold."""
    found: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "candidates": measure.candidates_per_second(),
        "estimates": measure.estimates_per_second(),
        "growth": measure.growth(),
        "recommend": measure.recommend_process(),
    }
    limits = measure.LIMITS
    found["limits"] = {
        "candidates_per_second": found["candidates"]["per_second"] >= limits["candidates_per_second"],
        "estimates_per_second": found["estimates"]["per_second"] >= limits["estimates_per_second"],
        "recommend_process_s": found["recommend"]["wall_median_s"] < limits["recommend_process_s"],
    }
    return found


def as_text(found: dict[str, Any]) -> str:
    c, e, g, r = (found[key] for key in ("candidates", "estimates", "growth", "recommend"))
    lines = [
        f"one core of {found['machine']['cores']}, load {found['machine']['load']:.1f}, NumPy {found['versions']['numpy']}; "
        "best of several, by processor time",
        f"dense space of {c['candidates']:,} candidates, all memory and time parts:",
        f"  {c['per_second'] / 1e6:8.2f} million/s (median {c['per_second_median'] / 1e6:.2f}); "
        f"with enumeration and filter {c['per_second_with_enumeration_and_filter'] / 1e6:.2f}",
        f"  baselines: one by one {c['baseline_one_by_one_per_second']:,.0f}/s, "
        f"NumPy additions {c['baseline_numpy_additions_per_second'] / 1e6:,.0f} million/s",
        f"single estimates, {e['queries']} different queries:",
        f"  {e['per_second']:8,.0f}/s as a call (median {e['per_second_median']:,.0f})",
        f"  {e['json_lines_per_second']:8,.0f}/s from JSON line to JSON line "
        f"(median {e['json_lines_per_second_median']:,.0f}); parsing alone {e['baseline_parse_alone_per_second']:,.0f}/s",
        f"growth: time ~ candidates^{g['exponent']:.3f} from 10,000 on",
        *(
            f"  {row['candidates']:9,}: {row['cpu_s'] * 1e3:9.2f} ms, {row['microseconds_each']:6.3f} us each, "
            f"peak {row['peak_bytes'] / 2**20:6.1f} MiB"
            for row in g["rows"]
        ),
        f"hp-tool recommend, {r['space']['legal']:,} legal candidates, as a process: median {r['wall_median_s']:.2f} s "
        f"of wall time, {r['cpu_median_s']:.2f} s of processor time ({r['runs']} runs)",
        "limits: " + ", ".join(f"{name} {'holds' if holds else 'MISSED'}" for name, holds in found["limits"].items()),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    found = evaluate()
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))


if __name__ == "__main__":
    main()
