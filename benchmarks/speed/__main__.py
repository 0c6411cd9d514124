"""`python -m benchmarks.speed [--json]`: measure how fast training layouts are costed and ranked.

The report has candidates and estimates per second on one core, the growth of time and memory with
the number of candidates, and the time of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import Any

import numpy as np

from benchmarks.speed import measure
from benchmarks.speed.workloads import dense_query, mixed_query, moe_query, unlike_query


def evaluate() -> dict[str, Any]:
    """Return all measurements, and whether each limit is met."""
    report: dict[str, Any] = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "dense": measure.candidates_per_second(dense_query()),
        "moe": measure.candidates_per_second(moe_query()),
        "mixed": measure.candidates_per_second(mixed_query()),
        "unlike": measure.candidates_per_second(unlike_query()),
        "alike": measure.candidates_per_second(unlike_query(alike=True)),
        "estimates": measure.estimates_per_second(),
        "growth": measure.measure_growth(),
        "recommend": measure.time_recommend(),
    }
    limits = measure.LIMITS
    million, ten_million = report["growth"]["rows"][-2:]
    report["limits"] = {
        "dense_candidates_per_second": report["dense"]["per_second"]
        >= limits["candidates_per_second"],
        "moe_candidates_per_second": report["moe"]["per_second"] >= limits["candidates_per_second"],
        "unlike_over_alike": report["unlike"]["per_second"]
        >= limits["unlike_over_alike"] * report["alike"]["per_second"],
        "estimates_per_second": report["estimates"]["per_second"] >= limits["estimates_per_second"],
        "million_ranked_s": million["cpu_s"] / million["candidates"] * 1e6
        < limits["million_ranked_s"],
        "ten_million_ranked_s": ten_million["cpu_s"] / ten_million["candidates"] * 1e7
        < limits["ten_million_ranked_s"],
        "ten_million_peak_bytes": ten_million["peak_bytes"] < limits["ten_million_peak_bytes"],
        "recommend_call_s": report["recommend"]["call_s"] < limits["recommend_call_s"],
        "recommend_process_s": report["recommend"]["cpu_best_s"] < limits["recommend_process_s"],
    }
    return report


def format_report(report: dict[str, Any]) -> str:
    e, g, r = (report[key] for key in ("estimates", "growth", "recommend"))
    lines = [
        f"one core of {report['machine']['cores']}, load {report['machine']['load']:.1f}, NumPy "
        f"{report['versions']['numpy']}; "
        "best processor time of several calls",
        "legal candidates, each with all parts of memory and time:",
        *(
            f"  {kind['model']}, {kind['candidates']:,}: {kind['per_second'] / 1e6:.2f} million/s "
            f"(median {kind['per_second_median'] / 1e6:.2f}); one by one "
            f"{kind['baseline_one_by_one_per_second']:,.0f}/s, "
            f"NumPy additions {kind['baseline_numpy_additions_per_second'] / 1e6:,.0f} million/s"
            for kind in (
                report["dense"],
                report["moe"],
                report["mixed"],
                report["unlike"],
                report["alike"],
            )
        ),
        f"single estimates of {e['queries']} different queries:",
        f"  {e['per_second']:8,.0f}/s as a library call (median {e['per_second_median']:,.0f})",
        f"  {e['json_lines_per_second']:8,.0f}/s from JSON line to JSON line "
        f"(median {e['json_lines_per_second_median']:,.0f}); parsing alone "
        f"{e['baseline_parse_alone_per_second']:,.0f}/s",
        f"recommend as a library call: time ~ candidates^{g['exponent']:.3f} above 10,000 "
        "candidates",
        *(
            f"  {row['candidates']:10,} candidates: {row['cpu_s'] * 1e3:9.2f} ms, "
            f"{1e6 * row['cpu_s'] / row['candidates']:6.3f} us each, peak memory "
            f"{row['peak_bytes'] / 2**20:4.0f} MiB"
            for row in g["rows"]
        ),
        f"recommend 405B on 2,048 GPUs, {r['space']['legal'] + r['space']['pruned']:,} candidates: "
        f"{r['call_s']:.2f} s as a library "
        f"call; as a command {r['cpu_best_s']:.2f} s of processor time (median "
        f"{r['cpu_median_s']:.2f}), "
        f"{r['wall_median_s']:.2f} s of wall time ({r['runs']} runs)",
        "limits: "
        + ", ".join(
            f"{name} {'holds' if holds else 'MISSED'}" for name, holds in report["limits"].items()
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    report = evaluate()
    print(json.dumps(report, indent=2) if arguments.json else format_report(report))


if __name__ == "__main__":
    main()
