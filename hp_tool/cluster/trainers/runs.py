"""Run a trainer's command with any launcher, and read the measurement from its log."""

import statistics
from dataclasses import replace
from itertools import pairwise

from hp_tool.cluster.launchers import jobs
from hp_tool.cluster.logs import LogFacts, read_log
from hp_tool.cluster.trainers.command import build_program
from hp_tool.domain.fields import check_spec
from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Measurement, ProfileRequest, interquartile_range
from hp_tool.domain.ports import Launcher, Queueing, Timekeeping
from hp_tool.domain.query import SearchSettings, TrainerCommand
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.training.problem import TrainingProblem


class TrainerLauncher:
    """Wrap a launcher to run the trainer's command and read measurements from its log."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        trainer: TrainerCommand,
        problem: TrainingProblem,
        settings: SearchSettings,
    ) -> None:
        self._launcher, self._trainer, self._problem, self._settings = (
            launcher,
            trainer,
            problem,
            settings,
        )
        # Everything except `plan` and `fetch` is delegated to the launcher.
        self.name, self.hardware, self.answers = launcher.name, launcher.hardware, launcher.answers
        self.describe, self.submit, self.find, self.poll = (
            launcher.describe,
            launcher.submit,
            launcher.find,
            launcher.poll,
        )
        self.cancel, self.open_jobs, self.output = (
            launcher.cancel,
            launcher.open_jobs,
            launcher.output,
        )
        if isinstance(launcher, Queueing):
            self.waiting = launcher.waiting
        if isinstance(launcher, Timekeeping):
            self.lasted_s = launcher.lasted_s

    def plan(self, request: RunRequest, *, job_name: str) -> LaunchPlan:
        """Plan a run of the trainer's command.

        Raises:
            UnsupportedError: An export does not support the configuration.
        """
        assert isinstance(request, ProfileRequest)  # Searches with a trainer run only trainings.
        trainer_program = build_program(self._trainer, request=request, problem=self._problem)
        return self._launcher.plan(replace(request, program=trainer_program), job_name=job_name)

    def fetch(self, handle: str) -> Measurement:
        """Return the measurement from the trainer's log, or from its result.json."""
        outcome = self._launcher.fetch(handle)
        file = self._trainer.metrics_file
        facts = read_log(self.output(handle, name=file).splitlines(), reader=self._trainer.reader)
        if file is not None and not facts.out_of_memory:
            log = read_log(self.output(handle).splitlines(), reader=self._trainer.reader)
            facts.out_of_memory, facts.out_of_memory_line = (
                log.out_of_memory,
                log.out_of_memory_line,
            )
        workload, num_gpus = self._problem.workload, self._problem.cluster.num_gpus
        if self._trainer.reducible:
            text = self.output(handle, name=jobs.REQUEST)
            if not text:  # `ended` explains how the run ended
                return outcome
            request = jobs.request_json().validate_json(text)
            assert isinstance(request, ProfileRequest)
            workload, num_gpus = request.training, request.num_gpus
        return measurement(
            facts, ended=outcome, workload=workload, num_gpus=num_gpus, settings=self._settings
        )


def measurement(
    facts: LogFacts,
    *,
    ended: Measurement,
    workload: TrainingWorkload,
    num_gpus: int,
    settings: SearchSettings,
) -> Measurement:
    """Return the measurement from the log if it has enough steps, else `ended` with the cause.

    Steps that started during warm-up are excluded, and a mean over several steps counts as all of
    them. If the job printed all its steps, how it ended does not matter. If it exited or timed out
    earlier, the printed steps are used.

    Args:
        facts: Figures from the log.
        ended: The launcher's measurement of a job that wrote no result itself.
        workload: The training workload.
        num_gpus: Number of devices.
        settings: The search's numbers of steps and warm-up steps.
    """
    if ended.status in ("ok", "preempted"):
        return ended
    printed_s, ends_at = facts.step_times_s(workload, num_gpus=num_gpus)
    spans = zip(printed_s, _steps_around(ends_at, count=len(printed_s)), strict=True)
    settled = [
        (time_s, last - first) for time_s, (first, last) in spans if first >= settings.warmup_steps
    ]
    times_s, steps = tuple(time_s for time_s, _ in settled), sum(count for _, count in settled)
    done = steps >= settings.steps
    if facts.out_of_memory and not (done and ended.exit_code == 0):
        return replace(ended, status="oom", cause=facts.out_of_memory_line, exit_code=None)
    if not times_s and ended.exit_code == 0:
        no_steps = (
            f"the trainer ended and printed no step after the {settings.warmup_steps} warm-up "
            "steps. Make it print every step and run {train_iters} steps"
        )
        unread = (
            "the trainer ended and printed no step that trainer.reader recognizes. Is it the right "
            "reader?"
        )
        return replace(ended, cause=no_steps if printed_s else unread)
    if not times_s or not (done or ended.exit_code == 0 or ended.status == "timeout"):
        return ended
    step_s = statistics.median(times_s)
    shortfall = f"{steps} of {settings.steps} steps measured"
    run = Measurement(
        status="ok",
        step_s=step_s,
        step_s_spread=interquartile_range(times_s),
        step_times_s=times_s,
        tokens_per_second_per_gpu=workload.global_batch_size
        * workload.sequence_length
        / step_s
        / num_gpus,
        peak_memory_bytes=None if facts.allocated_bytes is None else int(facts.allocated_bytes),
        peak_reserved_bytes=None if facts.reserved_bytes is None else int(facts.reserved_bytes),
        peak_memory_source=None if facts.allocated_bytes is None else "cuda_allocator",
        losses=tuple(facts.losses),
        hardware=ended.hardware,
        wall_s=ended.wall_s,
        cause=None
        if done
        else f"{shortfall}: {ended.cause}"
        if ended.status == "timeout"
        else shortfall,
    )
    try:
        return check_spec(run, field="log")
    except InputError as error:
        return replace(
            ended, status="crashed", cause=f"the trainer's log is invalid: {error.message}"
        )


def _steps_around(ends_at: list[int], *, count: int) -> list[tuple[int, int]]:
    """Return the steps before and after each figure; one step each if steps are not numbered.

    Steps are counted from the start of the run, which may be a checkpoint. The first figure is
    therefore assumed to cover at most as many steps as the second.
    """
    if not ends_at or len(ends_at) != count:
        return [(number, number + 1) for number in range(count)]
    gap = ends_at[1] - ends_at[0] if count > 1 else ends_at[0]
    start = ends_at[0] - min(gap, ends_at[0])
    edges = [0, *(end - start for end in ends_at)]
    return list(pairwise(edges))
