"""Any launcher, running someone's own trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hp_tool.domain.measurement import Hardware, Measurement, ProfileRequest
from hp_tool.domain.ports import JobState, Launcher, LaunchPlan
from hp_tool.domain.query import SearchSettings, TrainerCommand
from hp_tool.domain.requests import RunRequest
from hp_tool.formats.logs import read_log
from hp_tool.trainers.command import program
from hp_tool.trainers.reading import Asked, measurement
from hp_tool.training.problem import TrainingProblem


class TrainerLauncher:
    """The Launcher port over another one: plans name the trainer's command, and what it printed is read."""

    def __init__(
        self, launcher: Launcher, *, trainer: TrainerCommand, problem: TrainingProblem, settings: SearchSettings
    ) -> None:
        self.name = launcher.name
        self._launcher, self._trainer, self._problem = launcher, trainer, problem
        workload = problem.workload
        self._asked = Asked(
            sequences=workload.global_batch_size,
            sequence_length=workload.sequence_length,
            num_gpus=problem.cluster.num_gpus,
            steps=settings.steps,
            warmup_steps=settings.warmup_steps,
        )

    def hardware(self) -> Hardware:
        return self._launcher.hardware()

    def answers(self) -> str:
        return self._launcher.answers()

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """As the launcher itself. Raises UnsupportedError too, where an export cannot say the configuration."""
        assert isinstance(request, ProfileRequest)  # a search over a trainer asks for trainings
        own = program(self._trainer, request=request, problem=self._problem)
        return self._launcher.plan(replace(request, program=own), job_name=job_name)

    def describe(self, plan: LaunchPlan) -> str:
        return self._launcher.describe(plan)

    def submit(self, plan: LaunchPlan) -> str:
        return self._launcher.submit(plan)

    def find(self, job_name: str) -> str | None:
        return self._launcher.find(job_name)

    def poll(self, handles: Iterable[str]) -> dict[str, JobState]:
        return self._launcher.poll(handles)

    def cancel(self, job_name: str) -> None:
        self._launcher.cancel(job_name)

    def open_jobs(self) -> list[str]:
        return self._launcher.open_jobs()

    def fetch(self, handle: str) -> Measurement:
        """What the trainer printed, as a measurement. One that writes a result.json as the profiler does is believed."""
        ended = self._launcher.fetch(handle)
        file = self._trainer.metrics_file
        facts = read_log(self.output(handle, name=file).splitlines(), reader=self._trainer.reader)
        if file is not None and not facts.out_of_memory:
            said = read_log(self.output(handle).splitlines(), reader=self._trainer.reader)
            facts.out_of_memory, facts.out_of_memory_line = said.out_of_memory, said.out_of_memory_line
        return measurement(facts, ended=ended, asked=self._asked)

    def output(self, handle: str, *, name: str | None = None) -> str:
        return self._launcher.output(handle, name=name)
