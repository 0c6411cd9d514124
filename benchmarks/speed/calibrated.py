"""`python -m benchmarks.speed.calibrated [--rows 100] [--json]`: measure the time that calibrations
add.

`hp-tool estimate` runs alternately with and without a calibration. A server stores a list of
measurements and fits them twice by POST /v1/calibrations, the second time with one more
measurement; another server does the same with a tenth of the rows. The report has processor time,
which a busy machine does not lengthen, and wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.service.load import serving
from benchmarks.speed.measure import HP_TOOL, TimedCommand, time_command
from benchmarks.speed.workloads import query_lines, single_queries
from hp_tool.questions import schema, training

MAX_ESTIMATE_RATIO, MAX_FIT_S = 1.5, 1.0
"""Limits that a release must meet: processor time of a calibrated estimate divided by that of an
uncalibrated one, and seconds of a fit.
"""
REPEATS = 7


def synthetic_reports(rows: int) -> list[dict[str, Any]]:
    """Return measurements of different layouts of one model, 8% to 32% slower than predicted."""
    rng = random.Random(7)
    reports = []
    for line in query_lines(single_queries(rows)):
        query = json.loads(line)
        estimate = training.estimate(query=schema.parse_query(query), with_fixes=False)
        assert estimate.time is not None
        step_s = 1.2 * rng.uniform(0.9, 1.1) * estimate.time.step_s
        reports.append(
            {"query": query, "parallel": query.pop("parallel"), "measurement": {"step_s": step_s}}
        )
    return reports


def time_estimates(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of `hp-tool estimate` with a calibration by these measurements, and
    without.
    """
    with tempfile.TemporaryDirectory(prefix="hp-calibrated-") as folder:
        environment = os.environ | {"HP_DATABASE_URL": f"sqlite:///{Path(folder) / 'hp.sqlite3'}"}
        query, lines = Path(folder) / "query.json", Path(folder) / "measured.jsonl"
        query.write_text(json.dumps(reports[0]["query"] | {"parallel": reports[0]["parallel"]}))
        lines.write_text("".join(json.dumps(report) + "\n" for report in reports))
        time_command((*HP_TOOL, "calibrate", "--measurements", str(lines)), env=environment)
        runs: dict[str, list[TimedCommand]] = {"--calibration": [], "--no-calibration": []}
        for _ in range(REPEATS):
            for option, timed in runs.items():
                command = (*HP_TOOL, "estimate", str(query), option, "--json")
                timed.append(time_command(command, env=environment))
    answers = {
        option: json.loads(timed[-1].stdout)["calibrated_estimate"]
        for option, timed in runs.items()
    }
    assert answers["--calibration"] is not None and answers["--no-calibration"] is None
    cpu_s, baseline_cpu_s = (
        statistics.median(run.cpu_s for run in timed) for timed in runs.values()
    )
    wall_s, baseline_wall_s = (
        statistics.median(run.wall_s for run in timed) for timed in runs.values()
    )
    return {
        "cpu_s": cpu_s,
        "baseline_cpu_s": baseline_cpu_s,
        "ratio": cpu_s / baseline_cpu_s,
        "wall_s": wall_s,
        "baseline_wall_s": baseline_wall_s,
        "wall_ratio": wall_s / baseline_wall_s,
    }


def time_server(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the wall time and the server's processor time of storing the measurements, of the
    first fit, and of a further fit.
    """
    with (
        serving() as (port, pid),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http,
    ):
        server = psutil.Process(pid)

        def post(path: str, body: Any = None) -> tuple[dict[str, float], Any]:
            before, start = server.cpu_times(), time.perf_counter()
            answer = http.post(path, json=body)
            wall_s, after = time.perf_counter() - start, server.cpu_times()
            assert answer.status_code == 201, answer.text
            cpu_s = after.user + after.system - before.user - before.system
            return {"wall_s": wall_s, "cpu_s": cpu_s}, answer.json()

        stored, answer = post("/v1/measurements", reports[:-1])
        assert not answer["refused"]
        first, answer = post("/v1/calibrations")
        assert answer["items"][0]["num_measurements"] == len(reports) - 1
        assert post("/v1/measurements", reports[-1])[1]["state"] == "accepted"
        further, answer = post("/v1/calibrations")
        assert answer["items"][0]["num_measurements"] == len(reports)
    return {"rows": len(reports), "stored": stored, "first_fit": first, "further_fit": further}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.calibrated", description=__doc__
    )
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    reports = synthetic_reports(arguments.rows)
    result: dict[str, Any] = {"load": os.getloadavg()[0], "estimate": time_estimates(reports)}
    result["fits"] = [
        time_server(reports[: max(arguments.rows // 10, 2)]),
        time_server(reports),
    ]
    result["limits"] = {
        "estimate_ratio": result["estimate"]["ratio"] <= MAX_ESTIMATE_RATIO,
        "first_fit_s": result["fits"][1]["first_fit"]["cpu_s"] < MAX_FIT_S,
        "further_fit_s": result["fits"][1]["further_fit"]["cpu_s"] < MAX_FIT_S,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    one = result["estimate"]
    print(
        f"load {result['load']:.1f}; hp-tool estimate: {one['cpu_s']:.2f} s of processor time "
        f"with a calibration, {one['baseline_cpu_s']:.2f} s without ({one['ratio']:.2f}x); wall "
        f"time {one['wall_s']:.2f} s and {one['baseline_wall_s']:.2f} s ({one['wall_ratio']:.2f}x)"
    )
    for fit in result["fits"]:
        parts = (
            f"{name} {fit[name]['cpu_s']:.2f} s ({fit[name]['wall_s']:.2f} s wall)"
            for name in list(fit)[1:]
        )
        print(f"{fit['rows']} rows over HTTP, processor time: {', '.join(parts)}".replace("_", " "))
    print(
        "limits: "
        + ", ".join(
            f"{name} {'holds' if holds else 'MISSED'}" for name, holds in result["limits"].items()
        )
    )


if __name__ == "__main__":
    main()
