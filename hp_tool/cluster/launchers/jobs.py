"""Job folders: files that launchers write before a job starts and read after it ends.

From these files, `measure` returns a Measurement: the results, or the root cause of the failure.
"""

import contextlib
import errno
import functools
import getpass
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from hp_tool.cluster.launchers import readback
from hp_tool.cluster.launchers.readback import DamagedError
from hp_tool.domain.fields import Devices, Strict, build_validators, check_spec
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import (
    KILLED_CAUSE,
    ExitCode,
    Hardware,
    JobResult,
    Measurement,
    WallSeconds,
    interquartile_range,
)
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.steps import RUN_PREFIX, read_steps
from hp_tool.errors import InputError

REQUEST = "request.json"
RESULT = "result.json"
LOG = "job.log"
_LOG_VARIABLE = "HP_JOB_LOG_MIB"
JOB = "job.json"
DAMAGED = "the job damaged its own folder"
"""Cause of a failed run whose folder cannot be read."""
MAX_REPORTS = 64
"""Maximum number of failed ranks whose reports are read, in order of failure."""
MAX_SCANNED_FILES = 100_000
"""Maximum number of files per folder that are searched for failure reports."""
MAX_OUTPUT_BYTES = 16 * 2**20
"""Number of bytes read from the end of a log. This covers thousands of steps."""
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_Read = TypeVar("_Read", bound=Measurement)
# Errors of ranks that failed only because another rank failed.
_SECONDARY_ERRORS = (
    *("Connection closed", "Connection reset", "Broken pipe"),
    *("Timed out waiting", "DistBackendError", "DistNetworkError"),
)
_SECONDARY_RANK = 2
"""Sort key of secondary failures in `_order_of_evidence`: ranks that failed only because another
rank failed.
"""
_DISK_ERRORS = tuple(
    os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
)
"""Error messages of a job that could not write its result to disk."""
_RENDEZVOUS_TIMEOUT = re.compile(
    r"Timed out .*waiting for clients|\d+/\d+ clients joined|RendezvousTimeoutError"
)
"""Error messages of a node that timed out waiting for the other nodes. The configuration is not the
cause.
"""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_KILLED_IN_LOG = f"Signal {int(signal.SIGKILL)} (SIGKILL)"  # torchrun's report about a rank


def check_name(name: str) -> str:
    """Return `name` if it is a valid file name without a path; raise InputError otherwise."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"Job name {name!r} is invalid. Use 1 to 128 of a-z A-Z 0-9 . _ -", field="job_name"
        )
    return name


def fill_template(template: str, *, plan: LaunchPlan) -> str:
    """Replace `{search}` and `{owner}` in a template.

    The inserted names contain only characters that all launchers accept. A search without an owner
    belongs to the user of this process.

    Raises:
        InputError: A name has no allowed characters. No substitute is guessed, because the name may
            be an account to charge.
    """
    for name, value in {
        "search": plan.search or plan.job_name,
        "owner": plan.owner or _user(),
    }.items():
        if f"{{{name}}}" in template:
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:40].strip("-._")
            if not plain:
                message = (
                    f"Cannot fill {{{name}}} in {template}: {value!r} has no ASCII letters or "
                    "digits. Set an owner, or remove the placeholder."
                )
                raise InputError(message, field="cluster.runs.options")
            template = template.replace(f"{{{name}}}", plain)
    return template


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user may have no name.
        return ""


def default_root() -> Path:
    """Return HP_RUNS_DIR, by default a folder in the user's data folder."""
    from platformdirs import user_data_path

    configured = os.environ.get("HP_RUNS_DIR")
    return Path(configured) if configured else user_data_path("hp-tool") / "runs"


def create_folder(folder: Path, *, files: Mapping[str, str]) -> None:
    """Create `folder` with its files, atomically and durably. An existing folder is left unchanged.

    Raises:
        InputError: A file name is invalid, or the folder belongs to another run.
        DamagedError: The path exists and is not a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="~", dir=folder.parent))
    try:
        for name, text in files.items():
            with (temporary / check_name(name)).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(folder)  # Fails if another process has created the folder.
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as error:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise DamagedError(f"{folder} is not a folder: a job replaced it.") from error
        if not folder.is_dir():
            raise
        _check_run(folder, files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_run(folder: Path, files: Mapping[str, str]) -> None:
    run_id = json.loads(files[REQUEST])["run_id"] if REQUEST in files else None
    present = (readback.read_json(folder / REQUEST) or {}).get("run_id")
    if run_id is not None and present is not None and present != run_id:
        raise InputError(
            f"Folder {folder} belongs to run {present}, not {run_id}. Move it away.",
            field="job_name",
        )


def create_marker(folder: Path, name: str) -> None:
    """Create the empty file `name` in `folder`. Create `folder` if it is missing.

    Raises:
        DamagedError: The job damaged the folder.
        OSError: The host's file system failed.
    """
    if not readback.path_exists(folder):
        create_folder(folder, files={name: ""})
    readback.touch(folder, name)


def has_file(folder: Path, *, name: str) -> bool:
    """Return True if the job folder contains the file `name`; False if there is no runs folder.

    Raises:
        OSError: The runs folder cannot be read.
    """
    return folder.parent.is_dir() and readback.path_exists(folder / name)


def output(folder: Path, *, name: str | None = None) -> str:
    """Return the end of a job's log, or of the file `name` in its folder.

    Empty if the file is missing.
    """
    return readback.log_tail(
        folder, name=LOG if name is None else check_name(name), size_bytes=MAX_OUTPUT_BYTES
    )


def plan_text(plan: LaunchPlan) -> str:
    """Return a plan as text: environment, command, time limit and files."""
    added = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(plan.environment.items())]
    limit = f"# at most {plan.timeout_s:.0f} s, in a folder with {' and '.join(sorted(plan.files))}"
    return "\n".join([*added, shlex.join(plan.command), limit])


def max_log_bytes() -> int:
    """Return the size limit of a job's log: HP_JOB_LOG_MIB, by default 1024 MiB.

    Raises:
        InputError: The variable is not a valid number.
    """
    text = os.environ.get(_LOG_VARIABLE, "1024")
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise InputError(
            f"{_LOG_VARIABLE} is {text[:40]!r}. Use a whole number of MiB from 1 to {1 << 20}.",
            field=_LOG_VARIABLE,
        )
    return int(text) * 2**20


def last_line(tail: str) -> str:
    """Return the last log line that is neither blank nor a separator, cut to 300 characters."""
    return next(
        (line.strip()[:300] for line in reversed(tail.splitlines()) if line.strip(" =-")),
        "the log is empty",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Strict):
    """How a job ended, as reported by the launcher's scheduler or by the supervisor."""

    reason: str
    """exited, timeout, cancelled, terminated, failed_to_start, log_too_long, damaged or lost."""
    exit_code: ExitCode | None = None
    wall_s: WallSeconds | None = None
    oom_kills: int = 0
    """Number of processes that the kernel's OOM killer ended during the job."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """The part of a run request that is recorded in the job folder. The job may have changed it."""

    num_gpus: Devices
    timeout_s: WallSeconds
    returns: tuple[str, ...] = ()


def read_submission(folder: Path) -> SubmittedJob | None:
    """Return the request recorded in `folder`; None if its file is missing or invalid."""
    return readback.read_json_as(readback.json_adapter(SubmittedJob), folder / JOB)


def damaged_measurement(damage: str, *, ending: Ending, log_tail: str) -> Measurement:
    """Return the measurement of a job that damaged its own folder."""
    return Measurement(
        status="crashed",
        cause=f"{DAMAGED}: {damage}",
        wall_s=ending.wall_s,
        log_tail=log_tail or None,
    )


def parse_ending(ended: Mapping[str, Any]) -> Ending:
    """Parse a supervisor's record of how its job ended. An empty record gives the reason `lost`."""
    values = {field.name: ended[field.name] for field in fields(Ending) if field.name in ended}
    try:
        ending: Ending = readback.json_adapter(Ending).validate_python({"reason": "lost", **values})
        return ending
    except ValidationError as error:
        return Ending(
            reason="lost", error=f"the record of the job's end is invalid: {_first_error(error)}"
        )


def measure(folder: Path, *, ending: Ending, timeout_s: float, hardware: Hardware) -> Measurement:
    """Return the job's measurement.

    In order of preference, this is the complete result, whatever the exit code; the steps that
    finished before the job was cut off; or the cause of the failure with the end of the log.
    """
    tail = readback.log_tail(folder, name=LOG)
    try:
        result = _read_measurement(folder / RESULT)
    except ValueError as error:
        cause = f"{RESULT} is invalid: {error}"
        return Measurement(
            status="crashed", cause=cause, hardware=hardware, wall_s=ending.wall_s, log_tail=tail
        )
    if result is not None:
        return replace(result, wall_s=ending.wall_s if ending.wall_s is not None else result.wall_s)
    failed = (
        _root_cause(folder, killed=_was_killed(ending, tail))
        or _incomplete_result(folder, ending)
        or _unreported_failure(ending, tail=tail, timeout_s=timeout_s, cpu=hardware.gpu == "cpu")
    )
    if failed.status == "crashed" and any(
        trouble in (failed.cause or "") for trouble in _DISK_ERRORS
    ):
        # The configuration is not the cause, so the run may be repeated on another node.
        failed = replace(failed, status="preempted")
    if (
        failed.status in ("timeout", "preempted")
        and ending.reason != "cancelled"
        and (partial := logged_steps(output(folder)))
    ):
        done = f"{len(partial.step_times_s)} steps measured: {failed.cause}"
        return replace(
            partial, hardware=partial.hardware or hardware, wall_s=ending.wall_s, cause=done
        )
    exit_code = ending.exit_code if ending.reason == "exited" else None
    return replace(
        failed,
        hardware=hardware,
        wall_s=ending.wall_s,
        exit_code=exit_code,
        log_tail=failed.log_tail or tail,
    )


@functools.cache
def request_json() -> TypeAdapter[RunRequest]:
    with build_validators(described=False):
        return TypeAdapter(Annotated[RunRequest, Field(discriminator="kind")])


def has_results(folder: Path) -> bool:
    """Return True if the job wrote a result, or measured any steps before it ended."""
    return (
        readback.read_json(folder / RESULT) is not None or logged_steps(output(folder)) is not None
    )


def logged_steps(log: str) -> Measurement | None:
    """Return a measurement from the logged steps after warm-up; None if there are none."""
    warmup_s, times_s, losses = read_steps(log)
    if not times_s:
        return None
    run_line = next(
        (
            line.removeprefix(RUN_PREFIX)
            for line in reversed(log.splitlines())
            if line.startswith(RUN_PREFIX)
        ),
        "",
    )
    try:
        base: Measurement = readback.json_adapter(Measurement).validate_json(run_line, strict=True)
    except ValidationError:
        base = Measurement(status="ok")
    partial = replace(
        base,
        step_s=statistics.median(times_s),
        step_s_spread=interquartile_range(times_s),
        step_times_s=times_s,
        warmup_times_s=warmup_s,
        losses=losses,
    )
    with contextlib.suppress(InputError):  # Implausible measurements.
        return check_spec(partial, field="log")
    return None


def _read_measurement(path: Path) -> Measurement | None:
    """Return a rank's result; None if its file is missing or incomplete.

    Raises:
        ValueError: The result is invalid.
    """
    try:
        text = readback.read_file(path)
    except OSError:
        return None
    try:
        result: JobResult = readback.json_adapter(JobResult).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid" and "recursion" not in first["msg"]:
            return None
        raise ValueError(_first_error(error)) from None
    check_hosts(result)
    return result if result.rivals else result.first_measurement


def check_hosts(measurement: Measurement) -> None:
    """Raise ValueError if a result has an invalid host name, because site commands use them."""
    hardware = measurement.hardware
    hosts_by_field = {
        "suspects": measurement.suspects,
        "hardware.hosts": () if hardware is None else hardware.hosts,
        "devices.host": [device.host for device in measurement.devices],
    }
    for field, hosts in hosts_by_field.items():
        for host in hosts:
            if not readback.is_host_name(host):
                raise ValueError(f"{field}: {host[:80]!r} is not a host name")


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]


def _incomplete_result(folder: Path, ending: Ending) -> Measurement | None:
    path = folder / RESULT
    if (
        ending.exit_code != 0
        or not readback.path_exists(path)
        or readback.read_json(path) is not None
    ):
        return None
    return Measurement(status="preempted", cause=f"{RESULT} is cut off")


def _root_cause(folder: Path, *, killed: bool) -> Measurement | None:
    """Return the failure report (result.rank<r>.json) of the rank that caused the others to fail.

    Args:
        folder: Job folder.
        killed: A rank was ended by signal 9, which explains lost connections on other ranks.
    """
    reports = []
    for path in _failure_reports(folder):
        with contextlib.suppress(ValueError):
            reports.append(_read_measurement(path))
    cause = min(filter(None, reports), key=_order_of_evidence, default=None)
    return (
        None
        if killed and cause is not None and _order_of_evidence(cause) == _SECONDARY_RANK
        else cause
    )


def _failure_reports(folder: Path) -> list[Path]:
    """Return the paths of the failed ranks' reports, earliest first.

    Anything but a regular file is ignored.
    """
    stem, suffix = Path(RESULT).stem, Path(RESULT).suffix
    try:
        with os.scandir(folder) as entries:
            scanned = itertools.islice(entries, MAX_SCANNED_FILES)
            ranks = [
                entry
                for entry in scanned
                if entry.name.startswith(f"{stem}.rank") and entry.name.endswith(suffix)
            ]
        written = [
            (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
            for entry in ranks
            if entry.is_file(follow_symlinks=False)
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for _, name in sorted(written)[:MAX_REPORTS]]


def _order_of_evidence(report: Measurement) -> int:
    """Return a sort key: out of memory and broken devices first, lost connections last."""
    if report.status == "oom" or report.suspects:
        return 0
    cause = report.cause or ""
    return _SECONDARY_RANK if any(error in cause for error in _SECONDARY_ERRORS) else 1


def _was_killed(ending: Ending, tail: str) -> bool:
    return ending.exit_code in _KILLED or _KILLED_IN_LOG in tail


def _unreported_failure(ending: Ending, *, tail: str, timeout_s: float, cpu: bool) -> Measurement:
    """Return the measurement of a job that failed without rank reports, with the likely cause.

    Args:
        ending: How the job ended.
        tail: End of the job's log.
        timeout_s: Time limit.
        cpu: The job ran on CPUs, so the kernel's OOM killer means that the device ran out of
            memory.
    """
    match ending.reason:
        case "timeout":
            return Measurement(status="timeout", cause=f"hit the {timeout_s:g} s limit")
        case "cancelled":
            return Measurement(status="preempted", cause="cancelled on request")
        case "terminated" | "lost":
            cause = ending.error or "the machine was shut down or the supervisor was killed"
            return Measurement(status="preempted", cause=cause)
        case "damaged":
            return Measurement(status="crashed", cause=f"{DAMAGED}: {ending.error}")
        case "log_too_long":
            return Measurement(status="crashed", cause=ending.error or "the log exceeded its limit")
        case "failed_to_start":
            return Measurement(
                status="crashed", cause=ending.error or "the job could not be started", refused=True
            )
    if ending.exit_code and (not_filled := _RENDEZVOUS_TIMEOUT.search(tail)):
        return Measurement(
            status="preempted", cause=f"too few nodes joined the rendezvous: {not_filled[0]}"
        )
    if not _was_killed(ending, tail):
        cause = f"exit code {ending.exit_code} without a result: {last_line(tail)}"
        return Measurement(status="crashed", cause=cause)
    if ending.oom_kills > 0:
        cause = "the kernel killed a process: out of host memory"
        if cpu:
            return Measurement(status="oom", cause=cause)
        # The host ran out of memory; GPU memory may have sufficed.
        return Measurement(status="crashed", cause=f"{cause}. Give jobs more host memory.")
    return Measurement(status="preempted", cause=KILLED_CAUSE)
