"""Jobs on a Ray cluster through its Jobs API. A job's files are uploaded as its working directory.

On several nodes, a driver (`ray_nodes`) reserves the devices and starts a supervisor on each node.
"""

import logging
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hp_tool.cluster.launchers import jobs, streamed, torchrun
from hp_tool.cluster.launchers.jobs import Ending
from hp_tool.cluster.launchers.options import RayOptions
from hp_tool.domain.jobs import LaunchPlan, Waiting
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError, LauncherError
from hp_tool.extras import require

T = TypeVar("T")
_STATES = {
    "PENDING": JobState.QUEUED,
    "RUNNING": JobState.RUNNING,
    "STOPPED": JobState.CANCELLED,
    "SUCCEEDED": JobState.FINISHED,
    "FAILED": JobState.FINISHED,
}
_JOB_FAILURES = ("JOB_ENTRYPOINT_COMMAND_ERROR", None)
"""Error types of jobs that actually ran. Their output explains the failure."""
_NEVER_STARTS = ("RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR")
_TEMPORARY_ERROR = re.compile(
    r"try again later|no available agent|status code (429|50[234])\b|temporarily unavailable",
    re.IGNORECASE,
)
"""Error messages of a head node that has no agent or is restarting, or of a proxy in front of it.
"""
_DRIVER = "ray_nodes.py"
_CONNECT_LIMIT_S = 10.0
_STOP_LIMIT_S = 20.0
_CANCELLED = "cancelled"
"""Metadata key of the placeholder job that reserves a cancelled job's name."""


class RayLauncher(streamed.StreamedLauncher):
    """Launch jobs on a Ray cluster. A handle is the job's submission id."""

    name = "ray"

    def __init__(self, *, options: RayOptions | Mapping[str, object] | None = None) -> None:
        """Connect to the cluster in `options`.

        By default, load the options file that HP_RAY_CONFIG names.
        """
        self._options = RayOptions.create(options)
        super().__init__(self._options)

    def answers(self) -> str:
        address = urlsplit(self._options.address)
        port = address.port or (443 if address.scheme == "https" else 80)
        try:  # Ray's own client would block for minutes
            socket.create_connection(
                (address.hostname or "", port), timeout=_CONNECT_LIMIT_S
            ).close()
        except OSError as error:
            raise LauncherError(f"Ray at {self._options.address}: {error}") from error
        return f"Ray at {self._options.address} responds: {len(self._list_jobs())} jobs known"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        return torchrun.cluster_plan(request, job_name=job_name, options=self._options)

    def describe(self, plan: LaunchPlan) -> str:
        return jobs.plan_text(plan)

    def submit(self, plan: LaunchPlan) -> str:
        handle = self._handle(plan.job_name)
        nodes = self._options.num_nodes(num_gpus=plan.num_gpus)
        device = "CPU" if self._options.gpu == "cpu" else "GPU"
        bundle = {device: float(plan.num_gpus // nodes), **self._options.resources}
        files = streamed.job_files(plan, per_node={"nodes": nodes, "bundle": bundle})
        files |= {_DRIVER: Path(__file__).with_name(_DRIVER).read_text()}
        program = (_DRIVER,) if nodes > 1 else (streamed.SUPERVISOR, "--attached", ".")
        with tempfile.TemporaryDirectory(prefix="hp-ray-") as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            self._submit(
                handle,
                entrypoint=shlex.join((self._options.python or "python3", *program)),
                runtime_env={"working_dir": folder},
                metadata={"num_gpus": str(plan.num_gpus), "timeout_s": str(plan.timeout_s)},
                bundle=bundle if nodes == 1 else {},
            )
        return handle

    def cancel(self, job_name: str) -> None:
        """Stop the job. If Ray does not know it, submit a placeholder that reserves its name."""
        handle, deadline = self._handle(job_name), time.monotonic() + _STOP_LIMIT_S
        if self._job(handle) is None:
            self._submit(handle, entrypoint="true", metadata={_CANCELLED: "true"})
        while self._is_open(self._job(handle)) and not self._ask(
            lambda client: client.stop_job(handle)
        ):
            # Ray ignores a stop request for a job that is about to start.
            if time.monotonic() > deadline:
                raise LauncherError(f"Ray did not stop job {handle} within {_STOP_LIMIT_S:g} s.")
            time.sleep(0.1)

    def waiting(self, handle: str) -> Waiting | None:
        job = self._jobs.get(handle)
        return (
            Waiting(reason=_message(job))
            if job is not None and self._state(job) is JobState.QUEUED
            else None
        )

    def lasted_s(self, handle: str) -> float | None:
        job = self._job(handle)
        return (
            None if job is None or not job.end_time else max(job.end_time - job.start_time, 0) / 1e3
        )

    def open_jobs(self) -> list[str]:
        prefix = self._options.job_prefix
        handles = [handle for handle, job in self._list_jobs().items() if self._is_open(job)]
        return [handle.removeprefix(prefix) for handle in handles if handle.startswith(prefix)]

    def _handle(self, job_name: str) -> str:
        return self._options.job_prefix + jobs.check_name(job_name)

    def _submit(
        self,
        handle: str,
        *,
        entrypoint: str,
        metadata: Mapping[str, str],
        runtime_env: Mapping[str, str] | None = None,
        bundle: Mapping[str, float] | None = None,
    ) -> None:
        """Submit a job that requests the resources in `bundle`, unless Ray already has this job."""
        bundle = bundle or {}
        try:
            self._ask(
                lambda client: client.submit_job(
                    submission_id=handle,
                    entrypoint=entrypoint,
                    metadata=dict(metadata),
                    runtime_env=runtime_env,
                    entrypoint_num_cpus=bundle.get("CPU"),
                    entrypoint_num_gpus=bundle.get("GPU"),
                    entrypoint_resources={
                        k: v for k, v in bundle.items() if k not in ("CPU", "GPU")
                    }
                    or None,
                )
            )
        except LauncherError:
            if self._job(handle) is None:
                raise

    def _list_jobs(self) -> dict[str, Any]:
        return {
            job.submission_id or "": job for job in self._ask(lambda client: client.list_jobs())
        }

    def _job(self, handle: str) -> Any:
        try:
            return self._ask(lambda client: client.get_job_info(handle))
        except LauncherError as error:
            # Without Ray's own message, a 404 may come from a proxy.
            if "does not exist" in error.message:
                return None
            raise

    def _state(self, job: Any) -> JobState:
        if _is_placeholder(job):
            return JobState.CANCELLED
        if str(job.status) == "FAILED" and job.error_type not in (*_JOB_FAILURES, *_NEVER_STARTS):
            return JobState.PREEMPTED
        return _STATES.get(str(job.status), JobState.RUNNING)

    def _is_open(self, job: Any) -> bool:
        return self._state(job).is_open

    def _ending(self, handle: str, job: Any) -> Ending:
        state = self._state(job)
        began = self._printed(handle).began  # Ray reports the time of the submission as the start.
        wall_s = (
            0.0 if began is None else max(job.end_time / 1e3 - began, 0.0) if job.end_time else None
        )
        message = _message(job)
        if state is JobState.CANCELLED:
            return Ending(reason="cancelled", wall_s=0.0 if _is_placeholder(job) else wall_s)
        if state is JobState.PREEMPTED:
            return Ending(reason="terminated", wall_s=wall_s, error=f"Ray ended the job: {message}")
        if job.error_type in _NEVER_STARTS:
            return Ending(
                reason="failed_to_start",
                wall_s=wall_s,
                error=f"Ray could not start the job: {message}",
            )
        return Ending(reason="exited", exit_code=job.driver_exit_code, wall_s=wall_s)

    def _request(self, job: Any) -> tuple[int, float]:
        metadata = job.metadata or {}
        return int(metadata.get("num_gpus", 1)), float(metadata.get("timeout_s", 0.0))

    def _texts(self, handle: str) -> Iterable[str]:
        try:
            text = self._ask(lambda client: client.get_job_logs(handle))
        except EngineAwayError:  # The log may exist.
            raise
        except LauncherError:  # The node that stored the log is gone.
            text = ""
        return streamed.split_nodes(text[-jobs.MAX_OUTPUT_BYTES :])

    @cached_property
    def _client(self) -> Any:
        require("ray", by="a run on Ray")
        from ray.job_submission import JobSubmissionClient

        for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
            # Otherwise, Ray's loggers print every upload to the console.
            logging.getLogger(name).setLevel(logging.WARNING)
        return JobSubmissionClient(self._options.address)

    def _ask(self, query: Callable[[Any], T]) -> T:
        """Call a method of Ray's client.

        Raises:
            EngineAwayError: Ray does not respond, or asks to retry.
            LauncherError: Ray reports another error.
        """
        try:
            answer = query(self._client)
        except (RuntimeError, ValueError, OSError) as error:  # OSError includes requests' errors
            text = " ".join(str(error).split())
            # The cause is at the end of Ray's messages, but a proxy's error page starts with the
            # status.
            is_temporary = isinstance(error, OSError) or _TEMPORARY_ERROR.search(text) is not None
            message = (
                f"Ray at {self._options.address}: {text[:500] if is_temporary else text[-500:]}"
            )
            if is_temporary:
                self._set_away(True)
                raise EngineAwayError(message) from error
            raise LauncherError(message) from error
        self._set_away(False)
        return answer


def _message(job: Any) -> str:
    return " ".join((job.message or "").split())[:500]


def _is_placeholder(job: Any) -> bool:
    return _CANCELLED in (job.metadata or {})
