"""From what a job left in its folder to one Measurement: the numbers, or the root cause."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hp_tool.domain.measurement import Hardware, Measurement, MeasurementStatus
from hp_tool.launchers import jobs

_MEASUREMENT = TypeAdapter(Measurement)
# What a rank says when it failed only because another had: never the root cause while a better one is known.
_SECONDARY = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "DistBackendError",
    "DistNetworkError",
)
_FOLDER_TROUBLE = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
"""What a job says where its folder took its result no more."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_KILLED_IN_LOG = f"Signal {int(signal.SIGKILL)} (SIGKILL)"  # torchrun's report on a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the engine says a job ended."""

    reason: str
    """exited, timeout, cancelled, terminated, failed_to_start or lost."""
    exit_code: int | None = None
    wall_s: float | None = None
    oom_kills: int = 0
    """Processes the kernel killed for want of memory while the job ran."""
    error: str | None = None


def recorded(ended: Mapping[str, Any]) -> Ending:
    """How a job ended, by its supervisor's record."""
    return Ending(
        reason=ended.get("reason", "lost"),
        exit_code=ended.get("exit_code"),
        wall_s=ended.get("wall_s"),
        oom_kills=ended.get("oom_kills", 0),
        error=ended.get("error"),
    )


def measure(folder: Path, *, ending: Ending, timeout_s: float, hardware: Hardware) -> Measurement:
    """The job's own result where it is whole, whatever the exit code says; else why there is none, and the end of the log."""
    result = _read(folder / jobs.RESULT)
    if result is not None:
        return replace(result, wall_s=ending.wall_s if ending.wall_s is not None else result.wall_s)
    tail = jobs.log_tail(folder)
    failed = _root_cause(folder) or _torn(folder, ending) or _without_account(ending, tail=tail, timeout_s=timeout_s)
    if failed.status == "crashed" and any(trouble in (failed.cause or "") for trouble in _FOLDER_TROUBLE):
        failed = replace(failed, status="preempted")  # says nothing about the configuration
    exit_code = ending.exit_code if ending.reason == "exited" else None
    return replace(failed, hardware=hardware, wall_s=ending.wall_s, exit_code=exit_code, log_tail=failed.log_tail or tail)


def _read(path: Path) -> Measurement | None:
    try:
        return _MEASUREMENT.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None


def _torn(folder: Path, ending: Ending) -> Measurement | None:
    """A result that its writer was content with and that was cut off since says nothing about the configuration."""
    path = folder / jobs.RESULT
    if ending.exit_code != 0 or not path.exists() or jobs.read_json(path) is not None:
        return None
    return Measurement(status="preempted", cause=f"{jobs.RESULT} is cut off")


def _root_cause(folder: Path) -> Measurement | None:
    """The account of the rank that failed first of its own; ranks write theirs as result.rank<r>.json."""
    stem, suffix = Path(jobs.RESULT).stem, Path(jobs.RESULT).suffix
    paths = sorted(folder.glob(f"{stem}.rank*{suffix}"), key=lambda path: path.stat().st_mtime_ns)
    accounts = [account for path in paths if (account := _read(path)) is not None]
    return min(accounts, key=_rank_of_evidence, default=None)


def _rank_of_evidence(account: Measurement) -> int:
    """Out of memory explains everything else; a lost connection explains nothing."""
    if account.status == "oom":
        return 0
    return 2 if any(mark in (account.cause or "") for mark in _SECONDARY) else 1


def _without_account(ending: Ending, *, tail: str, timeout_s: float) -> Measurement:
    status, cause = _explain(ending, tail=tail, timeout_s=timeout_s)
    return Measurement(status=status, cause=cause)


def _explain(ending: Ending, *, tail: str, timeout_s: float) -> tuple[MeasurementStatus, str]:
    match ending.reason:
        case "timeout":
            return "timeout", f"not done after {timeout_s:g} s"
        case "cancelled":
            return "preempted", "cancelled on request"
        case "terminated" | "lost":
            return "preempted", ending.error or "the machine was shut down or the job's supervisor killed"
        case "failed_to_start":
            return "crashed", ending.error or "the job could not be started"
    killed = ending.exit_code in _KILLED or _KILLED_IN_LOG in tail
    if killed and ending.oom_kills > 0:
        return "oom", "the kernel killed a process for want of host memory"
    if killed:
        return "crashed", "a process was killed by signal 9"
    return "crashed", f"exit code {ending.exit_code} without a result: {jobs.last_line(tail)}"
