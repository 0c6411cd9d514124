"""One search on this host, on a real Slurm and on a real Ray: the same words, the same keys, the
same accounts.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.domain.records import RunRecord
from hp_tool.store import open_store
from tests.command_line import hp_tool
from tests.launchers import ray_cluster as ray_engine
from tests.launchers import slurm_cluster

pytestmark = [pytest.mark.long, pytest.mark.components]

ENGINES = ("local", "slurm", "ray")
GPUS, STARTUP_S = 2, 1.0
TRAINER = f"""
import json, sys, time
seconds = {{"1": 0.5, "2": 0.4}}[sys.argv[sys.argv.index("--micro-batch-size") + 1]]
time.sleep({STARTUP_S})
for step in range(1, 6):
    print(json.dumps({{"step": step, "step_s": seconds}}), flush=True)
"""
"""Its steps take what it says, whatever else the host does: the searches decide alike."""
WAITED = "its jobs waited "
"""Where it was a second or more."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a search said and left behind."""

    stdout: str
    stderr: str
    result: Any
    runs: list[RunRecord]
    events: list[str]


@pytest.fixture
def searches(
    ray_cluster: ray_engine.RayCluster, slurm: slurm_cluster.SlurmCluster, tmp_path: Path
) -> dict[str, Ended]:
    """The search by engine, each with a database of its own."""
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "slurm.yaml").write_text(yaml.safe_dump(dict(slurm_cluster.OPTIONS)))
    options = {
        **ray_engine.OPTIONS,
        "address": ray_cluster.address,
        "gpus_per_node": GPUS,
        "job_prefix": "words-",
    }
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(options))
    return {engine: search(engine, tmp_path) for engine in ENGINES}


def search(engine: str, folder: Path) -> Ended:
    query = {
        **slurm_cluster.QUERY,
        "cluster": {"gpu": "cpu", "num_gpus": GPUS, "gpus_per_node": GPUS},
        "parallel": {
            "micro_batch_size": [1, 2],
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "recompute": "none",
        },
        "search": {**slurm_cluster.QUERY["search"], "launcher": engine, "budget_runs": 3},
        "trainer": {
            "command": [sys.executable, str(folder / "train.py"), "{flags:megatron-lm}"],
            "reader": "json",
            "launch": "command",
        },
    }
    (folder / f"{engine}.json").write_text(json.dumps(query))
    url = f"sqlite:///{folder / engine}.sqlite3"
    environment = {
        "HP_SLURM_CONFIG": str(folder / "slurm.yaml"),
        "HP_RAY_CONFIG": str(folder / "ray.yaml"),
    }
    environment |= {"HP_DATABASE_URL": url, "HP_RUNS_DIR": str(folder / "runs")}
    ended = hp_tool("tune", str(folder / f"{engine}.json"), **environment)
    assert ended.returncode == 0, ended.stderr
    with closing(open_store(url)) as store:
        record = store.get_search(search_id=store.list_searches().items[0].id)
        assert record.result is not None
        runs = store.runs(search_id=record.id)
        events = [each.kind for each in store.events(search_id=record.id)]
    return Ended(
        stdout=ended.stdout, stderr=ended.stderr, result=record.result, runs=runs, events=events
    )


def masked(text: str) -> list[str]:
    """The lines of a text with every figure and identifier as `#`."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "#", text)
    return [
        re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*", "#", line)).strip() for line in text.splitlines()
    ]


def unwaited(ended: Ended) -> list[str]:
    """What it said of anything but waits for devices."""
    return [line for line in masked(ended.stdout) if not line.startswith(WAITED)]


def keys(value: Any, path: str = "") -> set[str]:
    """The paths of everything in a JSON value."""
    if isinstance(value, dict):
        return {path}.union(*(keys(each, f"{path}.{name}") for name, each in value.items()))
    return (
        {path}.union(*(keys(each, f"{path}[]") for each in value))
        if isinstance(value, list)
        else {path}
    )


def test_a_search_ends_with_the_same_words_and_accounts_on_every_engine(
    searches: dict[str, Ended],
) -> None:
    here = searches["local"]
    assert any(
        line.startswith("Search # succeeded after # profile runs and # GPU-seconds, ")
        for line in masked(here.stdout)
    )
    for engine, there in searches.items():
        assert unwaited(there) == unwaited(here), engine
        assert masked(there.stderr) == masked(here.stderr), engine
        assert keys(there.result) == keys(here.result), engine
        assert [kind for kind in there.events if kind != "pending"] == [
            kind for kind in here.events if kind != "pending"
        ]

        spent = there.result["search"]
        assert (f"\n{WAITED}" in there.stdout) == (spent["queue_s"] >= 1.0)
        assert spent["queue_s"] == pytest.approx(sum(run.account["queue_s"] for run in there.runs))
        assert spent["gpu_seconds"] == pytest.approx(sum(run.gpu_seconds for run in there.runs))
        assert [run.parallel for run in there.runs] == [run.parallel for run in here.runs]
        for run in there.runs:
            assert run.account is not None and set(run.account) == {"queue_s", "wall_s"}
            assert (
                STARTUP_S <= run.account["wall_s"] < STARTUP_S + 10.0
                and 0.0 <= run.account["queue_s"] < 60.0
            )
            assert run.gpu_seconds == pytest.approx(GPUS * run.account["wall_s"])
            assert run.measurement is not None and run.measurement.wall_s == pytest.approx(
                run.account["wall_s"]
            )
