"""A reduced run as a question of its own: what the cost model is asked to predict it."""

from __future__ import annotations

from dataclasses import replace

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.search.fidelity import num_gpus, reduced
from hp_tool.training.problem import TrainingProblem


def reduced_problem(
    problem: TrainingProblem, *, parallel: ParallelConfig, fidelity: Fidelity
) -> tuple[TrainingProblem, ParallelConfig]:
    """The question that a reduced run answers, and the configuration it runs."""
    model, workload, config = reduced(fidelity=fidelity, model=problem.model, training=problem.workload, parallel=parallel)
    return replace(problem.with_num_gpus(num_gpus(config)), model=model, workload=workload), config
