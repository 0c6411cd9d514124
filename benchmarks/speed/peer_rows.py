"""Measured serving rows answered by aiconfigurator beside us: errors by engine, on rows that no
constant of ours was fitted on.

Dense models: groups whose other half gave the constants; mixtures: the model left out of the
experts' fit. The peer ships its own timed kernels by release, and is asked for the row's release
where it has it, else for its newest.
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
from benchmarks.accuracy.inference import unseen
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, dense_runs
from hp_tool.catalog import model as catalogue_model

THEIR_SYSTEMS = {
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm-180gb": "b200_sxm",
    "a100-sxm-80gb": "a100_sxm",
}
THEIR_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
}
"""Names under which the peer knows models."""
QUANTIZED = {"bf16": "bfloat16", "fp8": "fp8"}
EACH = 12
"""Rows of one series (engine, release, model, precision, GPU): the peer takes 1.6 s for each."""
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


def rows(folder: Path, *, each: int = EACH) -> list[tuple[str, Predicted]]:
    """(engine and kind of model, our prediction) of up to `each` rows a series."""
    dense = [pair for pair in unseen(dense_runs(folder)) if pair.run.queued_throughput is None]
    parts = fit_experts.left_out(
        fit_experts.mixtures(folder), lambda run: catalogue_model(run.model).name
    )
    mixtures = [pair for _, pairs in parts.values() for pair in pairs]
    kinds = (("dense", dense), ("mixtures", mixtures))
    return [
        (f"{pair.run.engine}, {kind}", pair)
        for kind, pairs in kinds
        for pair in _thinned(pairs, each)
    ]


def _thinned(pairs: Iterable[Predicted], each: int) -> list[Predicted]:
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


def question(run: ServingRun) -> dict[str, Any]:
    """A row as `cli_estimate` takes it."""
    config, mixture = run.config, catalogue_model(run.model).num_experts is not None
    groups, ep = config.attention_data_parallel_size, config.expert_parallel_size
    row = {
        "model_path": THEIR_MODELS.get(run.model, run.model),
        "system_name": THEIR_SYSTEMS[run.gpu],
        "backend_name": run.engine,
        "version": run.version or None,
        "isl": run.input_length,
        "osl": run.output_length,
        "batch_size": max(run.concurrency // groups, 1),
        "tp_size": config.tensor_parallel_size,
        "pp_size": config.pipeline_parallel_size,
        "attention_dp_size": groups,
    }
    if mixture:
        if run.precision == "fp8":  # whatever the checkpoint's name says, as published mixtures are
            row |= {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"}
        return row | {"moe_ep_size": ep, "moe_tp_size": config.tensor_parallel_size * groups // ep}
    return row | {"gemm_quant_mode": QUANTIZED[run.precision]}


def peer_rows(python: str, pairs: Sequence[tuple[str, Predicted]]) -> list[dict[str, Any]]:
    """aiconfigurator's answer to each row, or why there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(question(pair.run)) + "\n" for _, pair in pairs)
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
            f"the peer answered {len(answers)} of {len(pairs)} rows: {done.stderr[-500:]}"
        )
    return answers


def beside(folder: Path, python: str, *, each: int = EACH) -> dict[str, dict[str, Any]]:
    """{engine and kind: mean error of TPOT and median of TTFT, ours and the peer's, of rows that
    both answer; and refusals}.
    """
    pairs = rows(folder, each=each)
    answers = peer_rows(python, pairs)
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
            **{f"tpot_{who}": _mean(logs[who, "tpot_s"]) for who in ("ours", "peer")},
            **{f"ttft_{who}": _median(logs[who, "ttft_s"]) for who in ("ours", "peer")},
            "releases": sorted({answer["version"] for _, answer in both}),
            "refused": list(refused)[:3],
        }
    return table


def _mean(logs: np.ndarray) -> float:
    return float(np.abs(np.expm1(logs)).mean()) if len(logs) else float("nan")


def _median(logs: np.ndarray) -> float:
    return float(np.median(np.abs(np.expm1(logs)))) if len(logs) else float("nan")


def as_text(table: dict[str, dict[str, Any]]) -> str:
    head = f"  {'':20} rows both |   TPOT ours  peer | TTFT median ours  peer | peer's releases"
    lines = ["measured rows, errors of both (mean of TPOT, median of TTFT):", head]
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
            lines.append(f"    behind in {' and '.join(behind).upper()}")
    return "\n".join(lines)
