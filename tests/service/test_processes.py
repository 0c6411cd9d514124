"""API and worker as separate processes over one database: a real search, and a worker killed in the
middle of a run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from hp_tool.domain.states import RunState
from hp_tool.loop.tuning import TuneResult
from service.client import Client
from tests.conftest import skip_or_fail
from tests.service.processes import api, free_port, of_home, process, ranks, wait_for

Query = dict[str, Any]

pytestmark = pytest.mark.components


@pytest.fixture(autouse=True)
def megatron() -> None:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        skip_or_fail(component="MEGATRON", reason="the profiler extra is not installed")


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hp.sqlite3'}"


@pytest.mark.long
def test_a_search_over_http_is_the_search_of_the_command_line(
    tmp_path: Path, database_url: str, query: Query
) -> None:
    query["search"]["budget_runs"] = 2
    with (
        api(database_url=database_url, home=tmp_path) as url,
        process("worker", database_url=database_url, home=tmp_path),
        Client(server=url) as client,
    ):
        search = client.submit_search(query=query)
        kinds: list[str] = []
        answer = client.wait(search_id=search.id, on_event=lambda event: kinds.append(event.kind))
        trials = client.trials(search_id=search.id).trials
        assert client.search(search_id=search.id).state == "succeeded"
    result = _result(answer)
    assert result.search.profile_runs == 2
    assert result.recommendations[0].measurement is not None
    assert kinds.count("run") >= 4  # submitted and finished, twice
    assert len(trials) == 2
    for trial in trials:
        assert trial.predicted["step_s"] > 0
        assert trial.measurement is not None
        assert trial.measurement.step_s
        assert trial.calibrated is not None


@pytest.mark.long
def test_a_killed_worker_costs_nothing_but_time(
    tmp_path: Path, database_url: str, query: Query
) -> None:
    """kill -9 in the middle of a run: the next worker finds that run, repeats none, loses none,
    leaves no process.
    """
    query["search"] |= {"budget_runs": 3, "steps": 3}
    with api(database_url=database_url, home=tmp_path) as url, Client(server=url) as client:
        search = client.submit_search(query=query).id
        with process("worker", "--lease-s", "2", database_url=database_url, home=tmp_path) as first:
            wait_for(lambda: _running_second(client, search, tmp_path))
            before = client.trials(search_id=search).trials
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
        with process("worker", "--lease-s", "2", database_url=database_url, home=tmp_path):
            result = _result(client.wait(search_id=search))
        after = client.trials(search_id=search).trials
    assert result.search.state == "succeeded"
    assert result.search.profile_runs == 3
    assert [trial.state for trial in after] == [RunState.FINISHED] * 3
    assert len({trial.parallel for trial in after}) == 3  # nothing ran twice
    assert [(t.run_id, t.measurement_id) for t in after[:1]] == [
        (t.run_id, t.measurement_id) for t in before[:1]
    ]
    assert (
        after[1].run_id == before[1].run_id
    )  # the run that was under way is the run that was finished
    wait_for(lambda: not of_home(tmp_path))


@pytest.mark.long
def test_a_worker_told_to_end_hands_its_search_over(
    tmp_path: Path, database_url: str, query: Query
) -> None:
    query["search"]["budget_runs"] = 1
    with api(database_url=database_url, home=tmp_path) as url, Client(server=url) as client:
        search = client.submit_search(query=query).id
        with process("worker", database_url=database_url, home=tmp_path) as first:
            wait_for(
                lambda: any(
                    t.state is RunState.SUBMITTED for t in client.trials(search_id=search).trials
                )
            )
            job = client.trials(search_id=search).trials[0]
            first.send_signal(signal.SIGTERM)
            assert first.wait(timeout=20) == 0
        assert client.search(search_id=search).state == "queued"
        with process("worker", database_url=database_url, home=tmp_path):
            result = _result(client.wait(search_id=search))
        trials = client.trials(search_id=search).trials
    assert result.search.profile_runs == 1
    assert [trial.run_id for trial in trials] == [job.run_id]
    assert trials[0].attempt == 0


@pytest.mark.long
@pytest.mark.components
def test_the_compose_layout_as_processes(tmp_path: Path, postgres_url: str, query: Query) -> None:
    """PostgreSQL, then migrate, then the API and two workers, as docker-compose.yml starts them."""
    query["search"]["budget_runs"] = 1
    with process(
        "serve", "--port", str(free_port()), database_url=postgres_url, home=tmp_path
    ) as early:
        assert early.wait(timeout=60) != 0  # a schema that nobody made is not served
    with process("db", "upgrade", database_url=postgres_url, home=tmp_path) as migrate:
        assert migrate.wait(timeout=60) == 0
    with (
        api(database_url=postgres_url, home=tmp_path) as url,
        process("worker", database_url=postgres_url, home=tmp_path),
        process("worker", database_url=postgres_url, home=tmp_path),
        Client(server=url) as client,
    ):
        searches = [client.submit_search(query=query).id for _ in range(2)]
        results = [_result(client.wait(search_id=search)) for search in searches]
        trials = [client.trials(search_id=search).trials for search in searches]
    assert [result.search.profile_runs for result in results] == [1, 1]
    assert [len(found) for found in trials] == [1, 1]
    wait_for(lambda: not of_home(tmp_path))


def _running_second(client: Client, search: str, home: Path) -> bool:
    """The first run is finished, and the second one's two ranks are at work."""
    states = [trial.state for trial in client.trials(search_id=search).trials]
    return states == [RunState.FINISHED, RunState.SUBMITTED] and ranks(home) == 2


def _result(answer: dict[str, Any]) -> TuneResult:
    """The very type that `hp-tool tune` returns."""
    from hp_tool.questions import schema

    result: TuneResult = schema.parse(TuneResult, answer)
    return result
