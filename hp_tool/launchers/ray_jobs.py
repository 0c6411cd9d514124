"""Jobs on a Ray cluster through its Jobs API: no shared folder, no state of our own.

A job's files are its working directory, which Ray carries to the node; the supervisor runs it there and prints its results.
Over several nodes a driver (`ray_nodes`) takes the devices first and runs a supervisor on each.
"""

from __future__ import annotations

import logging
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import JobState, LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError, MissingExtraError
from hp_tool.launchers import jobs, ray_options, streamed, torchrun
from hp_tool.launchers.outcome import Ending
from hp_tool.launchers.ray_options import RayOptions

T = TypeVar("T")
_STATES = {
    "PENDING": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "STOPPED": JobState.CANCELLED,
    "SUCCEEDED": JobState.FINISHED,
    "FAILED": JobState.FINISHED,
}
_OURS = ("JOB_ENTRYPOINT_COMMAND_ERROR", None)
"""Errors of a job that ran: how it went, its own words tell."""
_NEVER_STARTS = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")
_DRIVER = "ray_nodes.py"
_CONNECT_LIMIT_S = 10.0
_STOP_LIMIT_S = 20.0
_CANCELLED = "cancelled"
"""In the metadata of a job that only takes the name of a cancelled one."""


class RayLauncher:
    """The Launcher port on a Ray cluster. A handle is the job's submission id, made from its name."""

    name = "ray"

    def __init__(self, *, options: RayOptions | Mapping[str, object] | None = None) -> None:
        """options: the cluster (default: the file that HP_RAY_CONFIG names)."""
        if isinstance(options, Mapping):
            options = ray_options.parse(options, origin="the options of the Ray launcher")
        self._options = options if options is not None else ray_options.load()
        self._jobs: dict[str, Any] = {}
        self._asked_at = -float("inf")
        self._away_since: float | None = None

    def hardware(self) -> Hardware:
        return self._share(self._options.num_gpus)

    def answers(self) -> str:
        at = urlsplit(self._options.address)
        port = at.port or (443 if at.scheme == "https" else 80)
        try:  # Ray's own client would wait for minutes
            socket.create_connection((at.hostname or "", port), timeout=_CONNECT_LIMIT_S).close()
        except OSError as error:
            raise LauncherError(f"Ray at {self._options.address}: {error}") from error
        known = self._ask(lambda client: client.list_jobs())
        return f"Ray at {self._options.address} answers: {len(known)} jobs in its memory"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Pure. Raises InputError where the request is for other devices or more of them than one job may have."""
        options = self._options
        if request.gpu != options.gpu:
            message = f"this Ray cluster has {options.gpu}, not {request.gpu}"
            raise InputError(message, code="launcher_mismatch", field="cluster")
        nodes = jobs.num_nodes(request, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
        command = (
            torchrun.one_node_command(request, python=options.python)
            if nodes == 1
            else torchrun.multi_node_command(request, num_nodes=nodes, python=options.python)
        )
        return LaunchPlan(
            job_name=jobs.check_name(job_name),
            command=command,
            environment=torchrun.job_environment(request, num_hosts=nodes, operator=options.environment),
            files=torchrun.job_files(request),
            num_gpus=request.num_gpus,
            timeout_s=request.timeout_s,
            returns=torchrun.job_returns(request),
        )

    def describe(self, plan: LaunchPlan) -> str:
        return jobs.described(plan)

    def submit(self, plan: LaunchPlan) -> str:
        handle = self._handle(plan.job_name)
        nodes = -(-plan.num_gpus // self._options.gpus_per_node)
        share = self._resources(plan.num_gpus // nodes)
        files = streamed.job_files(plan, per_node={"nodes": nodes, "bundle": share})
        files |= {_DRIVER: Path(__file__).with_name(_DRIVER).read_text()}
        with tempfile.TemporaryDirectory(prefix="hp-ray-") as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            started = (_DRIVER,) if nodes > 1 else (streamed.SUPERVISOR, "--attached", ".")
            self._submit(
                handle,
                entrypoint=shlex.join((self._options.python, *started)),
                runtime_env={"working_dir": folder},
                metadata={"num_gpus": str(plan.num_gpus), "timeout_s": str(plan.timeout_s)},
                **(_asked_of_ray(share) if nodes == 1 else {}),
            )
        return handle

    def find(self, job_name: str) -> str | None:
        handle = self._handle(job_name)
        return handle if self._info(handle) is not None else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """Raises LauncherError once the cluster has been away for longer than the options' patience."""
        try:
            self._refresh()
        except LauncherError:
            away_s = 0.0 if self._away_since is None else time.monotonic() - self._away_since
            if away_s > self._options.patience_s:
                raise
            return dict.fromkeys(handles, JobState.RUNNING)  # as far as is known
        return {handle: self._state(handle) for handle in handles}

    def cancel(self, job_name: str) -> None:
        """Of a job that Ray does not know the name is taken, by one that does nothing."""
        handle, deadline = self._handle(job_name), time.monotonic() + _STOP_LIMIT_S
        if self._info(handle) is None:
            self._submit(handle, entrypoint="true", metadata={_CANCELLED: "true"})
        while _is_open(self._info(handle)) and not self._ask(lambda client: client.stop_job(handle)):
            if time.monotonic() > deadline:  # Ray passes over a job that it is just about to start
                raise LauncherError(f"Ray did not stop job {handle} within {_STOP_LIMIT_S:g} s")
            time.sleep(0.1)

    def open_jobs(self) -> list[str]:
        prefix = self._options.job_prefix
        handles = [each.submission_id or "" for each in self._ask(lambda client: client.list_jobs()) if _is_open(each)]
        return [handle.removeprefix(prefix) for handle in handles if handle.startswith(prefix)]

    def fetch(self, handle: str) -> Measurement:
        """Raises LauncherError while the job has not ended."""
        info = self._info(handle)
        if info is None:
            raise LauncherError(f"no job {handle} on {self._options.name}")
        state = _state_of(info)
        if state in (JobState.QUEUED, JobState.RUNNING):
            raise LauncherError(f"job {handle} is still {state}")
        asked = info.metadata or {}
        return streamed.measure(
            self._printed(handle),
            ending=_ending(info, state),
            timeout_s=float(asked.get("timeout_s", 0.0)),
            hardware=self._share(int(asked.get("num_gpus", 1))),
        )

    def output(self, handle: str, *, name: str | None = None) -> str:
        printed = self._printed(handle)
        return printed.log if name is None else printed.files.get(name, "")

    def _handle(self, job_name: str) -> str:
        return self._options.job_prefix + jobs.check_name(job_name)

    def _submit(self, handle: str, **job: Any) -> None:
        """Have Ray start the job, unless it knows one of this name."""
        try:
            self._ask(lambda client: client.submit_job(submission_id=handle, **job))
        except LauncherError:
            if self._info(handle) is None:
                raise

    def _share(self, num_gpus: int) -> Hardware:
        return Hardware(gpu=self._options.gpu, num_gpus=num_gpus, hosts=(self._options.name,))

    def _resources(self, devices: int) -> dict[str, float]:
        return {"CPU" if self._options.gpu == "cpu" else "GPU": float(devices), **self._options.resources}

    def _printed(self, handle: str) -> streamed.Printed:
        try:
            text = self._ask(lambda client: client.get_job_logs(handle))
        except LauncherError:  # the node that kept it is gone
            text = ""
        return streamed.together([streamed.parse(part) for part in streamed.by_node(text[-jobs.MAX_OUTPUT_BYTES :])])

    @cached_property
    def _client(self) -> Any:
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError:
            raise MissingExtraError("runs on Ray need ray: pip install 'hp-tool[ray]'") from None
        for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
            logging.getLogger(name).setLevel(logging.WARNING)  # every upload would be told on the console
        return JobSubmissionClient(self._options.address)

    def _ask(self, question: Callable[[Any], T]) -> T:
        """Raises LauncherError with what Ray says, or where it does not answer."""
        try:
            answer = question(self._client)
        except (RuntimeError, ValueError, OSError) as error:  # requests' errors are OSErrors
            if isinstance(error, OSError) and self._away_since is None:
                self._away_since = time.monotonic()
            raise LauncherError(f"Ray at {self._options.address}: {' '.join(str(error).split())[-500:]}") from error
        self._away_since = None
        return answer

    def _refresh(self) -> None:
        if time.monotonic() - self._asked_at >= self._options.poll_s:
            self._jobs = {each.submission_id: each for each in self._ask(lambda client: client.list_jobs())}
            self._asked_at = time.monotonic()

    def _state(self, handle: str) -> JobState:
        info = self._jobs.get(handle) or self._info(handle)  # submitted after that answer?
        return JobState.LOST if info is None else _state_of(info)

    def _info(self, handle: str) -> Any:
        """What Ray says of the job; None where it does not know it. Raises LauncherError where it does not answer."""
        try:
            return self._ask(lambda client: client.get_job_info(handle))
        except LauncherError as error:
            if "does not exist" in error.message or "404" in error.message:
                return None
            raise


def _asked_of_ray(share: Mapping[str, float]) -> dict[str, Any]:
    """A node's share in the words of submit_job."""
    others = {name: amount for name, amount in share.items() if name not in ("CPU", "GPU")}
    return {
        "entrypoint_num_cpus": share.get("CPU", 0.0),
        "entrypoint_num_gpus": share.get("GPU", 0.0),
        "entrypoint_resources": others or None,
    }


def _only_takes_the_name(info: Any) -> bool:
    return _CANCELLED in (info.metadata or {})


def _is_open(info: Any) -> bool:
    return _state_of(info) in (JobState.QUEUED, JobState.RUNNING)


def _state_of(info: Any) -> JobState:
    if _only_takes_the_name(info):
        return JobState.CANCELLED
    state = _STATES.get(str(info.status), JobState.RUNNING)
    taken = str(info.status) == "FAILED" and info.error_type not in (*_OURS, *_NEVER_STARTS)
    return JobState.PREEMPTED if taken else state


def _ending(info: Any, state: JobState) -> Ending:
    """How Ray says a job ended that could not say it itself."""
    wall_s = (info.end_time - info.start_time) / 1e3 if info.end_time and info.start_time else None
    message = " ".join((info.message or "").split())[:500]
    if state is JobState.CANCELLED:
        return Ending(reason="cancelled", wall_s=0.0 if _only_takes_the_name(info) else wall_s)
    if state is JobState.PREEMPTED:
        return Ending(reason="terminated", wall_s=wall_s, error=f"Ray ended the job: {message}")
    if info.error_type in _NEVER_STARTS:
        return Ending(reason="failed_to_start", wall_s=wall_s, error=f"Ray could not start the job: {message}")
    return Ending(reason="exited", exit_code=info.driver_exit_code, wall_s=wall_s)
