"""Real profile runs through the local launcher: torchrun, Megatron Core, gloo."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import psutil
import pytest

from hp_tool.cluster.launchers import create
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.states import JobState
from tests.conftest import skip_or_fail
from tests.launchers.contract import wait
from tests.profiler.requests import request

pytestmark = pytest.mark.components

TP2 = {"tensor_parallel_size": 2, "sequence_parallel": True}


@pytest.fixture(autouse=True)
def _megatron() -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        skip_or_fail(
            component="MEGATRON",
            reason="torch and megatron-core (the profiler extra) are not installed",
        )


def _profile(root: Path, **changes: Any) -> Measurement:
    launcher = create("local", root=root, cpu_only=True)
    handle = launcher.submit(launcher.plan(request(**changes), job_name="run"))
    assert wait(launcher, handle, until={JobState.FINISHED}) is JobState.FINISHED
    folder = str(root / "run")
    assert not [
        p for p in psutil.process_iter() if folder in _folder_of(p) and not _is_supervisor(p)
    ]
    return launcher.fetch(handle)


def _folder_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("HP_JOB_FOLDER", "")
    except psutil.Error:
        return ""


def _is_supervisor(process: psutil.Process) -> bool:
    try:
        return any(part.endswith("supervisor.py") for part in process.cmdline())
    except psutil.Error:
        return True


@pytest.mark.long
def test_a_run_over_two_processes(tmp_path: Path) -> None:
    measurement = _profile(tmp_path, parallel=TP2)
    assert measurement.status == "ok", measurement.log_tail
    assert len(measurement.step_times_s) == 2
    assert (
        measurement.wall_s is not None
        and measurement.step_s is not None
        and measurement.wall_s > measurement.step_s
    )


def test_running_out_of_memory_is_told_as_such(tmp_path: Path) -> None:
    # One weight of 192 TiB: more than a process can address, so that no machine even tries to give
    # it.
    model = {
        "num_hidden_layers": 2,
        "hidden_size": 2**22,
        "num_attention_heads": 2**16,
        "vocab_size": 4,
    }
    measurement = _profile(
        tmp_path, model=model, training={"sequence_length": 4, "global_batch_size": 1}
    )
    assert measurement.status == "oom", measurement.log_tail
    assert "can't allocate memory" in (measurement.cause or "")


def test_a_refused_configuration_is_a_crash_with_its_cause(tmp_path: Path) -> None:
    measurement = _profile(tmp_path, parallel={"zero_stage": 3})
    assert measurement.status == "crashed"
    assert "The profiler does not support zero_stage: 3" in (measurement.cause or "")


def test_a_run_past_its_limit_is_ended_while_torchrun_works(tmp_path: Path) -> None:
    measurement = _profile(tmp_path, parallel=TP2, steps=100_000, timeout_s=6.0)
    assert measurement.status == "timeout", measurement.log_tail
    assert measurement.hardware is not None and measurement.hardware.num_gpus == 2
