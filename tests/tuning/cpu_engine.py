"""A cluster engine in memory whose jobs end at once: a host whose steps take what the cost model
says, times a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.query import Query
from hp_tool.domain.states import JobState
from hp_tool.questions.training import config_query, estimate

FACTOR = 2.5


@dataclass
class CpuEngine:
    gpu: str = "cpu"
    num_gpus: int = 8
    name: str = "memory"
    outcome: Callable[[ProfileRequest], Measurement | None] = lambda request: None
    requests: dict[str, ProfileRequest] = field(default_factory=dict)
    planned: dict[str, ProfileRequest] = field(default_factory=dict)

    def hardware(self) -> Hardware:
        return Hardware(gpu=self.gpu, num_gpus=self.num_gpus, hosts=("test-host",))

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        self.planned[job_name] = request
        return LaunchPlan(
            job_name=job_name,
            command=("run",),
            environment={},
            files={},
            num_gpus=request.num_gpus,
            timeout_s=60.0,
        )

    def submit(self, plan: LaunchPlan) -> str:
        self.requests.setdefault(plan.job_name, self.planned[plan.job_name])
        return plan.job_name

    def find(self, job_name: str) -> str | None:
        return job_name if job_name in self.requests else None

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return {
            handle: JobState.FINISHED if handle in self.requests else JobState.LOST
            for handle in handles
        }

    def cancel(self, job_name: str) -> None:
        pass

    def open_jobs(self) -> list[str]:
        return []

    def fetch(self, handle: str) -> Measurement:
        request = self.requests[handle]
        special = self.outcome(request)
        if special is not None:
            return special
        query = Query(
            kind="training",
            model=request.model,
            cluster=ClusterQuery(
                gpu=request.gpu, num_gpus=request.num_gpus, gpus_per_node=request.num_gpus
            ),
            training=request.training,
            parallel=config_query(request.parallel),
        )
        predicted = estimate(query=query)
        step_s = FACTOR * predicted.time.step_s
        tokens = request.training.global_batch_size * request.training.sequence_length
        return Measurement(
            status="ok",
            step_s=step_s,
            tokens_per_second_per_gpu=tokens / step_s / request.num_gpus,
            peak_memory_bytes=int(predicted.memory.allocated_bytes),
            wall_s=10.0,
            hardware=self.hardware(),
        )
