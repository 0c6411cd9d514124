"""The Ray launcher on a real Ray cluster of this host: the contract, two nodes, a whole search, and
what only it promises.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hp_tool.cluster.launchers import create
from hp_tool.domain.ports import Launcher
from hp_tool.domain.states import JobState
from hp_tool.errors import InputError, LauncherError
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.conftest import skip_or_fail
from tests.launchers.contract import (
    GOOD,
    EngineContract,
    FurtherContract,
    Launching,
    ResultContract,
    plan,
    processes,
    started,
    wait,
)
from tests.launchers.ray_cluster import OPTIONS, RayCluster
from tests.profiler.requests import request

pytestmark = pytest.mark.components

EXAMPLES = Path(__file__).parents[2] / "examples"
_COUNT = itertools.count()


@pytest.fixture
def prefix() -> str:
    return f"test{next(_COUNT)}-"  # one cluster for all tests, and every one has a job-1


class OnRay(Launching):
    @pytest.fixture
    def new_launcher(self, ray_cluster: RayCluster, prefix: str) -> Callable[[], Launcher]:
        return lambda: ray_cluster.launcher(prefix=prefix)


@pytest.mark.long
class TestRayFurther(OnRay, FurtherContract, ResultContract):
    pass


class TestRayLauncher(OnRay, EngineContract):
    @pytest.mark.long
    def test_a_job_over_two_nodes_and_its_end(self, ray_cluster: RayCluster, prefix: str) -> None:
        ray_cluster.add_node()
        launcher = ray_cluster.launcher(prefix=prefix, gpus_per_node=1)
        both = (
            "import os, time\nif os.environ['PET_NODE_RANK'] == '1': time.sleep(1); raise "
            "SystemExit\n"
        )
        handle = launcher.submit(replace(plan(both + GOOD), num_gpus=2))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        assert launcher.fetch(handle).status == "ok"
        stuck = (
            "import os, time\nif os.environ['PET_NODE_RANK'] == '0': time.sleep(300)\nraise "
            "ValueError('node 1 is on fire')"
        )
        handle = launcher.submit(replace(plan(stuck, job_name="job-2"), num_gpus=2, timeout_s=60.0))
        assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
        measurement = launcher.fetch(handle)
        assert (measurement.status, measurement.cause) == (
            "crashed",
            "exit code 1 without a result: ValueError: node 1 is on fire",
        )
        assert processes("job-2") == []

    def test_jobs_wait_for_devices(self, launcher: Launcher) -> None:
        first = started(launcher)
        whole = replace(plan(GOOD, job_name="job-2"), num_gpus=OPTIONS["gpus_per_node"])
        second = launcher.submit(whole)
        assert launcher.poll([first, second]) == {first: JobState.RUNNING, second: JobState.QUEUED}
        with pytest.raises(LauncherError, match="still queued"):
            launcher.fetch(second)
        launcher.cancel("job-2")
        launcher.cancel("job-1")
        assert (
            wait(launcher, second, until={JobState.CANCELLED, JobState.FINISHED})
            is JobState.CANCELLED
        )


@pytest.mark.long
def test_a_search_over_two_ray_nodes(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Real Megatron Core steps, one process a node."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    ray_cluster.add_node()
    launcher = ray_cluster.launcher(
        prefix="search-", gpus_per_node=1, environment={"GLOO_SOCKET_IFNAME": "lo"}
    )
    query = schema.parse_query((EXAMPLES / "slurm.yaml").read_bytes())
    query = replace(query, search=replace(query.search, launcher="ray", budget_runs=2))
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    try:
        result = tune(query=query, store=store, launcher=launcher)
        runs = store.runs(search_id=result.search.id)
    finally:
        store.close()
    assert result.search.profile_runs == 2
    for run in runs:
        assert run.measurement is not None and run.measurement.status == "ok", run.measurement
        assert run.measurement.losses[-1] < run.measurement.losses[0]
    assert any(row.measurement is not None for row in result.recommendations)


def test_a_cluster_that_does_not_answer_is_a_launchers_error() -> None:
    options = {**OPTIONS, "address": "http://127.0.0.1:1"}
    with pytest.raises(LauncherError, match=r"Ray at http://127\.0\.0\.1:1"):
        create("ray", options=options).find("job-1")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"address": "127.0.0.1:1; rm"}, "ray.address"),
        ({"python": "python; rm"}, "ray.python"),
        ({"job_prefix": "a/b"}, "ray.job_prefix"),
        ({"gpus_per_node": 0}, "ray.gpus_per_node"),
        ({"surprise": 1}, "ray.surprise"),
    ],
)
def test_options_are_read_strictly(change: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        create("ray", options={**OPTIONS, **change})
    assert refused.value.field == field


def test_the_plan_is_torchrun_on_every_node() -> None:
    launcher = create("ray", options={**OPTIONS, "gpus_per_node": 1, "python": "python3"})
    asked = request(parallel={"tensor_parallel_size": 2, "sequence_parallel": True})
    assert launcher.plan(asked, job_name="a").command == (
        *("python3", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("-m", "hp_tool.cluster.profiler", "request.json", "result.json"),
    )
    with pytest.raises(InputError, match="This Ray cluster has cpu"):
        launcher.plan(replace(asked, gpu="h100-sxm-80gb"), job_name="a")
