"""A real grid on 1 to 64 nodes of 8 H100: which configurations fail, how fast the others are, and their order in a cell.

The runs are nanotron's; there is no profile of that framework, so Megatron Core's predicts them.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.accuracy.data import Row, read
from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

SEQUENCE = 4096
GPU = "h100-sxm-80gb"
MIN_CELL = 20
"""Rows below which a cell's rank correlation says nothing."""
SHAPES = {
    "1B": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "tie_word_embeddings": True},
    "8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "tie_word_embeddings": False},
}


def shape(row: Row) -> ModelSpec:
    """The Llama-like model of a row."""
    return ModelSpec(
        name=row["model"], num_attention_heads=32, num_key_value_heads=8 if row["variant"].startswith("gqa8") else 32,
        vocab_size=131072, gated_mlp=True, normalization="rmsnorm", **SHAPES[row["model"]],
    )  # fmt: skip


def config(row: Row) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=int(row["tp"]), pipeline_parallel_size=int(row["pp"]), data_parallel_size=int(row["dp"]),
        micro_batch_size=int(row["mbs"]), sequence_parallel=int(row["tp"]) > 1, zero_stage=int(row["zero"]),
    )  # fmt: skip


def costs(rows: list[Row]) -> TrainingCosts:
    """Predictions for rows of one model, variant, batch and number of nodes."""
    machine = cluster(ClusterQuery(gpu=GPU, num_gpus=8 * int(rows[0]["nodes"])))
    return training_costs(
        model=shape(rows[0]), cluster=machine,
        workload=TrainingWorkload(sequence_length=SEQUENCE, global_batch_size=int(rows[0]["gbs"])),
        profile=efficiency(gpu=machine.gpu, framework="megatron-core"),
        candidates=Candidates.from_configs(config(row) for row in rows),
    )  # fmt: skip


def evaluate(folder: Path) -> dict[str, Any] | None:
    """Counts and shares over the whole grid, and per cell of (model, key/value heads, nodes); None without the file."""
    rows = read(folder, "grid_h100_nanotron.csv")
    if not rows:
        return None
    kept = [row for row in rows if int(row["dp"]) * int(row["mbs"]) * int(row["grad_acc"]) == int(row["gbs"])]
    grouped: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in kept:
        grouped[(row["model"], row["variant"].split("_")[0], int(row["nodes"]), row["gbs"])].append(row)
    cells = [_cell(key, cell) for key, cell in sorted(grouped.items())]
    errors = np.concatenate([cell.pop("errors") for cell in cells])
    memory = np.concatenate([cell.pop("memory_errors") for cell in cells])
    ok, failed, refused, caught = (sum(cell[key] for cell in cells) for key in ("ok", "failed", "refused", "caught"))
    ranked = [cell["rank_correlation"] for cell in cells if cell["rank_correlation"] is not None]
    return {
        "rows": len(rows),
        "dropped": len(rows) - len(kept),
        "ran": ok,
        "ran_but_refused": refused,
        "ran_but_refused_share": refused / ok,
        "failed": failed,
        "failed_called_infeasible_share": caught / failed if failed else None,
        "throughput_median_error": float(np.median(np.abs(errors))),
        "throughput_bias": float(np.expm1(np.median(np.log1p(errors)))),
        "memory_median_error": float(np.median(np.abs(memory))),
        "memory_bias": float(np.median(memory)),
        "rank_correlation_median": median(ranked) if ranked else None,
        "cells": cells,
    }


def _cell(key: tuple[str, str, int, str], rows: list[Row]) -> dict[str, Any]:
    model, heads, nodes, _ = key
    found = costs(rows)
    ran = np.array([row["status"] == "ok" for row in rows])
    measured = np.array([float(row["tok_s_gpu"] or "nan") for row in rows])[ran]
    predicted = int(rows[0]["gbs"]) * SEQUENCE / (found.step_s * 8 * nodes)
    used = np.array([float(row["mem_gb"] or "nan") for row in rows])[ran] * 2**30
    allocated = (found.memory_total_bytes - found.memory_parts["overhead"])[ran]
    return {
        "model": model,
        "attention": heads,
        "nodes": nodes,
        "ok": int(ran.sum()),
        "failed": int((~ran).sum()),
        "refused": int((ran & ~found.feasible).sum()),
        "caught": int((~ran & ~found.feasible).sum()),
        "throughput_median_error": float(np.median(np.abs(predicted[ran] / measured - 1.0))) if ran.any() else None,
        "rank_correlation": _rank_correlation(predicted[ran], measured),
        "errors": predicted[ran] / measured - 1.0,
        "memory_errors": (allocated / used - 1.0)[np.isfinite(used)],
    }


def _rank_correlation(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float | None:
    return float(spearmanr(predicted, measured).statistic) if len(measured) >= MIN_CELL else None


def as_text(found: dict[str, Any]) -> str:
    lines = [
        f"Grid of {found['rows']} nanotron runs on H100 ({found['dropped']} dropped: sizes do not multiply to the batch)  "
        "[held out]",
        f"  ran but refused {found['ran_but_refused']} of {found['ran']} ({found['ran_but_refused_share']:.2%}); "
        f"failed and called infeasible {found['failed_called_infeasible_share']:.1%} of {found['failed']}",
        f"  throughput: median error {found['throughput_median_error']:.1%}, bias {found['throughput_bias']:+.1%}; "
        f"memory: median error {found['memory_median_error']:.1%}, bias {found['memory_bias']:+.1%}; "
        f"rank correlation in a cell {found['rank_correlation_median']:.2f} (median)",
    ]
    lines += [
        f"  {cell['model']} {cell['attention']:5} {cell['nodes']:3} nodes: {cell['ok']:4} ran, {cell['failed']:4} failed, "
        f"median error {cell['throughput_median_error']:.0%}, rank correlation {cell['rank_correlation']:.2f}"
        for cell in found["cells"]
        if cell["rank_correlation"] is not None
    ]
    return "\n".join(lines)
