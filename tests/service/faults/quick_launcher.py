"""The launchers with a quick command: folders, supervisors, engines, time limits and adoption are
the real ones.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hp_tool.cluster.launchers import jobs, readback
from hp_tool.cluster.launchers.local import LocalLauncher
from hp_tool.cluster.launchers.ray_jobs import RayLauncher
from hp_tool.cluster.launchers.slurm import SlurmLauncher
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.states import JobState
from hp_tool.errors import EngineAwayError
from tests.service.faults import quick_job

PAUSE_S = 0.3
"""How long a job takes, about: long enough to be hit."""


class Quick:
    """Runs `quick_job` in place of the profiler."""

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        folder = home()
        arguments = (job_name, str(folder / "ledger"), str(folder / "faults"), str(PAUSE_S))
        command = (sys.executable, "-I", "-S", quick_job.__file__, *arguments)
        return replace(super().plan(request, job_name=job_name), command=command)

    def submit(self, plan: LaunchPlan) -> str:
        """Meets a bug, or kills the worker, for as long as the file `bug` or `poison` lies among
        the faults.
        """
        if (home() / "faults" / "bug").exists():
            raise RuntimeError("a bug in the launcher")
        if (home() / "faults" / "poison").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        _try_again()
        _fall_asleep("before", job=plan.job_name)
        handle = super().submit(plan)
        _fall_asleep("after", job=plan.job_name)
        return handle

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """An engine that does not answer holds its caller for as long as the file `engine` says."""
        _try_again()
        silent = home() / "faults" / "engine"
        if silent.exists():
            seconds = float(silent.read_text() or 0)
            if quick_job.taken(silent):
                time.sleep(seconds)
        return super().poll(handles)

    def cancel(self, job_name: str) -> None:
        _try_again()
        super().cancel(job_name)

    def fetch(self, handle: str) -> Measurement:
        _try_again()
        return super().fetch(handle)


class QuickLocal(Quick, LocalLauncher):
    def _start(self, folder: Path, *, environment: dict[str, str]) -> None:
        _fall_asleep("within", job=folder.name)
        super()._start(folder, environment=environment)


class QuickSlurm(Quick, SlurmLauncher):
    def _submit(self, folder: Path) -> None:
        _fall_asleep("within", job=folder.name)
        super()._submit(folder)


class QuickRay(Quick, RayLauncher):
    def _submit(self, handle: str, **job: Any) -> None:
        if job.get("runtime_env"):  # one that takes the name of a cancelled job has none
            _fall_asleep("within", job=handle.removeprefix(self._options.job_prefix))
        super()._submit(handle, **job)


def _try_again() -> None:
    """An engine that has no agent yet, as Ray's head says it, for as long as the file `again` lies
    among the faults.
    """
    if (home() / "faults" / "again").exists():
        raise EngineAwayError("No available agent to submit job, please try again later.")


def _fall_asleep(place: str, *, job: str) -> None:
    """Stop this process, until SIGCONT, where the file `asleep` names this place; `sleeper` then
    tells who sleeps over what.
    """
    fault = home() / "faults" / "asleep"
    if fault.exists() and fault.read_text() == place and quick_job.taken(fault):
        readback.write_json(fault.with_name("sleeper"), {"pid": os.getpid(), "job": job})
        os.kill(os.getpid(), signal.SIGSTOP)


def home() -> Path:
    """The folder of this fault run, above the jobs' folders."""
    return jobs.default_root().parent
