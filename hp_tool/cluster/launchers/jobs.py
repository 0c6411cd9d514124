"""A job's folder: the files that every launcher writes before a job starts and reads after it
ended, and what they add up to: one Measurement with the numbers, or the root cause of the failure.
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
from hp_tool.domain.fields import Devices, Strict, building, checked
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import (
    KILLED,
    ExitCode,
    Hardware,
    JobResult,
    Measurement,
    WallSeconds,
    interquartile_range,
)
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.steps import RUN, read_steps
from hp_tool.errors import InputError

REQUEST = "request.json"
RESULT = "result.json"
LOG = "job.log"
_LOG_VARIABLE = "HP_JOB_LOG_MIB"
JOB = "job.json"
DAMAGED = "the job damaged its own folder"
"""Cause of a run that cannot be read back."""
MOST_REPORTS = 64
"""Failed ranks whose reports are read, the first ones."""
MOST_NAMES = 100_000
"""Files of a folder among which reports are looked for."""
MAX_OUTPUT_BYTES = 16 * 2**20
"""How much of the end of a log is read: thousands of steps."""
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,128}")
_Read = TypeVar("_Read", bound=Measurement)
# Errors of a rank that failed only because another had: not the root cause if there is a better
# one.
_SECONDARY = (
    *("Connection closed", "Connection reset", "Broken pipe"),
    *("Timed out waiting", "DistBackendError", "DistNetworkError"),
)
_LOST_CONNECTION = 2
"""Rank of such an error among those that explain the end of a run."""
_FOLDER_TROUBLE = tuple(
    os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
)
"""Errors of a job that could not write its result into its folder."""
_NOT_FILLED = re.compile(
    r"Timed out .*waiting for clients|\d+/\d+ clients joined|RendezvousTimeoutError"
)
"""Errors of a node that met too few others: they were not there, whatever the configuration."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_KILLED_IN_LOG = f"Signal {int(signal.SIGKILL)} (SIGKILL)"  # torchrun's report on a rank


def check_name(name: str) -> str:
    """`name` itself. Raises InputError for one that is no file name everywhere or would leave the
    runs' folder.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise InputError(
            f"job name {name!r} must be 1 to 128 of a-z A-Z 0-9 . _ -", field="job_name"
        )
    return name


def filled(template: str, *, plan: LaunchPlan) -> str:
    """Return a template with the search and its owner, whose name may be anything, in characters
    that engines take everywhere.

    A search without an owner is this process' user's. Raises InputError where nothing is left of a
    name: it may be an account.
    """
    for name, value in {
        "search": plan.search or plan.job_name,
        "owner": plan.owner or _user(),
    }.items():
        if f"{{{name}}}" in template:
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", value)[:40].strip("-._")
            if not plain:
                message = (
                    f"{template}: there is no {name} to fill in ({value!r}): letters, "
                    "digits, _ . and - are taken of it"
                )
                raise InputError(message, field="cluster.runs.options")
            template = template.replace(f"{{{name}}}", plain)
    return template


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def default_root() -> Path:
    """HP_RUNS_DIR, else the user's data folder."""
    from platformdirs import user_data_path

    configured = os.environ.get("HP_RUNS_DIR")
    return Path(configured) if configured else user_data_path("hp-tool") / "runs"


def create_folder(folder: Path, *, files: Mapping[str, str]) -> None:
    """Create `folder` with all its files in one step, which a power cut does not undo; an existing
    one is left alone.

    Raises InputError for a bad file name and for a folder that exists and holds another run's
    request, and DamagedError where something else has the folder's name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix="~", dir=folder.parent))
    try:
        for name, text in files.items():
            with (temporary / check_name(name)).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(folder)  # fails if another process was first: the folder is not empty
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
    except OSError as error:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise DamagedError(
                f"{folder} is no folder: a job put something else in its place"
            ) from error
        if not folder.is_dir():
            raise
        _check_run(folder, files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_run(folder: Path, files: Mapping[str, str]) -> None:
    """Raise InputError where an existing folder's request is of another run than that in `files`:
    so is its result.
    """
    own = json.loads(files[REQUEST])["run_id"] if REQUEST in files else None
    present = (readback.read_json(folder / REQUEST) or {}).get("run_id")
    if own is not None and present is not None and present != own:
        raise InputError(
            f"folder {folder} holds run {present}, not {own}: move it away", field="job_name"
        )


def mark(folder: Path, name: str) -> None:
    """Create the empty file `name` in `folder`, and the folder if it does not exist. Raises
    DamagedError, and OSError.
    """
    if not readback.is_there(folder):
        create_folder(folder, files={name: ""})
    readback.touch(folder, name)


def has_file(folder: Path, *, name: str) -> bool:
    """Return whether the job's folder has the file `name`; False where there is no runs folder, and
    so no job. Raises OSError for a runs folder that is there and cannot be read.
    """
    return folder.parent.is_dir() and readback.is_there(folder / name)


def output(folder: Path, *, name: str | None = None) -> str:
    """The end of a job's log, or of the file `name` that it left in its folder; empty if it does
    not exist.
    """
    return readback.log_tail(
        folder, name=LOG if name is None else check_name(name), size_bytes=MAX_OUTPUT_BYTES
    )


def plan_text(plan: LaunchPlan) -> str:
    """A plan for people: its command, with what its environment adds, its limit, and the names of
    its files.
    """
    added = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(plan.environment.items())]
    limit = f"# at most {plan.timeout_s:.0f} s, in a folder with {' and '.join(sorted(plan.files))}"
    return "\n".join([*added, shlex.join(plan.command), limit])


def most_log_bytes() -> int:
    """Return how long a job's log may grow: HP_JOB_LOG_MIB, by default 1024 MiB. Raises InputError
    for no such number.
    """
    text = os.environ.get(_LOG_VARIABLE, "1024")
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise InputError(
            f"{_LOG_VARIABLE} is {text[:40]!r}; give a whole number of MiB from 1 to {1 << 20}",
            field=_LOG_VARIABLE,
        )
    return int(text) * 2**20


def last_line(tail: str) -> str:
    """The last line of a log that is not empty or a rule, cut to 300 characters."""
    return next(
        (line.strip()[:300] for line in reversed(tail.splitlines()) if line.strip(" =-")),
        "the log is empty",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Strict):
    """How a job ended, by the engine or the supervisor."""

    reason: str
    """exited, timeout, cancelled, terminated, failed_to_start, log_too_long, damaged or lost."""
    exit_code: ExitCode | None = None
    wall_s: WallSeconds | None = None
    oom_kills: int = 0
    """Processes that the kernel killed for lack of memory while the job ran."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What of a submitted job its folder tells; the job may have rewritten it."""

    num_gpus: Devices
    timeout_s: WallSeconds
    returns: tuple[str, ...] = ()


def submitted(folder: Path) -> Submitted | None:
    """Return what was submitted in `folder`; None where the job's file is missing or says something
    else.
    """
    return readback.read_as(readback.typed(Submitted), folder / JOB)


def spoilt(trouble: str, *, ending: Ending, log_tail: str) -> Measurement:
    """Return the measurement of a job that damaged its folder so much that no more is known of
    it.
    """
    return Measurement(
        status="crashed",
        cause=f"{DAMAGED}: {trouble}",
        wall_s=ending.wall_s,
        log_tail=log_tail or None,
    )


def recorded(ended: Mapping[str, Any]) -> Ending:
    """How a job ended, by its supervisor's record; `lost` if that is empty."""
    known = {field.name: ended[field.name] for field in fields(Ending) if field.name in ended}
    try:
        ending: Ending = readback.typed(Ending).validate_python({"reason": "lost", **known})
        return ending
    except ValidationError as error:
        return Ending(
            reason="lost", error=f"the record of the job's end cannot be believed: {_why(error)}"
        )


def measure(folder: Path, *, ending: Ending, timeout_s: float, hardware: Hardware) -> Measurement:
    """The job's own result if it is complete, whatever the exit code; else the steps that it
    finished before it was cut off; else why there is none, and the end of the log.
    """
    tail = readback.log_tail(folder, name=LOG)
    try:
        result = _read_measurement(folder / RESULT)
    except ValueError as error:
        cause = f"{RESULT} cannot be believed: {error}"
        return Measurement(
            status="crashed", cause=cause, hardware=hardware, wall_s=ending.wall_s, log_tail=tail
        )
    if result is not None:
        return replace(result, wall_s=ending.wall_s if ending.wall_s is not None else result.wall_s)
    failed = (
        _root_cause(folder, killed=_killed(ending, tail))
        or _torn(folder, ending)
        or _explain(ending, tail=tail, timeout_s=timeout_s, cpu=hardware.gpu == "cpu")
    )
    if failed.status == "crashed" and any(
        trouble in (failed.cause or "") for trouble in _FOLDER_TROUBLE
    ):
        failed = replace(failed, status="preempted")  # says nothing about the configuration
    if (
        failed.status in ("timeout", "preempted")
        and ending.reason != "cancelled"
        and (kept := kept_steps(output(folder)))
    ):
        done = f"{len(kept.step_times_s)} steps measured: {failed.cause}"
        return replace(kept, hardware=kept.hardware or hardware, wall_s=ending.wall_s, cause=done)
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
    """Return what reads and writes a request as JSON."""
    with building(described=False):
        return TypeAdapter(Annotated[RunRequest, Field(discriminator="kind")])


def brought(folder: Path) -> bool:
    """Whether the job left a result, or steps that it had measured by the time it was ended."""
    return readback.read_json(folder / RESULT) is not None or kept_steps(output(folder)) is not None


def kept_steps(log: str) -> Measurement | None:
    """What the profiler had measured by the end of its log; None if no step beyond warm-up is in
    it.
    """
    warmup_s, times_s, losses = read_steps(log)
    if not times_s:
        return None
    about = next(
        (line.removeprefix(RUN) for line in reversed(log.splitlines()) if line.startswith(RUN)), ""
    )
    try:
        known: Measurement = readback.typed(Measurement).validate_json(about, strict=True)
    except ValidationError:
        known = Measurement(status="ok")
    kept = replace(
        known,
        step_s=statistics.median(times_s),
        step_s_spread=interquartile_range(times_s),
        step_times_s=times_s,
        warmup_times_s=warmup_s,
        losses=losses,
    )
    with contextlib.suppress(InputError):  # figures that no step has are none
        return checked(kept, field="log")
    return None


def _read_measurement(path: Path) -> Measurement | None:
    """What a rank wrote of its run; None: nothing, or its end is missing. Raises ValueError for
    what no run is like.
    """
    try:
        text = readback.read_file(path)
    except OSError:
        return None
    try:
        result: JobResult = readback.typed(JobResult).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid" and "recursion" not in first["msg"]:
            return None
        raise ValueError(_why(error)) from None
    check_hosts(result)
    return result if result.rivals else result.own


def check_hosts(measurement: Measurement) -> None:
    """Raise ValueError for a node in a job's result that is no host name: site's commands name
    them.
    """
    hardware = measurement.hardware
    named = {
        "suspects": measurement.suspects,
        "hardware.hosts": () if hardware is None else hardware.hosts,
        "devices.host": [device.host for device in measurement.devices],
    }
    for field, hosts in named.items():
        for host in hosts:
            if not readback.is_host_name(host):
                raise ValueError(f"{field}: {host[:80]!r} is no host name")


def _why(error: ValidationError) -> str:
    """The first thing wrong with a file, in one line."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]


def _torn(folder: Path, ending: Ending) -> Measurement | None:
    """Preempted, if the job succeeded but its result was cut off: that says nothing about the
    configuration.
    """
    path = folder / RESULT
    if ending.exit_code != 0 or not readback.is_there(path) or readback.read_json(path) is not None:
        return None
    return Measurement(status="preempted", cause=f"{RESULT} is cut off")


def _root_cause(folder: Path, *, killed: bool) -> Measurement | None:
    """The report of the rank that failed first by itself; ranks write theirs as
    result.rank<r>.json. `killed`: one was ended by signal 9, which explains why others lost their
    connections.
    """
    reports = []
    for path in _reports(folder):
        with contextlib.suppress(ValueError):
            reports.append(_read_measurement(path))
    cause = min(filter(None, reports), key=_order_of_evidence, default=None)
    return (
        None
        if killed and cause is not None and _order_of_evidence(cause) == _LOST_CONNECTION
        else cause
    )


def _reports(folder: Path) -> list[Path]:
    """The plain files with ranks' reports, the earliest first."""
    stem, suffix = Path(RESULT).stem, Path(RESULT).suffix
    try:
        with os.scandir(folder) as entries:
            some = itertools.islice(entries, MOST_NAMES)
            ranks = [
                each
                for each in some
                if each.name.startswith(f"{stem}.rank") and each.name.endswith(suffix)
            ]
        written = [
            (each.stat(follow_symlinks=False).st_mtime_ns, each.name)
            for each in ranks
            if each.is_file(follow_symlinks=False)
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for _, name in sorted(written)[:MOST_REPORTS]]


def _order_of_evidence(report: Measurement) -> int:
    """Out of memory and a broken device explain everything else; a lost connection explains
    nothing.
    """
    if report.status == "oom" or report.suspects:
        return 0
    return _LOST_CONNECTION if any(mark in (report.cause or "") for mark in _SECONDARY) else 1


def _killed(ending: Ending, tail: str) -> bool:
    """Whether a process of the job was ended by signal 9."""
    return ending.exit_code in _KILLED or _KILLED_IN_LOG in tail


def _explain(ending: Ending, *, tail: str, timeout_s: float, cpu: bool) -> Measurement:
    """Why a job ended whose ranks left no report. `cpu`: the host's memory is the device's."""
    match ending.reason:
        case "timeout":
            return Measurement(status="timeout", cause=f"not done after {timeout_s:g} s")
        case "cancelled":
            return Measurement(status="preempted", cause="cancelled on request")
        case "terminated" | "lost":
            cause = ending.error or "the machine was shut down or the job's supervisor killed"
            return Measurement(status="preempted", cause=cause)
        case "damaged":
            return Measurement(status="crashed", cause=f"{DAMAGED}: {ending.error}")
        case "log_too_long":
            return Measurement(
                status="crashed", cause=ending.error or "its log grew beyond the limit"
            )
        case "failed_to_start":
            return Measurement(
                status="crashed", cause=ending.error or "the job could not be started", refused=True
            )
    if ending.exit_code and (not_filled := _NOT_FILLED.search(tail)):
        return Measurement(
            status="preempted", cause=f"the rendezvous never filled: {not_filled[0]}"
        )
    if not _killed(ending, tail):
        cause = f"exit code {ending.exit_code} without a result: {last_line(tail)}"
        return Measurement(status="crashed", cause=cause)
    if ending.oom_kills > 0:
        cause = "the kernel killed a process for lack of host memory"
        if cpu:
            return Measurement(status="oom", cause=cause)
        # Says nothing about the memory of the GPUs.
        return Measurement(status="crashed", cause=f"{cause}; give jobs more of the node's memory")
    return Measurement(status="preempted", cause=KILLED)
