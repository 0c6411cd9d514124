"""Compare the errors of hp_tool and of aiconfigurator (the peer) on measured serving runs.

No constant of hp_tool was fitted on these runs. Dense models: runs of the half of the groups that
the fit left out. MoE models: each model is predicted with constants of the other models. The peer
has its own timed kernels by release; it predicts a run with the run's release, or with its newest
release if it lacks that one.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fit_experts
from benchmarks.accuracy.inference import compare_unseen
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, dense_runs
from hp_tool.catalog import model as catalogue_model

PEER_SYSTEMS = {
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm-180gb": "b200_sxm",
    "a100-sxm-80gb": "a100_sxm",
}
PEER_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
}
"""Names of models that the peer names differently."""
QUANTIZED = {"bf16": "bfloat16", "fp8": "fp8"}
ROWS_PER_SERIES = 12
"""Maximum number of runs of one engine, release, model, precision and GPU; the peer takes 1.6 s per
run.
"""
PEER = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from aiconfigurator.cli.api import cli_estimate
for line in open(sys.argv[1]):
    row = json.loads(line)
    last = None
    for version in (row.pop("version"), None):
        try:
            found = cli_estimate(backend_version=version, **row)
            last = {"ttft_s": found.ttft * 1e-3, "tpot_s": found.tpot * 1e-3, "version": found.backend_version}
            break
        except Exception as error:
            last = {"refused": f"{type(error).__name__}: {error}"[:200]}
    print("ROW " + json.dumps(last), flush=True)
"""  # noqa: E501


def unseen_runs(folder: Path, *, each: int) -> list[tuple[str, Predicted]]:
    """Return (engine and kind of model, prediction of hp_tool) of up to `each` runs per series."""
    dense = [
        pair for pair in compare_unseen(dense_runs(folder)) if pair.run.queued_throughput is None
    ]
    parts = fit_experts.left_out(
        fit_experts.moe_runs(folder), lambda run: catalogue_model(run.model).name
    )
    mixtures = [pair for _, pairs in parts.values() for pair in pairs]
    kinds = (("dense", dense), ("MoE", mixtures))
    return [
        (f"{pair.run.engine}, {kind}", pair)
        for kind, pairs in kinds
        for pair in _sample_series(pairs, each)
    ]


def _sample_series(pairs: Iterable[Predicted], each: int) -> list[Predicted]:
    series: dict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for pair in pairs:
        series[pair.run.series].append(pair)
    places = (
        np.unique(np.linspace(0, len(one) - 1, min(each, len(one))).astype(int))
        for one in series.values()
    )
    return [
        one[place]
        for one, chosen in zip(series.values(), places, strict=True)
        for place in chosen.tolist()
    ]


def peer_arguments(run: ServingRun) -> dict[str, Any]:
    """Return the arguments of the peer's `cli_estimate` for a run, and its release as `version`."""
    config, has_experts = run.config, catalogue_model(run.model).num_experts is not None
    groups, ep = config.attention_data_parallel_size, config.expert_parallel_size
    row = {
        "model_path": PEER_MODELS.get(run.model, run.model),
        "system_name": PEER_SYSTEMS[run.gpu],
        "backend_name": run.engine,
        "version": run.version or None,
        "isl": run.input_length,
        "osl": run.output_length,
        "batch_size": max(run.concurrency // groups, 1),
        "tp_size": config.tensor_parallel_size,
        "pp_size": config.pipeline_parallel_size,
        "attention_dp_size": groups,
    }
    if has_experts:
        if run.precision == "fp8":  # Published MoE checkpoints in fp8 have a scale for each block.
            row |= {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"}
        return row | {"moe_ep_size": ep, "moe_tp_size": config.tensor_parallel_size * groups // ep}
    return row | {"gemm_quant_mode": QUANTIZED[run.precision]}


def ask_peer(python: str, pairs: Sequence[tuple[str, Predicted]]) -> list[dict[str, Any]]:
    """Return the peer's prediction of each run, or {"refused": reason}.

    Raises:
        RuntimeError: The peer's process ended early.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(peer_arguments(pair.run)) + "\n" for _, pair in pairs)
        file.flush()
        done = subprocess.run(
            [python, "-c", PEER, file.name], capture_output=True, text=True, check=False
        )
    answers = [
        json.loads(line.removeprefix("ROW "))
        for line in done.stdout.splitlines()
        if line.startswith("ROW ")
    ]
    if len(answers) != len(pairs):
        raise RuntimeError(
            f"aiconfigurator answered {len(answers)} of {len(pairs)} runs: {done.stderr[-500:]}"
        )
    return answers


def compare_errors(
    folder: Path, python: str, *, each: int = ROWS_PER_SERIES
) -> dict[str, dict[str, Any]]:
    """Return the mean error of TPOT and the median error of TTFT of both tools on the runs that
    both predict, and the peer's refusals, by engine and kind of model.
    """
    pairs = unseen_runs(folder, each=each)
    answers = ask_peer(python, pairs)
    table: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for name, _ in pairs):
        members = [
            (pair, answer)
            for (group, pair), answer in zip(pairs, answers, strict=True)
            if group == name
        ]
        both = [(pair, answer) for pair, answer in members if "tpot_s" in answer]
        logs = {
            (who, what): np.array(
                [np.log(value(pair, answer) / getattr(pair.run, what)) for pair, answer in both]
            )
            for what in ("tpot_s", "ttft_s")
            for who, value in (
                ("ours", lambda pair, answer, what=what: getattr(pair, what)),
                ("peer", lambda pair, answer, what=what: max(answer[what], 1e-9)),
            )
        }
        refused = dict.fromkeys(answer["refused"] for _, answer in members if "refused" in answer)
        table[name] = {
            "rows": len(members),
            "both": len(both),
            **{f"tpot_{who}": _mean_error(logs[who, "tpot_s"]) for who in ("ours", "peer")},
            **{f"ttft_{who}": _median_error(logs[who, "ttft_s"]) for who in ("ours", "peer")},
            "releases": sorted({answer["version"] for _, answer in both}),
            "refused": list(refused)[:3],
        }
    return table


def _mean_error(logs: np.ndarray) -> float:
    return float(np.abs(np.expm1(logs)).mean()) if len(logs) else float("nan")


def _median_error(logs: np.ndarray) -> float:
    return float(np.median(np.abs(np.expm1(logs)))) if len(logs) else float("nan")


def format_table(table: dict[str, dict[str, Any]]) -> str:
    head = f"  {'':20} runs both |     hp_tool  peer |          hp_tool  peer | peer's releases"
    lines = ["errors on measured runs (mean of TPOT, median of TTFT):", head]
    for name, row in table.items():
        lines.append(
            f"  {name:20} {row['rows']:4} {row['both']:4} | {row['tpot_ours']:11.1%} "
            f"{row['tpot_peer']:5.1%} | "
            f"{row['ttft_ours']:16.1%} {row['ttft_peer']:5.1%} | {', '.join(row['releases'])}"
        )
        lines += [f"    refused: {reason}" for reason in row["refused"]]
        behind = [
            what
            for what in ("tpot", "ttft")
            if row["both"] and row[f"{what}_ours"] > row[f"{what}_peer"]
        ]
        if behind:
            lines.append(f"    the peer is better in {' and '.join(behind).upper()}")
    return "\n".join(lines)
