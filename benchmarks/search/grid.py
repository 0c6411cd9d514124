"""Read a measured grid as cells to search: the configurations of one model on one number of nodes,
with their measurements.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.accuracy.data import Row
from benchmarks.accuracy.grid_rows import config, read_grid_file
from benchmarks.search.shapes import Shapes, model_of
from evidence.table import FOLDER
from hp_tool.catalog import cluster
from hp_tool.cost.arrays import FloatArray
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload

NANOTRON = FOLDER / "training" / "nanotron.csv"
"""Path of nanotron's published grid."""
MIN_ROWS = 20
"""Minimum number of rows in a cell; smaller cells are left out."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """n configurations of one model on one cluster, with their measurements."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: TrainingWorkload
    candidates: Candidates
    step_s: FloatArray
    """(n,) median seconds of the successful runs; NaN if all failed."""
    memory_bytes: FloatArray
    """(n,) peak bytes; NaN if not measured."""
    rows: int
    """Number of rows in the file, including duplicates."""
    repeats: tuple[tuple[float, ...], ...]
    """Step seconds of each configuration that ran more than once."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.model.name, self.model.kv_heads, self.cluster.num_nodes

    @property
    def best_s(self) -> float:
        return float(np.nanmin(self.step_s))

    @property
    def second_best_gap(self) -> float:
        """Return how much slower the second-best configuration is, as a fraction. If it is close,
        noise decides which one a search finds.
        """
        fastest = np.sort(self.step_s[np.isfinite(self.step_s)])
        return float(fastest[1] / fastest[0] - 1.0) if len(fastest) > 1 else float("inf")


def read_grid(
    path: Path, *, shapes: Shapes, gpu: str, sequence_length: int, framework: str
) -> tuple[list[Cell], dict[str, int]]:
    """Return the cells of at least MIN_ROWS rows, and the numbers of rows read, dropped
    (data-parallel size x micro-batch x accumulation is not the batch) and in smaller cells. Columns
    `gpu` and `sequence_length` override the defaults.
    """
    rows = read_grid_file(path)
    kept = [
        row
        for row in rows
        if int(row["dp"]) * int(row["mbs"]) * int(row["grad_acc"]) == int(row["gbs"])
    ]
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in kept:
        where = (
            int(row["nodes"]),
            row.get("gpu") or gpu,
            int(row.get("sequence_length") or sequence_length),
        )
        groups[(row["model"], model_of(row, shapes).kv_heads, *where, int(row["gbs"]))].append(row)
    # Sorted by model, KV heads, nodes: the order in which cells are named and reported.
    cells = [
        _cell(
            members,
            model=model_of(members[0], shapes),
            gpu=str(key[3]),
            sequence_length=int(str(key[4])),
            framework=framework,
        )
        for key, members in sorted(groups.items(), key=lambda item: tuple(map(_sortable, item[0])))
        if len(members) >= MIN_ROWS and any(row["status"] == "ok" for row in members)
    ]
    counts = {
        "rows": len(rows),
        "dropped": len(rows) - len(kept),
        "too_small": len(kept) - sum(cell.rows for cell in cells),
    }
    return cells, counts


def _cell(
    rows: list[Row], *, model: ModelSpec, gpu: str, sequence_length: int, framework: str
) -> Cell:
    devices = int(rows[0]["tp"]) * int(rows[0]["pp"]) * int(rows[0]["dp"])
    machine = cluster(
        ClusterQuery(gpu=gpu, num_gpus=devices, gpus_per_node=devices // int(rows[0]["nodes"]))
    )
    batch = int(rows[0]["gbs"])
    by_config: dict[ParallelConfig, list[Row]] = defaultdict(list)
    for row in rows:
        by_config[config(row)].append(row)

    def seconds(row: Row) -> float:
        return batch * sequence_length / (float(row["tok_s_gpu"]) * devices)

    ran = {
        c: [seconds(row) for row in members if row["status"] == "ok"]
        for c, members in by_config.items()
    }
    memory = {
        c: [float(row["mem_gb"]) * GIB for row in members if row.get("mem_gb")]
        for c, members in by_config.items()
    }
    return Cell(
        model=model,
        cluster=machine,
        workload=TrainingWorkload(
            sequence_length=sequence_length, global_batch_size=batch, framework=framework
        ),
        candidates=Candidates.from_configs(by_config),
        step_s=_medians(ran.values()),
        memory_bytes=_medians(memory.values()),
        rows=len(rows),
        repeats=tuple(tuple(times) for times in ran.values() if len(times) > 1),
    )


def _medians(groups: Iterable[list[float]]) -> FloatArray:
    return np.array([median(group) if group else np.nan for group in groups])


def _sortable(value: object) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int) else (1, 0.0, str(value))


def add_grid_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option `--grid`."""
    parser.add_argument(
        "--grid",
        type=Path,
        default=NANOTRON,
        metavar="FILE.csv",
        help="measured grid (default: nanotron's, evidence/training/nanotron.csv)",
    )


def add_grid_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a grid, the shapes of its models and its hardware."""
    add_grid_argument(parser)
    parser.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="CSV, YAML or JSON file with the shapes of the grid's models",
    )
    parser.add_argument("--gpu", default="h100-sxm-80gb", help="GPU of a grid without that column")
    parser.add_argument(
        "--sequence-length", type=int, default=4096, help="of a grid without that column"
    )
    parser.add_argument(
        "--framework", default="nanotron", help="framework of the efficiency profile"
    )
