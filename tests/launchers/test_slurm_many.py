"""Twenty searches at once on a real Slurm, by two workers of ten: one squeue an interval, whoever
asks.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import yaml

from hp_tool.domain.states import SearchState
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.launchers.slurm_cluster import OPTIONS, QUERY, SlurmCluster, until
from tests.service.processes import process as hp_tool_process

pytestmark = [pytest.mark.components, pytest.mark.long]

SEARCHES, WORKERS, POLL_S = 20, 2, 2.0
COUNTED = """#!/bin/bash
echo "$@" >> {calls}
exec {squeue} "$@"
"""
TRAINER = """
import json, pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.1)
for step in range(1, 6):
    print(json.dumps({{"step": step, "step_s": 0.5}}), flush=True)
"""


def test_twenty_searches_by_two_workers_ask_once_an_interval(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, calls = tmp_path / "go", tmp_path / "calls"
    for folder in ("bin", "trainers"):
        (tmp_path / folder).mkdir()
    squeue = shutil.which("squeue")
    assert squeue is not None
    (tmp_path / "bin" / "squeue").write_text(COUNTED.format(calls=calls, squeue=squeue))
    (tmp_path / "bin" / "squeue").chmod(0o755)
    (tmp_path / "train.py").write_text(TRAINER.format(go=str(go)))
    command = [sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]
    trainer = {"command": command, "reader": "json", "launch": "command"}
    (tmp_path / "trainers" / "quick.yaml").write_text(yaml.safe_dump(trainer))
    options = {
        **OPTIONS,
        "gpus_per_node": 1,
        "max_nodes": 1,
        "poll_s": POLL_S,
        "comment": "hp {search} of {owner}",
    }
    (tmp_path / "slurm.yaml").write_text(yaml.safe_dump(options))
    monkeypatch.setenv("HP_SLURM_CONFIG", str(tmp_path / "slurm.yaml"))
    monkeypatch.setenv("HP_CATALOG_DIR", str(tmp_path))
    url = f"sqlite:///{tmp_path / 'hp.sqlite3'}"
    began = time.time()
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(url)))
        ids = {
            store.create_search(
                query=schema.to_dict(schema.parse_query({**QUERY, "trainer": "quick"}))
            ).id
            for _ in range(SEARCHES)
        }
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
            for _ in range(WORKERS):
                arguments = ("worker", "--searches", str(SEARCHES // WORKERS))
                stack.enter_context(hp_tool_process(*arguments, database_url=url, home=tmp_path))
        until(
            lambda: len(slurm.open_jobs()) == SEARCHES, limit_s=300
        )  # all at once; sixteen find a core
        comments = slurm.run("squeue", "--noheader", "--format=%k").splitlines()
        assert {comment.split()[1] for comment in comments} == ids
        go.touch()
        until(
            lambda: len(store.list_searches(state=SearchState.SUCCEEDED).items) == SEARCHES,
            limit_s=300,
        )
        runs = [store.runs(search_id=search_id) for search_id in ids]
    assert all(run.measurement is not None and run.measurement.step_s == 0.5 for (run,) in runs)
    assert 3 <= len(calls.read_text().splitlines()) <= 1 + (time.time() - began) / POLL_S
