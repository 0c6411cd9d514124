"""Run the child process that analyses an upload, and kill it if the client disconnects."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

from hp_tool.domain import bounds
from hp_tool.errors import HpToolError, InputError
from service.analysis.job import ANSWER, JOB, MAX_ANSWER_BYTES, TOO_COSTLY, Job, read_error

log = logging.getLogger(__name__)
POLL_S = 0.05
"""Seconds between checks whether the client is still waiting."""
WALL_FACTOR, WALL_EXTRA_S = 4.0, 10.0
"""Wall-clock limit: seconds per CPU second of the limit, and extra seconds for startup on a busy
machine.
"""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables for thread counts. Each numpy thread would reserve address space."""
SECRETS = (
    "HP_API_KEY",
    "HP_API_KEY_FILE",
    "HP_DATABASE_URL",
    "HP_WEBHOOK_SECRET",
    "HP_WEBHOOK_SECRET_FILE",
)
"""Environment variables with secrets, which a process that reads untrusted files must not have."""
_LOG_CHARACTERS = 4000


def analyse(job: Job, *, folder: Path) -> bytes:
    """Return the answer to `job` as JSON.

    `folder` contains the uploaded files and receives the answer. Call this function in a thread. If
    `bounds.check_work` raises an error, the child process is killed.

    Raises:
        HpToolError: The upload cannot be explained within the limits, or the client disconnected.
    """
    bounds.check_work()  # The client may have disconnected while waiting for its turn.
    environment = {
        name: value for name, value in os.environ.items() if name not in SECRETS
    } | dict.fromkeys(THREADS, "1")
    command = [sys.executable, "-m", "service.analysis", str(folder)]
    output = folder / "output"
    (folder / JOB).write_bytes(pickle.dumps(job))
    deadline = time.monotonic() + WALL_FACTOR * job.limits.cpu_s + WALL_EXTRA_S
    with (
        output.open("wb") as written,
        # Standard input closes when this process ends. The child process then exits too.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=written, stderr=written, env=environment
        ) as child,
    ):
        try:
            while _is_running(child):
                bounds.check_work()
                if time.monotonic() > deadline:
                    raise job.limits.out_of_time()
        finally:
            child.kill()
    answer = folder / ANSWER
    if child.returncode == 0 and (error := read_error(folder)) is not None:
        raise error
    if child.returncode == 0 and answer.is_file() and answer.stat().st_size <= MAX_ANSWER_BYTES:
        return answer.read_bytes()
    raise _failure(job, returncode=child.returncode, output=output)


def _is_running(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _failure(job: Job, *, returncode: int, output: Path) -> HpToolError:
    with output.open("rb") as stream:
        stream.seek(max(output.stat().st_size - _LOG_CHARACTERS, 0))
        text = stream.read().decode(errors="replace")
    if returncode == -signal.SIGXCPU:
        return job.limits.out_of_time()
    if "MemoryError" in text:
        return job.limits.out_of_memory()
    log.error("the analysis of an upload ended with exit code %d: %s", returncode, text)
    if returncode < 0:
        message = (
            f"Reading this upload ended with signal {-returncode}, perhaps for lack of "
            "memory. Record fewer steps."
        )
        return InputError(message, field="trace", code=TOO_COSTLY)
    return HpToolError("the analysis of the upload failed; it has been logged")
