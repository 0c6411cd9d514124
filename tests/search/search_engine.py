"""A cluster engine that keeps its jobs in memory, with a known truth and failures to order; and a
problem to search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.states import JobState
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import LauncherError
from hp_tool.loop.search.problem import SearchProblem
from tests.search.search_tables import make_table, true_step_s


def make_problem(**settings: object) -> SearchProblem:
    table = make_table()
    configs = []
    for row in range(len(table)):
        values = table.params(row)
        devices = values["tensor_parallel_size"] * values["pipeline_parallel_size"]
        configs.append(ParallelConfig(**values, data_parallel_size=8 // devices))
    gpu = GpuSpec(
        name="test-gpu",
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_second=1e12,
        peak_flops_per_second={"bf16": 1e14},
        pcie_bandwidth_bytes_per_second=1e10,
        inter_node_bandwidth_bytes_per_second=1e10,
        power_w=100.0,
    )
    return SearchProblem(
        query={"kind": "training"},
        model=ModelSpec(
            num_hidden_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=1024
        ),
        cluster=ClusterSpec(
            gpu=gpu,
            num_gpus=8,
            gpus_per_node=8,
            nvlink_domain_size=8,
            inter_node_bandwidth_bytes_per_second=1e10,
        ),
        training=TrainingWorkload(sequence_length=128, global_batch_size=16),
        settings=SearchSettings(**settings),
        candidates=Candidates.from_configs(configs),
        table=table,
        cluster_key="test",
        problem_digest="p",
    )


@dataclass
class Job:
    request: ProfileRequest
    state: JobState = JobState.QUEUED
    polls: int = 0


@dataclass
class MemoryEngine:
    """Jobs take three polls. `outcome(request)` may answer something else than the truth; `on_poll`
    is called each time.
    """

    problem: SearchProblem
    name: str = "memory"
    jobs: dict[str, Job] = field(default_factory=dict)
    submissions: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    outcome: Callable[[ProfileRequest], Measurement | JobState | None] = lambda request: None
    on_poll: Callable[[], None] = lambda: None
    refuse_submit: bool = False

    def hardware(self) -> Hardware:
        return Hardware(gpu="test-gpu", num_gpus=8)

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        self._planned = request
        return LaunchPlan(
            job_name=job_name,
            command=("run",),
            environment={},
            files={},
            num_gpus=request.num_gpus,
            timeout_s=60.0,
        )

    def submit(self, plan: LaunchPlan) -> str:
        if self.refuse_submit:
            raise LauncherError("no partition of that name")
        if plan.job_name in self.cancelled:
            return plan.job_name
        self.submissions.append(plan.job_name)
        self.jobs.setdefault(plan.job_name, Job(request=self._planned))
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        return job_name if job_name in self.jobs else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        self.on_poll()
        states = {}
        for handle in handles:
            job = self.jobs.get(handle)
            if job is None:
                states[handle] = JobState.LOST
                continue
            job.polls += 1
            if job.state in (JobState.QUEUED, JobState.RUNNING) and job.polls >= 3:
                special = self.outcome(job.request)
                job.state = special if isinstance(special, JobState) else JobState.FINISHED
            states[handle] = job.state
        return states

    def cancel(self, job_name: str) -> None:
        self.cancelled.append(job_name)
        job = self.jobs.get(job_name)
        if job is not None and job.state in (JobState.QUEUED, JobState.RUNNING):
            job.state = JobState.CANCELLED

    def open_jobs(self) -> list[str]:
        return [
            name
            for name, job in self.jobs.items()
            if job.state in (JobState.QUEUED, JobState.RUNNING)
        ]

    def output(self, handle: str, *, name: str | None = None) -> str:
        return ""

    def fetch(self, handle: str) -> Measurement:
        request = self.jobs[handle].request
        special = self.outcome(request)
        if isinstance(special, Measurement):
            return special
        row = self.problem.row(request.parallel)
        return Measurement(
            status="ok",
            step_s=float(true_step_s(self.problem.table)[row]),
            peak_memory_bytes=int(self.problem.table.memory_bytes[row]),
            wall_s=10.0,
            hardware=self.hardware(),
        )


def best_row(problem: SearchProblem) -> int:
    fits = problem.table.memory_bytes <= problem.table.usable_bytes
    return int(np.argmin(np.where(fits, true_step_s(problem.table), np.inf)))


def digest(config: ParallelConfig) -> str:
    return configuration_digest(parallel=config)
