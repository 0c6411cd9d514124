"""Measure how much repeated profile runs differ on this machine.

`python -m benchmarks.profiler [--runs N] [--processes N] [--json]` repeats one small request. The
differences between runs are the smallest difference that a search can detect.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from hp_tool.cluster.launchers import create
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.domain.workload import TrainingWorkload

POLL_S = 0.05


def request(*, processes: int, gpu: str, steps: int, warmup_steps: int) -> ProfileRequest:
    """Return a request for a four-layer GPT with tensor and sequence parallelism, which takes
    seconds on any machine.
    """
    return ProfileRequest(
        run_id="repeatability",
        model=ModelSpec(
            name="repeatability",
            num_hidden_layers=4,
            hidden_size=256,
            num_attention_heads=8,
            vocab_size=2048,
        ),
        training=TrainingWorkload(
            sequence_length=128,
            global_batch_size=8,
            precision="fp32" if gpu == "cpu" else "bf16",
            attention="unfused",
        ),
        parallel=ParallelConfig(tensor_parallel_size=processes, sequence_parallel=processes > 1),
        num_gpus=processes,
        gpu=gpu,
        steps=steps,
        warmup_steps=warmup_steps,
        timeout_s=300.0,
    )


def run(launcher: Launcher, what: ProfileRequest, *, job_name: str) -> tuple[Measurement, float]:
    """Return (measurement, seconds from submit to fetch)."""
    start = time.monotonic()
    handle = launcher.submit(launcher.plan(what, job_name=job_name))
    while launcher.poll([handle])[handle] in (JobState.QUEUED, JobState.RUNNING):
        time.sleep(POLL_S)
    return launcher.fetch(handle), time.monotonic() - start


def evaluate(*, runs: int, processes: int, steps: int, warmup_steps: int) -> dict[str, Any]:
    """Return the median step time of every run, and how much the runs differ.

    Failed runs are reported and counted, but not repeated.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hp-profiler-benchmark-") as folder:
        launcher = create("local", root=folder)
        here = launcher.hardware()
        what = request(processes=processes, gpu=here.gpu, steps=steps, warmup_steps=warmup_steps)
        for number in range(runs):
            load = os.getloadavg()[0]
            measurement, wall_s = run(launcher, what, job_name=f"repeat-{number}")
            rows.append(
                {
                    "status": measurement.status,
                    "cause": measurement.cause,
                    "step_s": measurement.step_s,
                    "step_s_spread": measurement.step_s_spread,
                    "step_times_s": list(measurement.step_times_s),
                    "peak_memory_bytes": measurement.peak_memory_bytes,
                    "wall_s": wall_s,
                    "load": load,
                }
            )
            print(
                f"run {number + 1} of {runs}: {measurement.status}, {measurement.step_s} s a step",
                file=sys.stderr,
            )
    return {
        "hardware": here.device_name or here.gpu,
        "processes": processes,
        "steps": steps,
        "rows": rows,
        **summarize_scatter(rows),
    }


def summarize_scatter(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median step time of the successful runs and, relative to it, the interquartile
    range and the range between runs, and the median interquartile range between the steps of a run.
    """
    good = [row for row in rows if row["status"] == "ok"]
    counts: dict[str, Any] = {"ok": len(good), "failed": len(rows) - len(good)}
    if len(good) < 2:
        return counts
    steps = [row["step_s"] for row in good]
    middle = statistics.median(steps)
    low, _, high = statistics.quantiles(steps, n=4)
    return counts | {
        "step_s_median": middle,
        "between_runs_interquartile": (high - low) / middle,
        "between_runs_range": (max(steps) - min(steps)) / middle,
        "within_runs_interquartile": statistics.median(
            row["step_s_spread"] / row["step_s"] for row in good
        ),
        "wall_s_median": statistics.median(row["wall_s"] for row in good),
    }


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['ok']} runs over {report['processes']} processes on {report['hardware']}, "
        f"{report['failed']} failed"
    ]
    for row in report["rows"]:
        if row["status"] == "ok":
            lines.append(
                f"  {row['step_s'] * 1e3:8.1f} ms per step, {row['wall_s']:.1f} s in total, load "
                f"{row['load']:.1f} before"
            )
        else:
            lines.append(f"  {row['status']}: {row['cause']}")
    if "step_s_median" in report:
        lines.append(
            f"median {report['step_s_median'] * 1e3:.1f} ms; between runs: interquartile range "
            f"{report['between_runs_interquartile']:.1%}, range "
            f"{report['between_runs_range']:.1%}; "
            "between the steps of a run: interquartile range "
            f"{report['within_runs_interquartile']:.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiler", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="measured steps per run")
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    report = evaluate(
        runs=arguments.runs,
        processes=arguments.processes,
        steps=arguments.steps,
        warmup_steps=arguments.warmup_steps,
    )
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
