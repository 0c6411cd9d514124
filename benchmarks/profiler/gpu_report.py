"""Compare predictions with measurements on a device.

`python -m benchmarks.profiler.gpu_report [--gpu cpu] [--grid full|tiny] [--output DIR]` runs 40
configurations of a GPT and a Llama with different micro-batches, sequence lengths, recomputation
and precision, some of which fit on no current device. It writes the predicted and measured step
time and peak memory, before and after calibration, to benchmarks/reports/DATE-GPU.md. Calibrated
predictions are of rows that their fit did not use.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hp_tool.cluster.launchers import create
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Launcher
from hp_tool.loop.calibration import Evidence, fit_calibration, prior_for
from hp_tool.loop.learning.evidence import evidence_of
from hp_tool.loop.learning.machine import run_job
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

FOLDS = 5
REPORTS = Path(__file__).parents[1] / "reports"
GPT: dict[str, Any] = {
    "name": "gpt-1.3b",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 51200,
}
LLAMA: dict[str, Any] = {
    "name": "llama-1.5b",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "tie_word_embeddings": True,
}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}


@dataclass(frozen=True, slots=True)
class Case:
    model: dict[str, Any]
    sequence_length: int
    micro_batch_size: int
    recompute: str
    precision: str


@dataclass(frozen=True, slots=True)
class Row:
    case: Case
    measurement: Measurement
    evidence: Evidence
    """The prediction and the measurement of a row, for the calibration."""


def full_grid() -> list[Case]:
    """Return 36 configurations in bf16 and four in fp32. Without recomputation, 16 x 8192 tokens
    need hundreds of GB.
    """
    bf16 = itertools.product(
        (GPT, LLAMA), (2048, 8192), (1, 4, 16), ("none", "selective", "full"), ("bf16",)
    )
    fp32 = itertools.product((GPT, LLAMA), (2048,), (1, 4), ("full",), ("fp32",))
    return [Case(*each) for each in (*bf16, *fp32)]


def tiny_grid() -> list[Case]:
    """Return three configurations that run within seconds anywhere, to check the command."""
    llama = {
        **LLAMA,
        **SMALL,
        "num_key_value_heads": 2,
        "intermediate_size": 160,
        "name": "tiny-llama",
    }
    gpt = {**SMALL, "name": "tiny-gpt"}
    cases = ((gpt, 32, 1, "none"), (gpt, 32, 2, "full"), (llama, 64, 1, "none"))
    return [Case(*each, "fp32") for each in cases]


def run(case: Case, *, gpu: str, launcher: Launcher, steps: int) -> Row:
    """Run one configuration on one device with two micro-batches per step."""
    query = {
        "kind": "training",
        "model": case.model,
        "cluster": {"gpu": gpu, "num_gpus": 1},
        "training": {
            "sequence_length": case.sequence_length,
            "global_batch_size": 2 * case.micro_batch_size,
            "precision": case.precision,
        },
    }
    problem: TrainingProblem = resolve_training(parse_query(query))
    config = ParallelConfig(micro_batch_size=case.micro_batch_size, recompute=case.recompute)  # type: ignore[arg-type]
    request = ProfileRequest(
        run_id="report",
        model=problem.model,
        training=problem.workload,
        parallel=config,
        num_gpus=1,
        gpu=gpu,
        steps=steps,
        warmup_steps=2,
        timeout_s=600.0,
    )
    measurement = run_job(launcher, request)
    record: Any = SimpleNamespace(id=repr(case), parallel=config, measurement=measurement)
    return Row(case=case, measurement=measurement, evidence=evidence_of([record], problem=problem))


def predictions(
    rows: list[Row], *, kind: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return predictions (before, after) calibration, each {step_s, memory_bytes} of shape (n,).
    Each row is calibrated by a fit on the other folds.
    """
    evidence = Evidence.concatenate([row.evidence for row in rows])
    before = {
        "step_s": np.sum(list(evidence.parts_s.values()), axis=0),
        "memory_bytes": evidence.memory_bytes,
    }
    after = {name: np.array(values) for name, values in before.items()}
    for fold in np.array_split(
        np.random.default_rng(0).permutation(len(rows)), min(FOLDS, len(rows))
    ):
        fit = fit_calibration(
            evidence=evidence.take(np.setdiff1d(np.arange(len(rows)), fold)),
            prior=prior_for(kind=kind),
        )
        unseen = evidence.take(fold)
        step = fit.step_time.predict(
            parts_s=unseen.parts_s, layer_passes=unseen.layer_passes, features=unseen.features
        )
        after["step_s"][fold] = step.median_s
        after["memory_bytes"][fold] = fit.memory.predict(
            memory_bytes=unseen.memory_bytes, features=unseen.features
        ).median_bytes
    return before, after


def as_markdown(rows: list[Row], *, gpu: str, kind: Any, command: str) -> str:
    """Return the report. Errors are |predicted / measured - 1|."""
    before, after = predictions(rows, kind=kind)
    hardware = next((row.measurement.hardware for row in rows if row.measurement.hardware), None)
    versions = next((row.measurement.versions for row in rows if row.measurement.versions), {})
    measured = {
        "step_s": np.array([row.measurement.step_s or np.nan for row in rows]),
        "memory_bytes": np.array(
            [float(row.measurement.peak_memory_bytes or np.nan) for row in rows]
        ),
    }
    statuses = [row.measurement.status for row in rows]
    lines = [
        f"# {gpu}, {datetime.datetime.now(datetime.UTC).date()}",
        "",
        f"{hardware.device_name if hardware else gpu}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"By `{command}`: {len(rows)} configurations on one device, {statuses.count('ok')} ran, "
        f"{statuses.count('oom')} were "
        "out of memory. Calibrated predictions are of rows that their fit did not use "
        f"({min(FOLDS, len(rows))} folds).",
        "",
        "| | median error before | after |",
        "|---|---|---|",
    ]
    for name, words in (("step_s", "step time"), ("memory_bytes", "peak memory")):
        errors = [
            np.nanmedian(np.abs(predicted[name] / measured[name] - 1))
            for predicted in (before, after)
        ]
        lines.append(f"| {words} | {errors[0]:.1%} | {errors[1]:.1%} |")
    lines += [
        "",
        "| model | s | b | recompute | precision | result | step ms: measured | before | after |",
        "|---" * 9 + "|",
    ]
    lines[-2] += " peak GiB: measured | before | after |"
    lines[-1] += "---|" * 3
    for n, row in enumerate(rows):
        case = row.case
        cells: list[str] = [
            case.model["name"],
            str(case.sequence_length),
            str(case.micro_batch_size),
            case.recompute,
        ]
        cells += [case.precision, row.measurement.status]
        cells += [_number(column["step_s"][n], 1e3) for column in (measured, before, after)]
        cells += [
            _number(column["memory_bytes"][n], 2.0**-30) for column in (measured, before, after)
        ]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [
        f"- {row.case}: {row.measurement.cause}"
        for row in rows
        if row.measurement.status not in ("ok", "oom")
    ]
    return "\n".join([*lines, *(["", "Failed otherwise:", "", *failed] if failed else []), ""])


def _number(value: float, unit: float) -> str:
    return "" if np.isnan(value) else f"{value * unit:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiler.gpu_report", description=__doc__
    )
    parser.add_argument("--gpu", help="catalogue name; default: this host's device")
    parser.add_argument("--grid", choices=("full", "tiny"), default="full")
    parser.add_argument("--steps", type=int, default=8, help="measured steps per run")
    parser.add_argument("--output", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hp-gpu-report-") as folder:
        launcher = create("local", root=folder, cpu_only=arguments.gpu == "cpu")
        gpu = arguments.gpu or launcher.hardware().gpu
        if gpu == "cpu" and arguments.grid == "full":
            parser.error("the full grid needs a GPU; use --grid tiny on a CPU")
        rows = []
        for case in full_grid() if arguments.grid == "full" else tiny_grid():
            rows.append(run(case, gpu=gpu, launcher=launcher, steps=arguments.steps))
            measurement = rows[-1].measurement
            print(
                f"{len(rows)}: {case}: {measurement.status}, {measurement.step_s} s; load "
                f"{os.getloadavg()[0]:.1f}",
                file=sys.stderr,
            )
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{datetime.datetime.now(datetime.UTC).date()}-{gpu}.md"
    command = (
        f"python -m benchmarks.profiler.gpu_report --gpu {gpu} --grid {arguments.grid} "
        f"--steps {arguments.steps}"
    )
    path.write_text(
        as_markdown(rows, gpu=gpu, kind="cpu" if gpu == "cpu" else "gpu", command=command)
    )
    print(path)


if __name__ == "__main__":
    main()
