"""Analyse the upload in a folder: `python -m service.analysis FOLDER`.

The process ends when its standard input closes, so that it does not outlive the service.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import resource
import sys
import threading
import time
from pathlib import Path

from hp_tool.domain import bounds
from hp_tool.domain.bounds import Bounds
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import schema
from hp_tool.traces.explain.recorded import explain_files
from service.analysis.job import (
    ANSWER,
    JOB,
    MAX_ANSWER_BYTES,
    MIB,
    TOO_COSTLY,
    Job,
    Limits,
    write_error,
)

CPU_GRACE_S = 2
"""CPU seconds between the limit that Python checks and the limit that the kernel enforces."""
ABANDONED = 3
"""Exit code if the service closes standard input."""


def main() -> None:
    """Write the answer or the error into the folder, and return the exit code."""
    folder = Path(sys.argv[1])
    job: Job = pickle.loads((folder / JOB).read_bytes())  # noqa: S301  the service wrote it
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    restrict(job.limits)
    content = _analyse(job, folder)
    if content is not None and len(content) > MAX_ANSWER_BYTES:
        message = f"The answer is larger than {MAX_ANSWER_BYTES // MIB} MiB. Send fewer ranks."
        write_error(folder, InputError(message, field="trace", code=TOO_COSTLY))
    elif content is not None:
        (folder / ANSWER).write_bytes(content)


def restrict(limits: Limits) -> None:
    """Set this process's resource limits, and make it the OOM killer's first victim."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    memory = _address_space_bytes() + int(limits.memory_mib * MIB)
    cpu_s = math.ceil(limits.cpu_s + time.process_time()) + CPU_GRACE_S
    for kind, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL.
        (resource.RLIMIT_FSIZE, MAX_ANSWER_BYTES + MIB, MAX_ANSWER_BYTES + MIB),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        hard_limit = resource.getrlimit(kind)[1]
        if hard_limit != resource.RLIM_INFINITY:
            soft, hard = min(soft, hard_limit), min(hard, hard_limit)
        with contextlib.suppress(ValueError, OSError):  # Not all systems have this limit.
            resource.setrlimit(kind, (soft, hard))


def _analyse(job: Job, folder: Path) -> bytes | None:
    """Return the answer as JSON; None if an error was written instead."""
    limits, started_s = job.limits, time.process_time()

    def check(_: Bounds) -> None:
        if time.process_time() - started_s > limits.cpu_s:
            raise limits.out_of_time()

    own = Bounds(
        max_combinations=limits.max_combinations,
        max_values=limits.max_values,
        max_yaml_bytes=limits.max_yaml_bytes,
        check=check,
    )
    error: HpToolError
    try:
        with bounds.apply_bounds(own):
            return schema.to_json(
                explain_files(job.paths, names=job.names, query=job.query)
            ).encode()
    except HpToolError as refused:
        error = refused
    except MemoryError:
        error = limits.out_of_memory()
    # Runs outside the except block, so that the traceback no longer holds the upload's memory.
    write_error(folder, error)
    return None


def _address_space_bytes() -> int:
    """Return the size of this process's address space in bytes; 0 without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _end_with_the_service() -> None:
    # Reading sys.stdin itself would hold its lock when the interpreter exits.
    os.read(sys.stdin.fileno(), 1)
    os._exit(ABANDONED)


if __name__ == "__main__":
    main()
