"""One Measurement from the files in a job's folder: the numbers, or the root cause of the failure."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.launchers import jobs

_MEASUREMENT = TypeAdapter(Measurement)
# Errors of a rank that failed only because another had: not the root cause if there is a better one.
_SECONDARY = (
    *("Connection closed", "Connection reset", "Broken pipe"),
    *("Timed out waiting", "DistBackendError", "DistNetworkError"),
)
_FOLDER_TROUBLE = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
"""Errors of a job that could not write its result into its folder."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_KILLED_IN_LOG = f"Signal {int(signal.SIGKILL)} (SIGKILL)"  # torchrun's report on a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job ended, by the engine or the supervisor."""

    reason: str
    """exited, timeout, cancelled, terminated, failed_to_start or lost."""
    exit_code: int | None = None
    wall_s: float | None = None
    oom_kills: int = 0
    """Processes that the kernel killed for lack of memory while the job ran."""
    error: str | None = None


def recorded(ended: Mapping[str, Any]) -> Ending:
    """How a job ended, by its supervisor's record; `lost` if that is empty."""
    known = {field.name: ended[field.name] for field in fields(Ending) if field.name in ended}
    return Ending(**{"reason": "lost", **known})


def measure(folder: Path, *, ending: Ending, timeout_s: float, hardware: Hardware) -> Measurement:
    """The job's own result if it is complete, whatever the exit code; else why there is none, and the end of the log."""
    result = _read(folder / jobs.RESULT)
    if result is not None:
        return replace(result, wall_s=ending.wall_s if ending.wall_s is not None else result.wall_s)
    tail = jobs.log_tail(folder)
    failed = _root_cause(folder) or _torn(folder, ending) or _explain(ending, tail=tail, timeout_s=timeout_s)
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
    """Preempted, if the job succeeded but its result was cut off: that says nothing about the configuration."""
    path = folder / jobs.RESULT
    if ending.exit_code != 0 or not path.exists() or jobs.read_json(path) is not None:
        return None
    return Measurement(status="preempted", cause=f"{jobs.RESULT} is cut off")


def _root_cause(folder: Path) -> Measurement | None:
    """The report of the rank that failed first by itself; ranks write theirs as result.rank<r>.json."""
    stem, suffix = Path(jobs.RESULT).stem, Path(jobs.RESULT).suffix
    paths = sorted(folder.glob(f"{stem}.rank*{suffix}"), key=lambda path: path.stat().st_mtime_ns)
    reports = [report for path in paths if (report := _read(path)) is not None]
    return min(reports, key=_order_of_evidence, default=None)


def _order_of_evidence(report: Measurement) -> int:
    """Out of memory explains everything else; a lost connection explains nothing."""
    if report.status == "oom":
        return 0
    return 2 if any(mark in (report.cause or "") for mark in _SECONDARY) else 1


def _explain(ending: Ending, *, tail: str, timeout_s: float) -> Measurement:
    """Why a job ended whose ranks left no report."""
    match ending.reason:
        case "timeout":
            return Measurement(status="timeout", cause=f"not done after {timeout_s:g} s")
        case "cancelled":
            return Measurement(status="preempted", cause="cancelled on request")
        case "terminated" | "lost":
            cause = ending.error or "the machine was shut down or the job's supervisor killed"
            return Measurement(status="preempted", cause=cause)
        case "failed_to_start":
            return Measurement(status="crashed", cause=ending.error or "the job could not be started")
    if ending.exit_code not in _KILLED and _KILLED_IN_LOG not in tail:
        cause = f"exit code {ending.exit_code} without a result: {jobs.last_line(tail)}"
        return Measurement(status="crashed", cause=cause)
    if ending.oom_kills > 0:
        return Measurement(status="oom", cause="the kernel killed a process for lack of host memory")
    return Measurement(status="crashed", cause="a process was killed by signal 9")
