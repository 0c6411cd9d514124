"""A search tries what a ranking would choose beside the layout: offload where nothing fits without,
how ranks exchange a split sequence, the fewest devices. Runs, rows and measurements carry it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.jobs import LaunchPlan
from hp_tool.domain.measurement import Measurement, ProfileRequest
from hp_tool.domain.ports import Store
from hp_tool.domain.records import REUSED
from hp_tool.formats.exchange.export import write_text
from hp_tool.loop.tuning import TuneResult, tune
from hp_tool.loop.tuning.plan import bill
from hp_tool.loop.tuning.run import build_search
from hp_tool.loop.tuning.training_result import TuningProblem
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training import estimate, recommend
from hp_tool.store import open_store
from tests.tuning.cpu_engine import CpuEngine

GPU = "h100-sxm-80gb"
COMMAND = ["pretrain_gpt.py", "{flags:megatron-lm}", "--train-iters", "{train_iters}"]


def outcome(request: ProfileRequest) -> Measurement:
    step_s = 10.0 + request.parallel.micro_batch_size + request.parallel.tensor_parallel_size
    times = tuple(step_s * share for share in (0.999, 1.0, 1.001))
    return Measurement(
        status="ok", step_s=step_s, step_times_s=times, wall_s=10.0, peak_memory_bytes=60 << 30
    )


class Cluster(CpuEngine):
    """An engine whose jobs may be someone's own command."""

    def __init__(self, num_gpus: int) -> None:
        super().__init__(gpu=GPU, num_gpus=num_gpus, outcome=outcome)
        self.commands: list[tuple[str, ...]] = []

    def plan(self, request: ProfileRequest, *, job_name: str) -> LaunchPlan:
        if request.program is not None:
            self.commands.append(request.program.command)
        return super().plan(request, job_name=job_name)

    def answers(self) -> bool:
        return True

    def describe(self, plan: LaunchPlan) -> str:
        return plan.job_name

    def output(self, handle: str, *, name: str | None = None) -> str:
        return ""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    yield opened
    opened.close()


def asked(
    model: str, num_gpus: int, *, length: int, batch: int, command: list[str] | None = None
) -> dict[str, Any]:
    query = {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": GPU, "num_gpus": num_gpus},
        "training": {"sequence_length": length, "global_batch_size": batch},
        "search": {"budget_runs": 2, "fidelity": "full", "min_gain_fraction": 0.0},
    }
    return (
        query
        if command is None
        else query | {"trainer": {"command": command, "reader": "megatron-lm"}}
    )


def searched(query: dict[str, Any], store: Store) -> tuple[TuneResult, Cluster]:
    engine = Cluster(query["cluster"]["num_gpus"])
    return tune(query=schema.parse_query(query), store=store, launcher=engine), engine


def check(query: dict[str, Any], result: TuneResult, store: Store) -> None:
    """Rows, runs and measurements are of one configuration each, and say so."""
    typed = schema.parse_query(query)
    assert result.recommendations
    for row in result.recommendations:
        this = Configuration.from_row(row, query=typed)
        again = estimate(query=schema.parse_query(this.text()))
        assert again.time is not None and again.time.step_s == pytest.approx(
            row.estimate.time.step_s, rel=1e-9
        )
        assert again.memory.total_bytes == pytest.approx(row.estimate.memory.total_bytes, rel=1e-9)
    (best,) = (row for row in result.recommendations if row.rank == 1)
    for run in store.runs(search_id=result.search.id):
        assert run.set == best.set
        ran = Configuration.from_row(run, query=typed)
        assert estimate(query=ran.query).time.step_s == pytest.approx(
            run.predicted["step_s"], rel=1e-9
        )
    for record in store.measurements(search_id=result.search.id).items:
        again = estimate(
            query=Configuration.from_row(record, query=schema.parse_query(record.query)).query
        )
        assert again.time.step_s == pytest.approx(record.predicted["step_s"], rel=1e-9), (
            "later calibrations predict what ran"
        )


def test_where_nothing_fits_without_offload_a_search_runs_with_it(store: Store) -> None:
    query = asked("llama-3-70b", 16, length=8192, batch=512, command=COMMAND)
    ranked = recommend(query=schema.parse_query(query), top=1).recommendations[0]
    result, engine = searched(query, store)
    assert ranked.set == {"training.offload": "optimizer"}
    check(query, result, store)
    assert {str(row.set) for row in result.recommendations} == {str(ranked.set)}
    assert engine.commands and all(
        "--optimizer-cpu-offload" in command for command in engine.commands
    )
    assert all(request.training.offload == "optimizer" for request in engine.requests.values())
    assert result.answer.set == bill(schema.parse_query(query)).plan.set == ranked.set
    text = write_text(
        Configuration.from_row(result.recommendations[0], query=schema.parse_query(query)),
        "megatron-lm",
    )
    assert "--optimizer-cpu-offload" in text


def test_what_runs_cannot_do_is_not_chosen_for_them(store: Store) -> None:
    """The built-in profiler keeps everything on the device."""
    result, engine = searched(asked("llama-3-70b", 16, length=8192, batch=512), store)
    assert all(request.training.offload is None for request in engine.requests.values())
    assert all(row.set == {} for row in (*result.recommendations, *result.nearest_misses))


def test_ranks_exchange_a_sequence_as_the_ranking_chose(store: Store) -> None:
    query = asked("llama-3-8b", 64, length=131072, batch=64, command=COMMAND)
    query["parallel"] = {"context_parallel_size": 16, "tensor_parallel_size": 1}
    ranked = recommend(query=schema.parse_query(query), top=1).recommendations[0].parallel
    result, engine = searched(query, store)
    assert ranked.context_parallel_communication == "a2a+p2p"
    check(query, result, store)
    split = [command for command in engine.commands if "--context-parallel-size" in command]
    assert split
    for command in split:
        assert command[command.index("--cp-comm-type") + 1] == "a2a+p2p"


def test_the_fewest_devices_stand_in_rows_and_runs(store: Store) -> None:
    query = asked("llama-3-8b", 64, length=8192, batch=512) | {"objective": "min_gpus"}
    result, engine = searched(query, store)
    (devices,) = {request.num_gpus for request in engine.requests.values()}
    assert devices < 64 and all(
        row.set == {"cluster.num_gpus": devices} for row in result.recommendations
    )
    check(query, result, store)


def test_a_run_of_another_exchange_does_not_stand_for_one(store: Store) -> None:
    """The configuration's digest leaves to the query how ranks exchange a sequence."""
    query = asked("llama-3-8b", 64, length=131072, batch=64, command=COMMAND)
    query["search"] |= {"reuse": True}
    query["parallel"] = {
        "context_parallel_size": 8,
        "tensor_parallel_size": 4,
        "context_parallel_communication": "p2p",
    }
    searched(query, store)
    query["parallel"]["context_parallel_communication"] = "all_gather"
    for taken_over in (False, True):
        result, _ = searched(query, store)
        assert (
            any(REUSED in run.predicted for run in store.runs(search_id=result.search.id))
            is taken_over
        )


def test_a_search_that_goes_on_keeps_its_first_choice(store: Store) -> None:
    """Another edition may choose otherwise: what the first run had holds for those after it."""
    query = schema.parse_query(asked("llama-3-70b", 16, length=8192, batch=512, command=COMMAND))

    def chosen(first: dict[str, Any] | None) -> dict[str, Any]:
        problem = build_search(
            query=query,
            query_json=schema.to_dict(query),
            hardware=Cluster(16).hardware(),
            chosen=first,
        )
        assert isinstance(problem, TuningProblem)
        return dict(problem.training.chosen)

    assert chosen(None) == {"training.offload": "optimizer"}
    kept = {"training.offload": "activations"}
    assert chosen(kept) == kept
