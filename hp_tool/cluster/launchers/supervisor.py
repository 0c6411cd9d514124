"""Runs one job to its end: started by file name, standard library only, detached from the process
that started it.

It outlives the worker, so that a new worker finds the job running, and it ends by itself at the
job's time limit. The state of the job is in files of its folder, never in process ids, which get
recycled:

    started.json   created exclusively: of any number of supervisors for one folder, one runs the job
    lock           locked (flock) for as long as this supervisor lives
    running.json   the job has the machine's devices
    cancel         written by a launcher, perhaps before the job is submitted: end the job, or never start it
    ended.json     how the job ended; appears once no process of it is left

`--attached FOLDER` runs the job of a folder (mounted, perhaps read-only) in the foreground, for
launchers that see nothing but its output: standard output gets the job's log, and then a marked
line for each result and for how the job ended, which `launchers.streamed` reads.
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
_SWEEP_S = 30.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
HELD = 75
"""Exit status where another supervisor has the job, or had it."""
MARK = ("<<<hp-tool:", ":hp-tool>>>")
"""Around a JSON object, on a line of its own."""
MAX_FILE_BYTES = 2**18
"""Limit of a printed file: a larger result is left out, and a larger file that the job should
return is cut to its end.
"""
MAX_REPORTS = 16
"""Reports of failed ranks to print, the first ones: later ones fail because of them."""


def main(path: Path) -> int:
    """Detach and run the job of the folder `path`; return HELD at once if another supervisor has or
    had it.
    """
    folder = Folder(path)
    lock = (path / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (path / "started.json").touch(exist_ok=False)
    except (BlockingIOError, FileExistsError):
        return HELD
    if os.fork():  # the child keeps the lock, and the caller need not reap it
        return 0
    os.setsid()
    folder.write("started.json", {"pid": os.getpid(), "time": time.time()})
    folder.write("ended.json", _run(folder))
    return 0


class Folder:
    """The job's folder, whatever the job puts in its place or in that of our files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Write `value` atomically under `name`; what is there and is no file keeps another
        name.
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
    """Run the job of `folder`, and return how it ended: the launcher must learn in any case that it
    is over.
    """
    try:
        return _Supervisor(folder, to_log=to_log).run()
    except Exception as error:
        return {"reason": "failed_to_start", "error": f"{type(error).__name__}: {error}"}


def attached(source: Path) -> int:
    """Run the job whose files are in `source`; 0 if it succeeded or left a result."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the job ends with the process that started us
    work = Path(tempfile.mkdtemp(prefix="hp-job-"))
    job = json.loads((source / "job.json").read_text())
    for name in ("job.json", *job["files"]):
        shutil.copyfile(source / name, work / name)
    os.environ.update(job["environment"])
    _print_marked({"began": time.time()})
    ended = _run(Folder(work), to_log=False)
    result, reports = work / "result.json", work.glob("result.rank*.json")
    has_result = result.exists()
    results = (result, *sorted(reports, key=lambda path: path.lstat().st_mtime_ns)[:MAX_REPORTS])
    whole = [path for path in results if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES]
    for path in (*whole, *(work / name for name in job["returns"])):
        if path.is_file():
            _print_marked({"file": path.name, "text": _end_of(path)})
    _print_marked({"ended": ended})
    shutil.rmtree(work, ignore_errors=True)
    return 0 if has_result or ended.get("exit_code") == 0 else 1


def _print_marked(value: dict[str, Any]) -> None:
    print(f"\n{MARK[0]}{json.dumps(value)}{MARK[1]}", flush=True)


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_FILE_BYTES))
        return file.read().decode(errors="replace")


class _Supervisor:
    def __init__(self, folder: Folder, *, to_log: bool) -> None:
        """to_log: write the job's output to job.log instead of our own output."""
        self._folder, self._to_log = folder, to_log
        self._job = json.loads((folder.path / "job.json").read_text())
        self._terminated = False
        signal.signal(signal.SIGTERM, self._on_terminate)
        _prctl(
            _PR_SET_CHILD_SUBREAPER
        )  # torchrun's ranks lead sessions of their own; orphans become our children

    def run(self) -> dict[str, Any]:
        if "devices_lock" not in self._job:  # the engine assigns devices
            return self._run_job()
        private = partial(
            os.open, mode=0o600
        )  # who can open it can lock it, and nothing else would run here
        with open(self._job["devices_lock"], "a", opener=private) as devices:
            with suppress(PermissionError):  # another user's
                os.fchmod(devices.fileno(), 0o600)
            reason = self._wait_for(devices)
            return {"reason": reason, "wall_s": 0.0} if reason is not None else self._run_job()

    def _run_job(self) -> dict[str, Any]:
        started, kills = time.monotonic(), _oom_kills()  # the wall clock may jump
        self._folder.write("running.json", {"time": time.time()})
        reason, exit_code = self._run_command()
        ended = {"reason": reason, "exit_code": exit_code, "wall_s": time.monotonic() - started}
        if reason == _LOG_TOO_LONG:
            ended["error"] = (
                f"its log grew beyond {self._job['max_log_bytes'] >> 20} MiB: let it print less"
            )
        return ended | {"oom_kills": _oom_kills() - kills}

    def _wait_for(self, devices: Any) -> str | None:
        """Wait for the machine's devices, one job at a time: two at once would disturb each other's
        measurement. Returns why the wait was interrupted, else None.
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
        deadline, most = (
            time.monotonic() + self._job["timeout_s"],
            self._job.get("max_log_bytes", math.inf),
        )
        passed = None if self._to_log else _PassedOn(most)
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
                    if (os.fstat(log.fileno()).st_size if passed is None else passed.size) > most:
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


class _PassedOn:
    """The job's output on its way to ours: counted, and passed on up to `most` bytes."""

    def __init__(self, most: float) -> None:
        read, write = os.pipe()
        self.input = os.fdopen(write, "ab")
        self.size = 0
        self._thread = threading.Thread(target=self._pass_on, args=(read, most), daemon=True)

    def start(self) -> None:
        """Begin, once the job's first process was forked: forking a process of several threads is
        not safe.
        """
        self._thread.start()

    def finish(self) -> None:
        """Wait until everything is passed on; the job's processes have ended."""
        if self._thread.ident is not None:
            self._thread.join(_SWEEP_S)

    def _pass_on(self, read: int, most: float) -> None:
        with (
            os.fdopen(read, "rb", buffering=0) as source,
            os.fdopen(os.dup(1), "wb", buffering=0) as output,
        ):
            while chunk := source.read(2**16):
                rest = memoryview(chunk) if self.size <= most else memoryview(b"")
                self.size += len(chunk)
                while rest:
                    rest = rest[output.write(rest) :]


def _end_descendants() -> None:
    """Kill children until none is left: a killed child's own children become ours (subreaper) and
    fall in the next round.

    Pids are safe here: a child's pid is not reused before we have waited for the child.
    """
    deadline = time.monotonic() + _SWEEP_S
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
    me, children = os.getpid(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has ended
                continue
            if int(parent) == me:
                children.append(int(entry.name))
    return children


def _die_with_supervisor() -> None:
    """In the job's first process: should the supervisor be killed, SIGTERM lets torchrun end its
    ranks.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int = 1) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot; 0 if it does not
    say.
    """
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


if __name__ == "__main__":
    sys.exit(
        attached(Path(sys.argv[2])) if sys.argv[1] == "--attached" else main(Path(sys.argv[1]))
    )
