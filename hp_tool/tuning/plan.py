"""What a search would submit, without submitting it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.query import Query
from hp_tool.domain.records import RunRecord, RunState
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.queries.schema import to_dict
from hp_tool.trainers import TrainerLauncher
from hp_tool.training.rank import CostedSpace
from hp_tool.tuning.clusters import create_launcher, within_limits
from hp_tool.tuning.problem import build_problem


def describe_plan(query: Query) -> str:
    """The job of the configuration that is predicted to be fastest, run whole, as its launcher hands it over.

    Raises what a search does for a query that cannot be run, and InputError where nothing fits.
    """
    if query.kind != "training":
        raise UnsupportedError("plans are shown of trainings; an inference run has none to show", field="kind")
    stored = within_limits(to_dict(query))
    launcher = create_launcher(query)
    problem = build_problem(query=query, query_json=stored, hardware=launcher.hardware())
    if isinstance(problem, CostedSpace):
        raise InputError("nothing that the query allows fits, so there is nothing to run", code="nothing_feasible")
    if query.trainer is not None:
        launcher = TrainerLauncher(launcher, trainer=query.trainer, problem=problem.training, settings=query.search)
    table = problem.search.table
    fits = np.where(table.memory_bytes <= table.usable_bytes, 0.0, np.inf)
    row = int(np.argmin(np.sum(list(table.parts_s.values()), axis=0) + fits))
    run = RunRecord(
        id="planned",
        search_id="planned",
        number=0,
        digest="",
        attempt=0,
        state=RunState.INTENDED,
        parallel=problem.search.candidates.config(row),
        fidelity=Fidelity(),
        predicted={},
        job_name="planned",
        token=0,
        created_at=datetime.now(UTC),
    )
    return launcher.describe(launcher.plan(problem.search.request(run), job_name=run.job_name))
