"""Jobs on a Kubernetes cluster through kubectl: no shared folder, no state of our own.

The supervisor runs a job's part in each pod and prints its results, which are read from the pods' logs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.ports import JobState, LaunchPlan
from hp_tool.domain.requests import RunRequest
from hp_tool.errors import InputError, LauncherError
from hp_tool.launchers import jobs, kubernetes_manifest, kubernetes_options, streamed, torchrun
from hp_tool.launchers.kubernetes_manifest import LABEL, NUM_GPUS, TIMEOUT_S, object_name
from hp_tool.launchers.kubernetes_options import KubernetesOptions
from hp_tool.launchers.kubernetes_states import CANCELLED, WALL_S, ended, ending, index, job_state, running_s

_COMMAND_LIMIT_S = 20.0
"""Shorter than a coordinator's lease."""


class KubernetesLauncher:
    """The Launcher port on a Kubernetes cluster. A handle is the name of the Job object."""

    name = "kubernetes"

    def __init__(self, *, options: KubernetesOptions | Mapping[str, object] | None = None) -> None:
        """options: the cluster (default: the file that HP_KUBERNETES_CONFIG names)."""
        if isinstance(options, Mapping):
            options = kubernetes_options.parse(options, origin="the options of the Kubernetes launcher")
        self._options = options if options is not None else kubernetes_options.load()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._asked_at = -float("inf")
        self._away_since: float | None = None

    def hardware(self) -> Hardware:
        return self._share(self._options.num_gpus)

    def answers(self) -> str:
        namespace = self._options.namespace
        for kind in ("jobs.batch", "configmaps", "services"):
            if self._kubectl("auth", "can-i", "create", kind, refused="no").strip() != "yes":
                raise LauncherError(f"this user may not create {kind} in the namespace {namespace}")
        return f"Kubernetes answers: Jobs may be created in the namespace {namespace}"

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Pure. Raises InputError where the request is for other devices or more of them than one job may have."""
        options = self._options
        if request.gpu != options.gpu:
            message = f"this Kubernetes cluster has {options.gpu}, not {request.gpu}"
            raise InputError(message, code="launcher_mismatch", field="cluster")
        nodes = jobs.num_nodes(request, gpus_per_node=options.gpus_per_node, max_nodes=options.max_nodes)
        environment = torchrun.job_environment(request, num_hosts=nodes, operator=options.environment)
        if "PYTHONPATH" not in options.environment:
            environment.pop("PYTHONPATH", None)  # this host's checkout; the image has its own hp_tool
        if nodes == 1:
            command = torchrun.one_node_command(request, python=options.python)
        else:
            command = torchrun.multi_node_command(request, num_nodes=nodes, python=options.python)
        return LaunchPlan(
            job_name=jobs.check_name(job_name),
            command=command,
            environment=environment,
            files=torchrun.job_files(request),
            num_gpus=request.num_gpus,
            timeout_s=request.timeout_s,
            returns=torchrun.job_returns(request),
        )

    def describe(self, plan: LaunchPlan) -> str:
        return json.dumps(kubernetes_manifest.manifest(self._options, plan=plan), indent=2)

    def submit(self, plan: LaunchPlan) -> str:
        """The Job first: what belongs to it carries its uid, and its pods wait for that."""
        handle = object_name(plan.job_name)
        kubernetes_manifest.belongings(self._options, plan=plan)  # refused before anything is made
        known = self._get(handle) or self._create(kubernetes_manifest.job(self._options, plan=plan))
        if not ended(known):
            for each in kubernetes_manifest.belongings(self._options, plan=plan, job_uid=known["metadata"]["uid"]):
                self._kubectl("apply", "-f", "-", given=json.dumps(each))
        self._asked_at = -float("inf")
        return handle

    def find(self, job_name: str) -> str | None:
        handle = object_name(job_name)
        return handle if self._get(handle) is not None else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        """Raises LauncherError once the cluster has been away for longer than the options' patience."""
        try:
            if time.monotonic() - self._asked_at >= self._options.poll_s:
                self._jobs = {each["metadata"]["name"]: each for each in self._listed()}
                self._asked_at = time.monotonic()
        except LauncherError:
            if self._away_since is not None and time.monotonic() - self._away_since > self._options.patience_s:
                raise
        lost = JobState.LOST if self._away_since is None else JobState.RUNNING
        return {handle: job_state(self._jobs[handle]) if handle in self._jobs else lost for handle in handles}

    def cancel(self, job_name: str) -> None:
        """The Job stays, suspended, with its log as far as that was read; its pods end. Where there is none, one is made
        that takes the name."""
        handle = object_name(job_name)
        known = self._get(handle) or self._create(kubernetes_manifest.cancelled_job(self._options, job_name=job_name))
        if ended(known):
            return
        annotations = {CANCELLED: "true", WALL_S: f"{running_s(known):g}"}
        mark = {"metadata": {"annotations": annotations}, "spec": {"suspend": True}}
        self._kubectl("patch", "job", handle, "--type=merge", "--patch", json.dumps(mark))
        self._asked_at = -float("inf")

    def open_jobs(self) -> list[str]:
        """As objects are named; the jobs of searches are named alike."""
        return [each["metadata"]["name"] for each in self._listed() if not ended(each)]

    def fetch(self, handle: str) -> Measurement:
        """Raises LauncherError while the job has not ended."""
        known = self._get(handle)
        if known is None:
            raise LauncherError(f"no job {handle} on {self._options.name}")
        state = job_state(known)
        if state in (JobState.QUEUED, JobState.RUNNING):
            raise LauncherError(f"job {handle} is still {state}")
        asked, pods = known["metadata"].get("annotations", {}), self._pods(handle)
        return streamed.measure(
            self._printed(pods),
            ending=ending(known, pods=pods),
            timeout_s=float(asked.get(TIMEOUT_S, 0.0)),
            hardware=self._share(int(asked.get(NUM_GPUS, 1))),
        )

    def output(self, handle: str, *, name: str | None = None) -> str:
        printed = self._printed(self._pods(handle))
        return printed.log if name is None else printed.files.get(name, "")

    def _share(self, num_gpus: int) -> Hardware:
        return Hardware(gpu=self._options.gpu, num_gpus=num_gpus, hosts=(self._options.name,))

    def _listed(self) -> list[dict[str, Any]]:
        """All of our Job objects in the namespace."""
        items: list[dict[str, Any]] = json.loads(self._kubectl("get", "jobs", f"--selector={LABEL}", "-o", "json"))["items"]
        return items

    def _pods(self, handle: str) -> list[dict[str, Any]]:
        """The job's pods in the order of their index."""
        listed = json.loads(self._kubectl("get", "pods", f"--selector={LABEL}={handle}", "-o", "json"))
        return sorted(listed["items"], key=index)

    def _printed(self, pods: Iterable[Mapping[str, Any]]) -> streamed.Printed:
        """What pods have printed; of one whose node is gone, nothing."""
        texts = []
        for pod in pods:
            with contextlib.suppress(LauncherError):
                limit = f"--limit-bytes={jobs.MAX_OUTPUT_BYTES}"
                texts.append(self._kubectl("logs", pod["metadata"]["name"], "--container=run", limit))
        return streamed.together([streamed.parse(text) for text in texts])

    def _get(self, handle: str) -> dict[str, Any] | None:
        """The Job object; None where there is none. Raises LauncherError where the cluster does not answer."""
        answer = self._kubectl("get", "job", handle, "--ignore-not-found", "-o", "json")
        found: dict[str, Any] | None = json.loads(answer) if answer.strip() else None
        return found

    def _create(self, job: dict[str, Any]) -> dict[str, Any]:
        """The Job as made, or as it is where it has been made: by somebody who was first, or with an answer that was lost."""
        try:
            made: dict[str, Any] = json.loads(self._kubectl("create", "-f", "-", "-o", "json", given=json.dumps(job)))
        except LauncherError:
            known = self._get(job["metadata"]["name"])
            if known is None:
                raise
            return known
        return made

    def _kubectl(self, *arguments: str, given: str | None = None, refused: str | None = None) -> str:
        """What kubectl prints. `refused`: an answer with which it fails although it was answered."""
        options = self._options
        context = [] if options.context is None else [f"--context={options.context}"]
        command = [options.kubectl, *context, f"--namespace={options.namespace}", *arguments]
        try:
            done = subprocess.run(
                command, input=given or "", capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._away_since = self._away_since if self._away_since is not None else time.monotonic()
            raise LauncherError(f"{options.kubectl} cannot be run: {error}") from error
        if done.returncode != 0 and (refused is None or done.stdout.strip() != refused):
            said = " ".join(done.stderr.split())[:500]
            if "Unable to connect" in said or "connection" in said:
                self._away_since = self._away_since if self._away_since is not None else time.monotonic()
            raise LauncherError(f"kubectl {arguments[0]}: {said or done.returncode}")
        self._away_since = None
        return done.stdout
