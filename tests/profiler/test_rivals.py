"""One job, several configurations: each is measured as alone, and one that fails costs the others
nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from hp_tool.cluster.launchers import create
from hp_tool.domain.measurement import JobResult
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.states import JobState
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.profiler.requests import request

pytestmark = [pytest.mark.components, pytest.mark.long]


def test_rivals_train_the_same_model_and_one_that_cannot_run_ends_the_job(tmp_path):
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )
    first = request(parallel={"tensor_parallel_size": 2})
    rivals = (
        ParallelConfig(pipeline_parallel_size=2),
        ParallelConfig(data_parallel_size=2),
        ParallelConfig(data_parallel_size=3),  # on two processes
        ParallelConfig(tensor_parallel_size=2, sequence_parallel=True),
    )
    launcher = create("local", root=tmp_path, cpu_only=True)
    plan = launcher.plan(replace(first, rivals=rivals), job_name="rivals")
    handle = launcher.submit(plan)
    wait(launcher, handle, until={JobState.FINISHED})
    result = launcher.fetch(handle)
    assert isinstance(result, JobResult)
    assert result.status == "ok", result.cause
    assert len(result.rivals) == 2
    for rival in result.rivals:
        assert rival.losses == pytest.approx(result.losses, rel=1e-4)
        assert rival.step_s > 0
        assert rival.peak_memory_bytes is None
        assert rival.hardware == result.hardware
    assert result.first_measurement.wall_s == pytest.approx(
        result.wall_s - sum(rival.wall_s for rival in result.rivals)
    )
    assert 0 < sum(rival.wall_s for rival in result.rivals) < result.wall_s
