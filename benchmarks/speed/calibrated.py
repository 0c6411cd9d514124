"""`python -m benchmarks.speed.calibrated [--rows 100] [--json]`: what calibrations cost those who
wait for them.

`hp-tool estimate` as a process with and without a calibration, in turns; and over HTTP a list of
measurements and the fit of their cluster by POST /v1/calibrations, the first and the next one,
beside those of a tenth of the rows. Processor time, which a busy machine does not stretch, stands
beside the wall clock.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.service.load import serving
from benchmarks.speed.workloads import query_lines, single_queries
from hp_tool.questions import schema, training

ESTIMATE_RATIO, FIT_S = 1.5, 1.0
"""What a release must reach: processor time of a calibrated estimate over that of an uncalibrated
one, and seconds of a fit.
"""
REPEATS = 7


def measured(rows: int) -> list[dict[str, Any]]:
    """Reports of so many layouts of one model, a fifth slower than predicted give or take a
    tenth.
    """
    dice = random.Random(7)
    reports = []
    for line in query_lines(single_queries(rows)):
        query = json.loads(line)
        estimate = training.estimate(query=schema.parse_query(query), with_fixes=False)
        assert estimate.time is not None
        step_s = 1.2 * dice.uniform(0.9, 1.1) * estimate.time.step_s
        reports.append(
            {"query": query, "parallel": query.pop("parallel"), "measurement": {"step_s": step_s}}
        )
    return reports


def as_processes(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One estimate with and without what these runs taught, in turns."""
    with tempfile.TemporaryDirectory(prefix="hp-calibrated-") as folder:
        environment = os.environ | {"HP_DATABASE_URL": f"sqlite:///{Path(folder) / 'hp.sqlite3'}"}
        query, lines = Path(folder) / "query.json", Path(folder) / "measured.jsonl"
        query.write_text(json.dumps(reports[0]["query"] | {"parallel": reports[0]["parallel"]}))
        lines.write_text("".join(json.dumps(report) + "\n" for report in reports))

        def run(*arguments: str) -> tuple[float, float, str]:
            command = (
                sys.executable,
                "-c",
                "from hp_tool.cli.main import main; main()",
                *arguments,
            )
            before, start = os.times(), time.perf_counter()
            done = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            wall_s, after = time.perf_counter() - start, os.times()
            cpu_s = (
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
            return cpu_s, wall_s, done.stdout

        run("calibrate", "--measurements", str(lines))
        taken: dict[str, list[tuple[float, float, str]]] = {
            "--calibration": [],
            "--no-calibration": [],
        }
        for _ in range(REPEATS):
            for option, times in taken.items():
                times.append(run("estimate", str(query), option, "--json"))
    answers = {
        option: json.loads(times[-1][2])["calibrated_estimate"] for option, times in taken.items()
    }
    assert answers["--calibration"] is not None and answers["--no-calibration"] is None
    calibrated, alone = (
        statistics.median(cpu_s for cpu_s, _, _ in times) for times in taken.values()
    )
    calibrated_wall, alone_wall = (
        statistics.median(wall_s for _, wall_s, _ in times) for times in taken.values()
    )
    return {
        "cpu_s": calibrated,
        "baseline_cpu_s": alone,
        "ratio": calibrated / alone,
        "wall_s": calibrated_wall,
        "baseline_wall_s": alone_wall,
        "wall_ratio": calibrated_wall / alone_wall,
    }


def over_http(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of the wall clock and of the server's processor time: the list, the first fit, a
    further one.
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
    reports = measured(arguments.rows)
    result: dict[str, Any] = {"load": os.getloadavg()[0], "estimate": as_processes(reports)}
    result["fits"] = [over_http(reports[: max(arguments.rows // 10, 2)]), over_http(reports)]
    result["limits"] = {
        "estimate_ratio": result["estimate"]["ratio"] <= ESTIMATE_RATIO,
        "first_fit_s": result["fits"][1]["first_fit"]["cpu_s"] < FIT_S,
        "further_fit_s": result["fits"][1]["further_fit"]["cpu_s"] < FIT_S,
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    one = result["estimate"]
    print(
        f"load {result['load']:.1f}; hp-tool estimate: {one['cpu_s']:.2f} s of processor time "
        "calibrated, "
        f"{one['baseline_cpu_s']:.2f} s without: {one['ratio']:.2f} times (wall "
        f"{one['wall_s']:.2f} and "
        f"{one['baseline_wall_s']:.2f} s: {one['wall_ratio']:.2f} times)"
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
