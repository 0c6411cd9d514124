"""Measure how much micro-benchmarks improve predictions on this machine's cores.

`python -m benchmarks.profiler.microbenchmarks [--json]` times single operations on two processes
and fits the machine's constants to them. Then it runs eight training configurations, which the fit
does not use, and compares them with the predictions of the catalogue's `cpu` profile and of the
fitted one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cluster.launchers import create
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.measurement import ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.learning.machine import applied, benchmark_machine, predicted_step_s, run_job

GPT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 4096,
}
LLAMA: dict[str, Any] = {
    **GPT,
    "num_key_value_heads": 4,
    "intermediate_size": 704,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": False,
}
TP2, PP2, DP2 = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "data"))
CASES: tuple[tuple[str, dict[str, Any], int, int, dict[str, Any]], ...] = (
    ("GPT, one process", GPT, 128, 8, {}),
    ("GPT, TP 2 with SP", GPT, 128, 8, {**TP2, "sequence_parallel": True}),
    ("GPT, PP 2", GPT, 256, 4, PP2),
    ("GPT, DP 2, micro-batch 4", GPT, 128, 8, {**DP2, "micro_batch_size": 4}),
    ("GPT, wide, TP 2", {**GPT, "hidden_size": 512}, 128, 4, TP2),
    ("Llama, TP 2 with SP", LLAMA, 256, 4, {**TP2, "sequence_parallel": True}),
    ("Llama, DP 2, full recomputation", LLAMA, 128, 8, {**DP2, "recompute": "full"}),
    ("Llama, wide, PP 2", {**LLAMA, "hidden_size": 512, "intermediate_size": 1408}, 128, 4, PP2),
)
"""Cases as (name, model, sequence_length, global_batch_size, parallel)."""


def request(
    name: str, model: dict[str, Any], sequence: int, batch: int, parallel: dict[str, Any]
) -> ProfileRequest:
    config = ParallelConfig(**parallel)
    return ProfileRequest(
        run_id="held-out",
        model=ModelSpec(name=name, **model),
        training=TrainingWorkload(
            sequence_length=sequence, global_batch_size=batch, precision="fp32"
        ),
        parallel=config,
        num_gpus=config.tensor_parallel_size
        * config.pipeline_parallel_size
        * config.data_parallel_size,
        gpu="cpu",
        steps=6,
        warmup_steps=2,
        timeout_s=300.0,
    )


def processes(count: int) -> ClusterSpec:
    """Return the CPU of this host with this number of processes."""
    return catalogue_cluster(ClusterQuery(gpu="cpu", num_gpus=count))


def evaluate() -> dict[str, Any]:
    """Fit the constants, then run the cases. A configuration that fails is counted and named."""
    with tempfile.TemporaryDirectory(prefix="hp-microbenchmarks-") as folder:
        launcher = create("local", root=folder, cpu_only=True)
        report, measured = benchmark_machine(
            cluster=processes(2), launcher=launcher, precisions=("fp32",)
        )
        print(f"{len(measured.operations)} operations in {report.wall_s:.0f} s", file=sys.stderr)
        stock = efficiency_profile(gpu=processes(1).gpu, framework="megatron-core")
        rows = []
        for case in CASES:
            job = request(*case)
            measurement = run_job(launcher, job)
            row: dict[str, Any] = {
                "name": case[0],
                "status": measurement.status,
                "cause": measurement.cause,
                "load": os.getloadavg()[0],
            }
            if measurement.step_s is not None:
                machine = processes(job.num_gpus)
                fitted = applied(report.profile, to=stock)
                before = predicted_step_s(job, cluster=machine, profile=stock)
                after = predicted_step_s(job, cluster=machine, profile=fitted)
                row |= {"measured_s": measurement.step_s, "before_s": before, "after_s": after}
                row |= {
                    "error_before": before / measurement.step_s - 1,
                    "error_after": after / measurement.step_s - 1,
                }
            rows.append(row)
            print(f"{case[0]}: {measurement.status}, {measurement.step_s} s", file=sys.stderr)
    good = [row for row in rows if "measured_s" in row]
    return {
        "operations": len(measured.operations),
        "wall_s": report.wall_s,
        "fit_errors": {
            what: {"operations": n, "median_error": error}
            for what, (n, error) in report.errors.items()
        },
        "rows": rows,
        "median_error_before": statistics.median(abs(row["error_before"]) for row in good)
        if good
        else None,
        "median_error_after": statistics.median(abs(row["error_after"]) for row in good)
        if good
        else None,
    }


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['operations']} operations timed in {report['wall_s']:.0f} s; then, none of them "
        "fitted on:"
    ]
    for row in report["rows"]:
        if "measured_s" not in row:
            lines.append(f"  {row['name']:34} {row['status']}: {row['cause']}")
            continue
        before, after = (
            f"{row['before_s'] * 1e3:.0f} ({row['error_before']:+.0%})",
            f"{row['after_s'] * 1e3:.0f}",
        )
        lines.append(
            f"  {row['name']:34} {row['measured_s'] * 1e3:7.0f} ms; predicted {before} before, "
            f"{after} ({row['error_after']:+.0%}) after; load {row['load']:.1f}"
        )
    before, after = report["median_error_before"], report["median_error_after"]
    if before is not None:
        lines.append(f"median step-time error: {before:.1%} before, {after:.1%} after")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiler.microbenchmarks", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    arguments = parser.parse_args()
    report = evaluate()
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    sys.exit(0 if all(row["status"] == "ok" for row in report["rows"]) else 1)


if __name__ == "__main__":
    main()
