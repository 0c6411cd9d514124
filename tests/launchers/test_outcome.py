"""How a job without a result of its own is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.steps import RUN, step_line
from hp_tool.launchers.jobs import Ending, measure

RANK_KILLED = "  traceback : Signal 9 (SIGKILL) received by PID 4711\n===="  # torchrun's summary


@pytest.mark.parametrize(
    ("ending", "log", "status", "cause"),
    [
        (Ending(reason="exited", exit_code=1), "ValueError: no\n\n", "crashed", "exit code 1 without a result: ValueError: no"),
        (Ending(reason="exited", exit_code=0), "", "crashed", "exit code 0 without a result: the log is empty"),
        (Ending(reason="exited", exit_code=-9, oom_kills=1), "", "oom", "the kernel killed a process for lack of host memory"),
        (
            Ending(reason="exited", exit_code=1, oom_kills=1),
            RANK_KILLED,
            "oom",
            "the kernel killed a process for lack of host memory",
        ),
        (Ending(reason="exited", exit_code=1), RANK_KILLED, "crashed", "a process was killed by signal 9"),
        (
            Ending(reason="exited", exit_code=1),
            "OSError: [Errno 28] No space left on device",
            "preempted",
            "exit code 1 without a result: OSError: [Errno 28] No space left on device",
        ),
        (Ending(reason="timeout"), "step 1", "timeout", "not done after 30 s"),
        (Ending(reason="cancelled"), "step 1", "preempted", "cancelled on request"),
        (Ending(reason="lost"), "", "preempted", "the machine was shut down or the job's supervisor killed"),
    ],
)
def test_without_a_result(tmp_path: Path, ending: Ending, log: str, status: str, cause: str) -> None:
    (tmp_path / "job.log").write_text(log)
    hardware = Hardware(gpu="cpu", num_gpus=2)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=hardware)
    assert (found.status, found.cause, found.log_tail, found.hardware) == (status, cause, log, hardware)


@pytest.mark.parametrize(
    ("reason", "status"), [("timeout", "ok"), ("terminated", "ok"), ("cancelled", "preempted"), ("exited", "crashed")]
)
def test_a_run_that_is_cut_off_keeps_the_steps_it_measured(tmp_path: Path, reason: str, status: str) -> None:
    versions = Measurement(status="ok", versions={"torch": "2.13"}, differences={"apply_rope_fusion": ("transformer-engine",)})
    times = ((1, 9.0), (2, 1.0), (3, 1.2))
    lines = [step_line(number, warmup=(1, 5), time_s=time_s, loss=5.0, norm=1.0) for number, time_s in times]
    header = RUN + TypeAdapter(Measurement).dump_json(versions).decode()
    (tmp_path / "job.log").write_text("\n".join(("NCCL says", header, *lines[:2], "a rank speaks", lines[2], "")))
    ending = Ending(reason=reason, exit_code=1, wall_s=60.0)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu="cpu"))
    assert found.status == status
    if status == "ok":
        assert (found.step_s, found.step_times_s, found.warmup_times_s) == (1.1, (1.0, 1.2), (9.0,))
        assert (found.versions, found.differences, found.wall_s) == (versions.versions, versions.differences, 60.0)
        assert found.cause is not None and found.cause.startswith("2 steps measured: ")


def test_a_host_out_of_memory_is_no_device_out_of_memory(tmp_path: Path) -> None:
    ending = Ending(reason="exited", exit_code=137, oom_kills=1)
    statuses = {}
    for gpu in ("cpu", "h100-sxm-80gb"):
        found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu=gpu))
        assert found.cause is not None and "lack of host memory" in found.cause
        statuses[gpu] = found.status
    assert statuses == {"cpu": "oom", "h100-sxm-80gb": "crashed"}


def test_of_equal_accounts_the_first_is_the_cause(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        (tmp_path / f"result.rank{rank}.json").write_text(f'{{"status": "crashed", "cause": "rank {rank}"}}')
        (tmp_path / f"result.rank{rank}.json").touch()
    found = measure(tmp_path, ending=Ending(reason="exited", exit_code=1), timeout_s=30.0, hardware=Hardware(gpu="cpu"))
    assert found.cause == "rank 2"
