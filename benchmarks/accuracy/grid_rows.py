"""The rows of the published nanotron grid as cases of the cost model, and their predictions.

The models are Llama-like, with multi-head attention unless `variant` is gqa8. `mem_gb` is the
memory of the first pipeline stage. It depends on the micro-batches that this stage has in flight
and excludes the logits, which are on another stage.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.data import Row, rows
from evidence import table
from evidence.schema import TRAINING
from hp_tool.catalog import cluster, gpu
from hp_tool.catalog.efficiency import (
    efficiency_profile,
    gpu_efficiency,
    sustained_efficiency,
    usual_clocks,
)
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.legality import legality
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.units import GIB
from hp_tool.domain.workload import TrainingWorkload

TABLE = "grid_h100_nanotron"
COLUMNS = {
    "model": "model",
    "variant": "variant",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "mbs": "micro_batch_size",
    "grad_acc": "num_microbatches",
    "gbs": "global_batch_size",
    "zero": "zero_stage",
    "tok_s_gpu": "tokens_per_second_per_gpu",
    "sequence_length": "sequence_length",
}
"""Columns of a grid file, by the corresponding column of the evidence."""
SEQUENCE = 4096
GPU = "h100-sxm-80gb"
SHAPES = {
    "1B": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "8B": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "tie_word_embeddings": False,
    },
}


def grid_rows(folder: Path) -> list[Row]:
    """Return nanotron's runs in the columns of a grid file, including rows whose figures contradict
    each other.
    """
    return [as_grid(row) for row in rows(folder, TABLE, excluded=True)]


def read_grid_file(path: Path) -> list[Row]:
    """Return the rows of a CSV file in the columns of a grid file; the file may also have the
    columns of the evidence.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if "tensor_parallel_size" not in (reader.fieldnames or ()):
            return list(reader)
    return [as_grid(row) for row in table.read(path, TRAINING)]


def as_grid(row: table.Row) -> Row:
    """Convert a row of the evidence to the columns of a grid file."""
    used = row["used_bytes"]
    values = {
        **{name: row[column] for name, column in COLUMNS.items()},
        "nodes": row["num_gpus"] // row["gpus_per_node"],
        "mem_gb": None if used is None else used / GIB,
        "status": "ok" if row["status"] == "ran" else row["status"],
    }
    return {name: table.cell_of(value) for name, value in values.items()}


def shape(row: Row) -> ModelSpec:
    """Return the Llama-like model of a row."""
    return ModelSpec(
        name=row["model"],
        num_attention_heads=32,
        num_key_value_heads=8 if row["variant"].startswith("gqa8") else 32,
        vocab_size=131072,
        gated_mlp=True,
        normalization="rmsnorm",
        **SHAPES[row["model"]],
    )


def config(row: Row) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]),
        data_parallel_size=int(row["dp"]),
        micro_batch_size=int(row["mbs"]),
        sequence_parallel=int(row["tp"]) > 1,
        zero_stage=int(row["zero"]),
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows with the same model, kind of attention, number of nodes and batch, which are predicted
    in one call.
    """

    rows: list[Row]
    model: ModelSpec
    cluster: ClusterSpec
    workload: TrainingWorkload
    candidates: Candidates

    def predict(self, constants: FrameworkEfficiency) -> TrainingCosts:
        """Return predictions for the rows."""
        device = gpu(GPU)
        kernels = sustained_efficiency(
            gpu_efficiency(device), gpu=device, clocks=usual_clocks(device)
        )
        profile = EfficiencyProfile(gpu=kernels, framework=constants)
        return training_costs(case=self._case(profile), candidates=self.candidates)

    def _case(self, profile: EfficiencyProfile) -> TrainingCase:
        return TrainingCase(
            model=self.model, cluster=self.cluster, workload=self.workload, profile=profile
        )

    @property
    def legal(self) -> NDArray[np.bool_]:
        """Return which rows have a layout that the framework accepts."""
        codes = legality(
            case=self._case(efficiency_profile(gpu=self.cluster.gpu, framework="nanotron")),
            candidates=self.candidates,
        )
        legal: NDArray[np.bool_] = codes == 0
        return legal

    @property
    def ran(self) -> NDArray[np.bool_]:
        return np.array([row["status"] == "ok" for row in self.rows])

    @property
    def step_s(self) -> NDArray[np.float64]:
        """Return the measured seconds; NaN if the run failed."""
        rate = np.array([float(row["tok_s_gpu"] or "nan") for row in self.rows])
        return self.workload.global_batch_size * SEQUENCE / (rate * self.cluster.num_gpus)

    @property
    def used_bytes(self) -> NDArray[np.float64]:
        """Return the measured bytes on the first stage; NaN if the run failed."""
        return np.array([float(row["mem_gb"] or "nan") for row in self.rows]) * GIB


def groups(rows: Iterable[Row]) -> list[Group]:
    """Return the rows whose sizes multiply to their batch, in groups."""
    cells: dict[tuple[str, str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if int(row["dp"]) * int(row["mbs"]) * int(row["grad_acc"]) == int(row["gbs"]):
            cells[
                (row["model"], row["variant"].split("_")[0], int(row["nodes"]), int(row["gbs"]))
            ].append(row)
    return [
        Group(
            rows=cell,
            model=shape(cell[0]),
            cluster=cluster(ClusterQuery(gpu=GPU, num_gpus=8 * int(cell[0]["nodes"]))),
            workload=TrainingWorkload(
                sequence_length=SEQUENCE,
                global_batch_size=int(cell[0]["gbs"]),
                framework="nanotron",
            ),
            candidates=Candidates.from_configs(config(row) for row in cell),
        )
        for _, cell in sorted(cells.items())
    ]
