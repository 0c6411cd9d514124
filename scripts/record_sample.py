"""Record the sample search of the dashboard.

`python -m scripts.record_sample` runs a search whose runs are answered by the published measurement
of each layout: an 8B model on 64 H100, from Nanotron's grid in evidence/.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import sqlalchemy as sa

from benchmarks.search.grid import NANOTRON, Cell, read_grid
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.records import Label
from hp_tool.domain.states import JobState
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store, tables
from service.http.sample import RECORDED, SAMPLE

NOTE = (
    "Each run is a published measurement: Nanotron's grid of an 8B model on 64 H100. The search "
    "chose the order; a repeated run repeats its measurement. Predictions before the first run use "
    "a profile fitted on this grid."
)
TABLES = ("hp_searches", "hp_runs", "hp_measurements")
AXES = {
    "tensor_parallel_size": [1, 2, 4, 8],
    "pipeline_parallel_size": [1, 2, 4, 8],
    "micro_batch_size": [1, 2, 4, 8],
    "zero_stage": 1,
    "recompute": "none",
}
"""Axes whose combinations the grid covers almost completely."""
COMMAND = (
    "run_train.py",
    "--dp={data_parallel_size}",
    "--pp={pipeline_parallel_size}",
    "--tp={tensor_parallel_size}",
    "--mbs={micro_batch_size}",
    "--sp={sequence_parallel}",
)
SETTINGS: dict[str, Any] = {
    "search": {
        "budget_runs": 9,
        "fidelity": "full",
        "parallel_runs": 1,
        "reuse": False,
        "preflight": False,
        "baseline": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 1,
            "micro_batch_size": 1,
            "recompute": "none",
            "zero_stage": 1,
            "sequence_parallel": True,
        },
    },
}


@dataclass
class Replay:
    """Launcher whose jobs end at once with a measurement of the grid."""

    cell: Cell
    name: str = "slurm"
    requests: dict[str, ProfileRequest] = field(default_factory=dict)
    planned: dict[str, ProfileRequest] = field(default_factory=dict)

    def hardware(self) -> Hardware:
        return Hardware(gpu="h100-sxm-80gb", num_gpus=64, hosts=("nanotron",))

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        self.planned[job_name] = request
        return LaunchPlan(
            job_name=job_name, command=(), environment={}, files={}, num_gpus=64, timeout_s=60.0
        )

    def submit(self, plan: LaunchPlan) -> str:
        self.requests[plan.job_name] = self.planned[plan.job_name]
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        return job_name if job_name in self.requests else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return dict.fromkeys(handles, JobState.FINISHED)

    def cancel(self, job_name: str) -> None: ...

    def open_jobs(self) -> list[str]:
        return []

    def fetch(self, handle: str) -> Measurement:
        request = self.requests[handle]
        row = self.measured()[request.parallel]
        step_s = float(self.cell.step_s[row])
        if not math.isfinite(step_s):
            return Measurement(
                status="oom", cause="published as failed", hardware=self.hardware(), wall_s=90.0
            )
        training, memory = request.training, float(self.cell.memory_bytes[row])
        return Measurement(
            status="ok",
            step_s=step_s,
            step_times_s=(step_s,),
            tokens_per_second_per_gpu=training.global_batch_size
            * training.sequence_length
            / step_s
            / 64,
            peak_memory_bytes=int(memory) if math.isfinite(memory) else None,
            hardware=self.hardware(),
            wall_s=60.0 + 7 * step_s,
        )

    def measured(self) -> dict[ParallelConfig, int]:
        return {self.cell.candidates.config(row): row for row in range(len(self.cell.step_s))}


def main() -> None:
    cells, _ = read_grid(
        NANOTRON, shapes={}, gpu="h100-sxm-80gb", sequence_length=4096, framework="nanotron"
    )
    cell = next(each for each in cells if each.model.name == "8B" and each.cluster.num_gpus == 64)
    query = schema.parse_query(
        SETTINGS
        | {
            "kind": "training",
            "model": schema.to_dict(cell.model),
            "cluster": schema.to_dict(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64)),
            "training": schema.to_dict(cell.workload),
            "parallel": AXES,
            "trainer": {"command": COMMAND, "reader": "json"},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'sample.sqlite3'}"
        store = open_store(url)
        with mock.patch(
            "hp_tool.loop.tuning.problem.trained_by", lambda query, launcher, **_: launcher
        ):
            search = tune(query=query, store=store, launcher=Replay(cell)).search.id
        print(schema.to_json(store.get_search(search_id=search).result["answer"]["verdict"]))
        name = "Sample: an 8B model on 64 H100"
        store.label_search(search_id=search, label=Label(name=name, tags=("sample",), note=NOTE))
        store.close()
        RECORDED.write_text(json.dumps(rows(url, search), separators=(",", ":")), encoding="utf-8")


def rows(url: str, search: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the search by table, with the sample's id and rounded numbers."""
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        read = {
            name: [
                {column: value for column, value in row.items() if value is not None}
                for row in connection.execute(sa.select(tables.metadata.tables[name])).mappings()
            ]
            for name in TABLES
        }
    for row in read["hp_searches"]:
        row["query"] = {name: value for name, value in row["query"].items() if name != "trainer"}
    text = json.dumps(read, default=_plain).replace(search, SAMPLE)
    kept: dict[str, list[dict[str, Any]]] = json.loads(
        text, parse_float=lambda digits: float(f"{float(digits):.6g}")
    )
    return kept


def _plain(value: object) -> str:
    return value.replace(tzinfo=None).isoformat(" ") if isinstance(value, datetime) else str(value)


if __name__ == "__main__":
    main()
