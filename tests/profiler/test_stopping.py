"""Runs that end before their last step."""

from __future__ import annotations

import importlib.util

import pytest

from hp_tool.domain.jobs import JobState
from hp_tool.launchers import create
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.profiler.requests import request


@pytest.mark.parametrize(
    ("times", "limits", "words"),
    [
        ((9.0, 1.0, 1.0, 1.0, 1.0), {"step_tolerance_fraction": 0.01}, "all within 0.00%"),
        ((9.0, 1.0, 1.0, 1.0), {"step_tolerance_fraction": 0.01}, None),  # three do not hold the median safely enough
        ((9.0, 1.0, 1.0, 1.02, 1.0), {"step_tolerance_fraction": 0.01}, None),
        ((9.0, 1.0, 1.0, 1.0, 1.0), {}, None),
        ((9.0,), {"longest_step_s": 2.0}, None),  # the warm-up says nothing
        ((1.0, 2.5), {"longest_step_s": 2.0}, "hopeless"),
        ((1.0, 2.5, 1.9), {"longest_step_s": 2.0}, None),
        ((1.0, *(2.5,) * 20), {"longest_step_s": 2.0}, None),  # all steps ran: nothing was stopped
    ],
)
def test_when_steps_are_enough(times, limits, words):
    pytest.importorskip("torch")
    from hp_tool.profiler.steps import why_stop

    told = why_stop(request(steps=20, warmup_steps=1, **limits), times)
    assert (told is None) if words is None else (words in told)


@pytest.mark.distributed
def test_a_hopeless_run_ends_after_one_step_and_says_so(tmp_path):
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(component="MEGATRON", reason="torch and megatron-core (the profiler extra) are not installed")
    launcher = create("local", root=tmp_path, cpu_only=True)
    asked = request(parallel={"tensor_parallel_size": 2}, steps=10_000, warmup_steps=1, longest_step_s=1e-9)
    handle = launcher.submit(launcher.plan(asked, job_name="run"))
    assert wait(launcher, handle, until={JobState.FINISHED}, limit_s=120) is JobState.FINISHED
    measurement = launcher.fetch(handle)
    assert measurement.status == "ok", measurement.log_tail
    assert len(measurement.step_times_s) == 1
    assert measurement.step_s == measurement.step_times_s[0]
    assert "stopped after 1 of 10000 steps" in measurement.cause
