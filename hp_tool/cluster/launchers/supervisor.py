"""Runs one job to its end: started by file name, standard library only, detached from its starter.

It outlives the worker, so that a new worker finds the job running, and ends at the job's time
limit. A job's state is in files of its folder, not in process ids, which get reused:

    started.json   created exclusively: of any number of supervisors for one folder, one runs the job
    lock           locked (flock) while this supervisor lives
    running.json   the job has the machine's devices
    cancel         written by a launcher, perhaps before the job is submitted: end the job, or never start it
    ended.json     how the job ended; written when none of its processes is left

`--attached FOLDER` runs the job of a folder (perhaps a read-only mount) in the foreground, for
launchers that see only its output: standard output gets the job's log, then a marked line for each
result and for how the job ended, which `launchers.streamed` reads.
"""  # noqa: E501

import ctypes
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

_POLL_S = 0.05
_LOG_TOO_LONG = "log_too_long"
_KILL_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
EXIT_ALREADY_RUN = 75
"""Exit code if another supervisor is running, or has already run, this job."""
MARK = ("<<<hp-tool:", ":hp-tool>>>")
"""Markers before and after a JSON object that is printed on its own line."""
MAX_FILE_BYTES = 2**18
"""Maximum size in bytes of a printed file. A larger result is omitted; of other files, only the end
is printed.
"""
MAX_REPORTS = 16
"""Maximum number of failed ranks whose reports are printed, earliest first. Later failures are
mostly consequences.
"""


def main(path: Path) -> int:
    """Detach from the caller and run the job in `path`.

    Return EXIT_ALREADY_RUN if another supervisor has the job.
    """
    folder = Folder(path)
    lock = (path / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / "started.json").touch(exist_ok=False)
    except (BlockingIOError, FileExistsError):
        return EXIT_ALREADY_RUN
    if os.fork():  # The child process keeps the lock, and the caller need not wait for it.
        return 0
    os.setsid()
    folder.write("started.json", {"pid": os.getpid(), "time": time.time()})
    folder.write("ended.json", _run(folder))
    return 0


class Folder:
    """A job folder. Its methods are safe even if the job replaces the folder or files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Write `value` as JSON to the file `name`, atomically.

        A folder with that name is renamed first.
        """
        token = f"{time.time_ns():x}"
        descriptor = os.open(
            f"~{name}.{token}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self._descriptor
        )
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(value))
        try:
            self._rename(f"~{name}.{token}", name)
        except OSError:  # a folder
            self._rename(name, f"{name}.{token}")
            self._rename(f"~{name}.{token}", name)

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)


def _run(folder: Folder, *, to_log: bool = True) -> dict[str, Any]:
    """Run the job and return how it ended.

    Errors are recorded there, so that the launcher sees them.
    """
    try:
        return _Supervisor(folder, to_log=to_log).run()
    except Exception as error:
        return {"reason": "failed_to_start", "error": f"{type(error).__name__}: {error}"}


def run_attached(source: Path) -> int:
    """Run the job whose files are in `source`. Return 0 if it succeeded or wrote a result."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the job ends with the parent process
    work = Path(tempfile.mkdtemp(prefix="hp-job-"))
    job = json.loads((source / "job.json").read_text())
    for name in ("job.json", *job["files"]):
        shutil.copyfile(source / name, work / name)
    os.environ.update(job["environment"])
    _print_marked({"began": time.time()})
    outcome = _run(Folder(work), to_log=False)
    result, reports = work / "result.json", work.glob("result.rank*.json")
    has_result = result.exists()
    results = (result, *sorted(reports, key=lambda path: path.lstat().st_mtime_ns)[:MAX_REPORTS])
    printable = [
        path for path in results if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES
    ]
    for path in (*printable, *(work / name for name in job["returns"])):
        if path.is_file():
            _print_marked({"file": path.name, "text": _read_end(path)})
    _print_marked({"ended": outcome})
    shutil.rmtree(work, ignore_errors=True)
    return 0 if has_result or outcome.get("exit_code") == 0 else 1


def _print_marked(value: dict[str, Any]) -> None:
    print(f"\n{MARK[0]}{json.dumps(value)}{MARK[1]}", flush=True)


def _read_end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE_BYTES))
        return file.read().decode(errors="replace")


class _Supervisor:
    def __init__(self, folder: Folder, *, to_log: bool) -> None:
        """Write the job's output to job.log if `to_log`, else to standard output."""
        self._folder, self._to_log = folder, to_log
        self._job = json.loads((folder.path / "job.json").read_text())
        self._terminated = False
        signal.signal(signal.SIGTERM, self._on_terminate)
        # torchrun's ranks lead their own sessions; orphans become children of this process.
        _prctl(_PR_SET_CHILD_SUBREAPER)

    def run(self) -> dict[str, Any]:
        if "devices_lock" not in self._job:  # The scheduler assigns the devices.
            return self._run_job()
        # Only this user may open the file: whoever locks it blocks all jobs.
        private = partial(os.open, mode=0o600)
        with open(self._job["devices_lock"], "a", opener=private) as devices:
            with suppress(PermissionError):  # owned by another user
                os.fchmod(devices.fileno(), 0o600)
            reason = self._wait_for(devices)
            return {"reason": reason, "wall_s": 0.0} if reason is not None else self._run_job()

    def _run_job(self) -> dict[str, Any]:
        # A monotonic clock, because the wall clock may be adjusted.
        started, kills = (
            time.monotonic(),
            _oom_kills(),
        )
        self._folder.write("running.json", {"time": time.time()})
        reason, exit_code = self._run_command()
        ended = {"reason": reason, "exit_code": exit_code, "wall_s": time.monotonic() - started}
        if reason == _LOG_TOO_LONG:
            ended["error"] = f"the log exceeded {self._job['max_log_bytes'] >> 20} MiB: print less"
        return ended | {"oom_kills": _oom_kills() - kills}

    def _wait_for(self, devices: Any) -> str | None:
        """Wait for the machine's devices; concurrent jobs would distort each other's timing.

        Returns:
            Why the wait was interrupted, or None.
        """
        while (reason := self._interruption()) is None:
            try:
                fcntl.flock(devices, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
            else:
                return None
        return reason

    def _run_command(self) -> tuple[str, int | None]:
        deadline, limit = (
            time.monotonic() + self._job["timeout_s"],
            self._job.get("max_log_bytes", math.inf),
        )
        passed = None if self._to_log else _OutputForwarder(limit)
        try:
            with (
                (self._folder.path / "job.log").open("ab")
                if passed is None
                else passed.input as log
            ):
                process = subprocess.Popen(
                    self._job["command"],
                    cwd=self._folder.path,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_supervisor,
                )
                if passed is not None:
                    passed.start()
                while process.poll() is None:
                    reason = self._interruption() or (
                        "timeout" if time.monotonic() > deadline else None
                    )
                    if (os.fstat(log.fileno()).st_size if passed is None else passed.size) > limit:
                        reason = reason or _LOG_TOO_LONG
                    if reason is not None:
                        return reason, None
                    time.sleep(_POLL_S)
            return "exited", process.returncode
        finally:
            _end_descendants()
            if passed is not None:
                passed.finish()

    def _interruption(self) -> str | None:
        if os.path.lexists(self._folder.path / "cancel"):
            return "cancelled"
        return "terminated" if self._terminated else None

    def _on_terminate(self, *_: object) -> None:
        self._terminated = True


class _OutputForwarder:
    """Copy the job's output to standard output, up to a size limit."""

    def __init__(self, max_bytes: float) -> None:
        read, write = os.pipe()
        self.input = os.fdopen(write, "ab")
        self.size = 0
        self._thread = threading.Thread(target=self._pass_on, args=(read, max_bytes), daemon=True)

    def start(self) -> None:
        """Start the thread.

        Call this after forking the job's process: forking with threads is unsafe.
        """
        self._thread.start()

    def finish(self) -> None:
        """Wait until all output is copied. The job's processes must have ended."""
        if self._thread.ident is not None:
            self._thread.join(_KILL_TIMEOUT_S)

    def _pass_on(self, read: int, max_bytes: float) -> None:
        with (
            os.fdopen(read, "rb", buffering=0) as source,
            os.fdopen(os.dup(1), "wb", buffering=0) as output,
        ):
            while chunk := source.read(2**16):
                remaining = memoryview(chunk) if self.size <= max_bytes else memoryview(b"")
                self.size += len(chunk)
                while remaining:
                    remaining = remaining[output.write(remaining) :]


def _end_descendants() -> None:
    """Kill child processes until none is left.

    When a child is killed, its own children become children of this process (subreaper) and are
    killed in the next round. Using process ids is safe, because a child's id is not reused until
    this process has waited for the child.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S / 5)


def _children() -> list[int]:
    pid, children = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has ended
                continue
            if int(parent) == pid:
                children.append(int(entry.name))
    return children


def _die_with_supervisor() -> None:
    """Make the kernel send SIGTERM to the job's first process if the supervisor is killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int = 1) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _oom_kills() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


if __name__ == "__main__":
    sys.exit(
        run_attached(Path(sys.argv[2])) if sys.argv[1] == "--attached" else main(Path(sys.argv[1]))
    )
