"""Whole searches over a real Ray: by the command line with real steps, and through a head that is
away for a while.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.domain.states import RunState
from hp_tool.errors import LauncherError
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.command_line import COMMAND
from tests.conftest import skip_or_fail
from tests.launchers.ray_cluster import OPTIONS, RayCluster
from tests.launchers.ray_proxy import PAGE, proxy_of
from tests.launchers.slurm_cluster import QUERY, until

pytestmark = pytest.mark.components

ROOT = Path(__file__).parents[2]
GPUS, STEPS_S, AWAY_S = 2, 2.0, 4.0
TRAINER = f"""
import json, time
for step in range(1, 6):
    time.sleep({STEPS_S} / 5)
    print(json.dumps({{"step": step, "step_s": 0.5}}), flush=True)
"""


def ray_jobs(cluster: RayCluster, prefix: str) -> dict[str, Any]:
    """Ray's own records of the jobs with this prefix, by job name."""
    listed = cluster.launcher(prefix=prefix)._list_jobs()
    return {
        handle.removeprefix(prefix): job
        for handle, job in listed.items()
        if handle.startswith(prefix)
    }


def test_a_head_that_is_away_is_waited_for_and_nothing_is_lost_or_run_twice(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """A proxy's 503 before the first job is taken, its 429 until that one is long over, and a lost
    answer to the second.
    """
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    query = schema.parse_query(
        {
            **QUERY,
            "cluster": {"gpu": "cpu", "num_gpus": GPUS, "gpus_per_node": GPUS},
            "search": {**QUERY["search"], "launcher": "ray", "budget_runs": 2},
            "trainer": {
                "command": [sys.executable, str(script), "{flags:megatron-lm}"],
                "reader": "json",
                "launch": "command",
            },
        }
    )
    waits: list[str] = []

    def hear(kind: str, payload: dict[str, Any]) -> None:
        if kind == "waiting":
            waits.append(payload["waiting_for"])

    def first_job_is(*states: str) -> bool:
        return any(str(job.status) in states for job in ray_jobs(ray_cluster, "away-").values())

    with (
        closing(open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")) as store,
        proxy_of(ray_cluster.address) as proxy,
        ThreadPoolExecutor(1) as pool,
    ):
        launcher = ray_cluster.launcher(prefix="away-", address=proxy.address)
        assert launcher.find("job-1") is None  # the client's first words are about versions
        proxy.status = 503
        search = pool.submit(tune, query=query, store=store, launcher=launcher, on_event=hear)
        until(lambda: search.done() or waits)
        time.sleep(AWAY_S)
        assert not search.done() and ray_jobs(ray_cluster, "away-") == {}
        proxy.status = None
        until(lambda: first_job_is("RUNNING"))
        proxy.status, seen = 429, proxy.refused
        until(lambda: first_job_is("SUCCEEDED"))
        time.sleep(AWAY_S)
        assert not search.done() and proxy.refused > seen
        proxy.lost_submissions, proxy.status = 1, None
        result = search.result(timeout=120)
        runs = store.runs(search_id=result.search.id)

    assert len(waits) == 1 and "status code 503" in waits[0]  # a lost answer is asked for at once
    assert proxy.lost_submissions == 0
    assert [(run.state, run.attempt) for run in runs] == [(RunState.FINISHED, 0)] * 2
    assert result.search.state == "succeeded" and result.search.profile_runs == 2
    jobs = ray_jobs(ray_cluster, "away-")
    assert sorted(jobs) == sorted(run.job_name for run in runs)
    for run in runs:
        assert run.measurement is not None and (run.measurement.status, run.measurement.step_s) == (
            "ok",
            0.5,
        )
        assert run.account is not None and run.gpu_seconds == pytest.approx(
            GPUS * run.account["wall_s"]
        )
        lasted_s = (jobs[run.job_name].end_time - jobs[run.job_name].start_time) / 1e3
        assert run.account["wall_s"] >= STEPS_S
        assert run.account["queue_s"] + run.account["wall_s"] == pytest.approx(
            lasted_s
        )  # none of what the head was away for
    assert result.search.gpu_seconds == pytest.approx(sum(run.gpu_seconds or 0.0 for run in runs))


def test_a_proxys_page_is_no_word_of_ray(ray_cluster: RayCluster) -> None:
    with proxy_of(ray_cluster.address) as proxy:
        launcher = ray_cluster.launcher(prefix="page-", address=proxy.address)
        assert launcher.find("job-1") is None
        proxy.status = 404
        with pytest.raises(LauncherError) as refused:
            launcher.find("job-1")
        assert refused.value.code == "launcher_failed" and len(PAGE) > 1000
        proxy.status = 503
        with pytest.raises(LauncherError, match="status code 503") as away:
            launcher.find("job-1")
        assert away.value.code == "engine_away"


@pytest.mark.long
def test_a_search_by_the_command_line_with_real_steps(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    options = {
        **OPTIONS,
        "address": ray_cluster.address,
        "job_prefix": "whole-",
        "environment": {"PYTHONPATH": str(ROOT)},
    }
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump(options))
    environment = {
        **os.environ,
        "HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}",
        "HP_RAY_CONFIG": str(tmp_path / "ray.yaml"),
        "PYTHONPATH": str(ROOT),
    }
    example = str(ROOT / "examples" / "quickstart.yaml")
    smaller = (
        "search.launcher=ray",
        "search.budget_runs=3",
        "search.steps=2",
        "search.configurations_per_job=1",
    )
    settings = [word for setting in smaller for word in ("--set", setting)]
    command = [*COMMAND, "tune", "--json", example, *settings]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    with closing(open_store(environment["HP_DATABASE_URL"])) as store:
        runs = store.runs(search_id=result["search"]["id"])
    assert result["search"]["profile_runs"] == 3
    assert "ok" in [
        row["measurement"]["status"] for row in result["recommendations"] if row["measurement"]
    ]
    assert result["answer"]["source"] == "calibrated"
    for run in runs:
        assert run.measurement is not None and run.measurement.status == "ok", run.measurement
        assert run.measurement.losses[-1] < run.measurement.losses[0]
        assert run.account is not None and run.gpu_seconds == pytest.approx(
            2 * run.account["wall_s"]
        )
        assert (
            run.measurement.wall_s == pytest.approx(run.account["wall_s"])
            and run.account["queue_s"] < 60.0
        )
    assert sorted(ray_jobs(ray_cluster, "whole-")) == sorted(run.job_name for run in runs)
