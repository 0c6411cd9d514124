"""How a job without a result of its own is explained."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from hp_tool.cluster.launchers.jobs import Ending, measure, parse_ending
from hp_tool.cluster.launchers.readback import MAX_FILE_BYTES, log_tail, read_json
from hp_tool.domain.measurement import KILLED_CAUSE, Hardware, Measurement
from hp_tool.domain.steps import RUN_PREFIX, format_step

RANK_KILLED = "  traceback : Signal 9 (SIGKILL) received by PID 4711\n===="  # torchrun's summary


@pytest.mark.parametrize(
    ("ending", "log", "status", "cause"),
    [
        (
            Ending(reason="exited", exit_code=1),
            "ValueError: no\n\n",
            "crashed",
            "exit code 1 without a result: ValueError: no",
        ),
        (
            Ending(reason="exited", exit_code=0),
            "",
            "crashed",
            "exit code 0 without a result: the log is empty",
        ),
        (
            Ending(reason="exited", exit_code=-9, oom_kills=1),
            "",
            "oom",
            "the kernel killed a process: out of host memory",
        ),
        (
            Ending(reason="exited", exit_code=1, oom_kills=1),
            RANK_KILLED,
            "oom",
            "the kernel killed a process: out of host memory",
        ),
        (
            Ending(reason="exited", exit_code=1),
            RANK_KILLED,
            "preempted",
            "a process was killed by signal 9",
        ),
        (
            Ending(reason="exited", exit_code=1),
            "OSError: [Errno 28] No space left on device",
            "preempted",
            "exit code 1 without a result: OSError: [Errno 28] No space left on device",
        ),
        (
            Ending(reason="exited", exit_code=1),
            "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. "
            "1/2 clients joined.",
            "preempted",
            "too few nodes joined the rendezvous: Timed out after 901 seconds waiting for clients",
        ),
        (Ending(reason="timeout"), "step 1", "timeout", "hit the 30 s limit"),
        (Ending(reason="cancelled"), "step 1", "preempted", "cancelled on request"),
        (
            Ending(reason="lost"),
            "",
            "preempted",
            "the machine was shut down or the supervisor was killed",
        ),
    ],
)
def test_without_a_result(
    tmp_path: Path, ending: Ending, log: str, status: str, cause: str
) -> None:
    (tmp_path / "job.log").write_text(log)
    hardware = Hardware(gpu="cpu", num_gpus=2)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=hardware)
    assert (found.status, found.cause, found.log_tail, found.hardware) == (
        status,
        cause,
        log,
        hardware,
    )


@pytest.mark.parametrize(
    ("reason", "status"),
    [("timeout", "ok"), ("terminated", "ok"), ("cancelled", "preempted"), ("exited", "crashed")],
)
def test_a_run_that_is_cut_off_keeps_the_steps_it_measured(
    tmp_path: Path, reason: str, status: str
) -> None:
    versions = Measurement(
        status="ok",
        versions={"torch": "2.13"},
        differences={"apply_rope_fusion": ("transformer-engine",)},
    )
    times = ((1, 9.0), (2, 1.0), (3, 1.2))
    lines = [
        format_step(number, warmup=(1, 5), time_s=time_s, loss=5.0, norm=1.0)
        for number, time_s in times
    ]
    header = RUN_PREFIX + TypeAdapter(Measurement).dump_json(versions).decode()
    (tmp_path / "job.log").write_text(
        "\n".join(("NCCL says", header, *lines[:2], "a rank speaks", lines[2], ""))
    )
    ending = Ending(reason=reason, exit_code=1, wall_s=60.0)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu="cpu"))
    assert found.status == status
    if status == "ok":
        assert (found.step_s, found.step_times_s, found.warmup_times_s) == (1.1, (1.0, 1.2), (9.0,))
        assert (found.versions, found.differences, found.wall_s) == (
            versions.versions,
            versions.differences,
            60.0,
        )
        assert found.cause is not None and found.cause.startswith("2 steps measured: ")


def test_a_host_out_of_memory_is_no_device_out_of_memory(tmp_path: Path) -> None:
    ending = Ending(reason="exited", exit_code=137, oom_kills=1)
    statuses = {}
    for gpu in ("cpu", "h100-sxm-80gb"):
        found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu=gpu))
        assert found.cause is not None and "out of host memory" in found.cause
        statuses[gpu] = found.status
    assert statuses == {"cpu": "oom", "h100-sxm-80gb": "crashed"}


def test_of_equal_accounts_the_first_is_the_cause(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        (tmp_path / f"result.rank{rank}.json").write_text(
            f'{{"status": "crashed", "cause": "rank {rank}"}}'
        )
        (tmp_path / f"result.rank{rank}.json").touch()
    found = measure(
        tmp_path,
        ending=Ending(reason="exited", exit_code=1),
        timeout_s=30.0,
        hardware=Hardware(gpu="cpu"),
    )
    assert found.cause == "rank 2"


def test_a_rank_that_was_killed_explains_why_others_lost_it(tmp_path: Path) -> None:
    report = tmp_path / "result.rank1.json"
    report.write_text(
        '{"status": "crashed", "cause": "RuntimeError: Connection closed by peer [127.0.0.1]:5000"}'
    )
    (tmp_path / "job.log").write_text(RANK_KILLED)
    ending = Ending(reason="exited", exit_code=1)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu="cpu"))
    assert (found.status, found.cause) == ("preempted", KILLED_CAUSE)
    report.write_text('{"status": "crashed", "cause": "ValueError: a fault of its own"}')
    assert (
        measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu="cpu")).status
        == "crashed"
    )


NOTHING_IS_LIKE_THIS = {
    "a step backwards": '{"status": "ok", "step_s": -1}',
    "no number": '{"status": "ok", "step_s": NaN}',
    "more than a database holds": '{"status": "ok", "step_s": 1.0, "peak_memory_bytes": '
    "9223372036854775808}",
    "a warm-up that never ends": '{"status": "ok", "step_s": 1.0, "warmup_times_s": [1e300]}',
    "a word of its own": '{"status": "ok", "step_s": 1.0, "faster": true}',
    "nested without end": "[" * 100_000 + "]" * 100_000,
    "too large": " " * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("text", NOTHING_IS_LIKE_THIS.values(), ids=NOTHING_IS_LIKE_THIS)
def test_a_result_that_no_run_is_like_is_a_crash_with_its_cause(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    (tmp_path / "job.log").write_text("the end")
    ending = Ending(reason="exited", exit_code=0, wall_s=9.0)
    found = measure(tmp_path, ending=ending, timeout_s=30.0, hardware=Hardware(gpu="cpu"))
    assert (found.status, found.step_s, found.wall_s, found.log_tail) == (
        "crashed",
        None,
        9.0,
        "the end",
    )
    assert found.cause is not None and found.cause.startswith("result.json is invalid: ")


@pytest.mark.parametrize("name", ["result.json", "job.log", "result.rank0.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "socket", "folder"])
def test_what_is_no_plain_file_is_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    path, secret = tmp_path / name, tmp_path / "secret"
    secret.write_text('{"status": "ok", "step_s": 1.0, "cause": "a secret"}')
    match kind:
        case "pipe":
            os.mkfifo(path)  # whoever opens it waits for a writer
        case "link":
            path.symlink_to(secret)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(os.path.relpath(path))
        case "folder":
            path.mkdir()
    found = measure(
        tmp_path,
        ending=Ending(reason="exited", exit_code=1),
        timeout_s=30.0,
        hardware=Hardware(gpu="cpu"),
    )
    assert (found.status, found.step_s) == ("crashed", None)
    assert "secret" not in f"{found.cause}{found.log_tail}"
    assert read_json(path) is None and log_tail(tmp_path, name=name) == ""


@pytest.mark.parametrize(
    "record",
    [{"wall_s": "NaN"}, {"wall_s": -1.0}, {"exit_code": 1 << 40}, {"reason": 7}, {"error": []}],
)
def test_a_record_of_the_end_that_makes_no_sense_is_none(record: dict[str, object]) -> None:
    found = parse_ending({"reason": "exited", "exit_code": 0, **record})
    assert (found.reason, found.wall_s) == ("lost", None)
    assert found.error is not None and "is invalid" in found.error


def test_steps_in_a_log_that_no_run_has_are_none(tmp_path: Path) -> None:
    line = format_step(2, warmup=(1, 1), time_s=0.0, loss=5.0, norm=1.0)
    (tmp_path / "job.log").write_text(line + "\n")
    found = measure(
        tmp_path, ending=Ending(reason="timeout"), timeout_s=30.0, hardware=Hardware(gpu="cpu")
    )
    assert (found.status, found.step_s) == ("timeout", None)
