"""`hp-tool tune`: what goes to which stream, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import service.client
from hp_tool.cli.main import build
from hp_tool.cluster import launchers
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.prices import Priced
from hp_tool.errors import InputError
from hp_tool.loop.tuning import run_search
from hp_tool.questions.schema import to_dict
from hp_tool.store import open_store
from tests.torch_or_skip import profiler_extra_or_skip
from tests.tuning.cpu_engine import CpuEngine

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def _profiler_extra():
    profiler_extra_or_skip()


@pytest.fixture
def engine(monkeypatch, tmp_path):
    made = CpuEngine()
    monkeypatch.setattr(launchers, "create", lambda name, **options: made)
    monkeypatch.setenv("HP_DATABASE_URL", f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    monkeypatch.delenv("HP_SERVER", raising=False)
    return made


def run(*arguments):
    return CliRunner().invoke(build(), ["tune", *arguments])


def test_json_stands_alone_on_stdout_and_talk_goes_to_stderr(engine):
    done = run(QUICKSTART, "--json", "--budget-runs", "4")
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert result["status"] == "ok"
    assert set(result) >= {"id", "status", "recommendations", "space", "rejections", "search"}
    assert result["search"]["profile_runs"] == 4
    best = result["recommendations"][0]
    assert set(best) == {
        *("rank", "group", "parallel", "set", "estimate", "measurement", "calibrated_estimate"),
        "measured_range_s",
        *("expected_step_s", "out_of_memory_probability", "faster"),
        *(each.name for each in fields(Priced)),
    }
    assert best["rank"] == 1
    assert f"search {result['search']['id']}" in done.stderr
    assert done.stderr.count("measured") == 4


def test_the_table_sets_before_after_and_measured_side_by_side(engine):
    done = run(QUICKSTART, "--budget-runs", "4")
    assert done.exit_code == 0
    for word in (
        "model",
        "calibrated",
        "measured",
        ": TP",
        "the maximum number of runs was reached",
    ):
        assert word in done.stdout
    search_id = re.search(r"Search (\w{16}) ", done.stdout).group(1)
    assert (
        f"`hp-tool report {search_id}` writes a page, `hp-tool export {search_id} --format "
        "megatron-lm` the flags." in done.stdout
    )
    flags = CliRunner().invoke(build(), ["export", search_id, "--format", "megatron-lm"])
    assert flags.exit_code == 0 and "--tensor-model-parallel-size" in flags.stdout
    front = run("--resume", search_id, "--pareto")
    assert front.exit_code == 0
    assert "memory" in front.stdout


def test_resume_answers_a_finished_search_and_keeps_its_query(engine):
    first = json.loads(run(QUICKSTART, "--json", "--budget-runs", "4").stdout)
    runs = len(engine.requests)
    again = run("--resume", first["search"]["id"], "--json")
    assert json.loads(again.stdout)["search"] == first["search"]
    assert len(engine.requests) == runs
    refused = run("--resume", first["search"]["id"], "--budget-runs", "9")
    assert isinstance(refused.exception, InputError)


def test_interrupted_it_pauses_and_resume_finishes(engine, monkeypatch):
    real, interrupted = CpuEngine.poll, []

    def interrupt_once(self, handles):
        if len(self.requests) == 2 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return real(self, handles)

    monkeypatch.setattr(CpuEngine, "poll", interrupt_once)
    first = run(QUICKSTART, "--budget-runs", "4", "--json")
    result = json.loads(first.stdout)
    assert result["search"]["state"] == "paused"
    resumed = json.loads(run("--resume", result["search"]["id"], "--json").stdout)
    assert (resumed["search"]["state"], resumed["search"]["profile_runs"]) == ("succeeded", 4)


class FakeClient:
    """What `--server` needs of a client; the search runs in this process, through the same
    functions as a worker.
    """

    def __init__(self, *, server):
        self.store = open_store()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    def submit_search(self, *, query, **options):
        return self.store.create_search(query=query)

    def wait(self, *, search_id, on_event):
        _, lease = self.store.claim_search(holder="worker", lease_s=60.0)
        result = run_search(store=self.store, lease=lease)
        for event in self.store.events(search_id=search_id):
            on_event(event)
        return to_dict(result)


def test_a_server_gives_the_same_kind_of_answer(engine, monkeypatch):
    monkeypatch.setattr(service.client, "Client", FakeClient)
    done = run(QUICKSTART, "--json", "--budget-runs", "4", "--server", "http://127.0.0.1:1")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["search"]["profile_runs"] == 4
    assert done.stderr.count("measured") == 4


def test_a_plan_prints_the_bill_and_the_job_and_runs_nothing(engine):
    engine.describe = lambda plan: "#!/bin/bash"
    done = run(QUICKSTART, "--plan")
    assert done.exit_code == 0
    assert "first run" in done.stdout and "at most 7 runs (budget_runs)" in done.stdout
    assert done.stdout.endswith("\n\n#!/bin/bash\n")
    answer = json.loads(run(QUICKSTART, "--plan", "--json").stdout)
    assert answer["plan"]["first"]["num_nodes"] == 1 and answer["job"] == "#!/bin/bash"
    assert engine.requests == {}


def test_exit_codes(engine):
    too_large = run(QUICKSTART, "--set", "model=gpt3-175b")
    assert too_large.exit_code == 3
    assert too_large.stdout.count("nearest: TP") == 3 and "memory:" in too_large.stdout
    engine.outcome = lambda request: Measurement(status="crashed", cause="broken", wall_s=1.0)
    failed = run(QUICKSTART, "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["error"]["code"] == "all_runs_failed"


def test_a_mismatch_of_hardware_exits_2_as_a_process(tmp_path):
    too_many = ("--set", "cluster.num_gpus=4096", "--set", "training.global_batch_size=4096")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from hp_tool.cli.main import main; main()",
            "tune",
            QUICKSTART,
            *too_many,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}"},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "the launcher has at most" in done.stderr
    assert done.stdout == ""
