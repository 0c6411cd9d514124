"""`hp-tool calibrate` as its users have it, and what later commands make of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_tool.store import open_store
from tests.learning.machine import CONFIGURATIONS, OTHER_MODEL, QUERY, lines, report, true_step_s

COMMAND = (sys.executable, "-c", "from hp_tool.cli.main import main; main()")


@pytest.fixture
def hp_tool(tmp_path: Path):
    """Runs `hp-tool ARGUMENTS` as a process on a database of its own; answers its JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    environment |= {"HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}"}

    def run(*arguments: str, stdin: str = "", exit_code: int = 0, **variables: str):
        done = subprocess.run(
            (*COMMAND, *arguments), input=stdin, capture_output=True, text=True, timeout=120, env=environment | variables
        )
        assert done.returncode == exit_code, done.stderr
        return done

    return run


def estimate(hp_tool, query, *arguments, **options):
    return json.loads(hp_tool("estimate", "-", "--json", *arguments, stdin=json.dumps(query), **options).stdout)


@pytest.mark.long
def test_reports_from_a_file_correct_estimates_of_other_models_and_sizes_on_that_cluster(hp_tool, tmp_path):
    file = tmp_path / "measured.jsonl"
    file.write_text(lines())
    made = json.loads(hp_tool("calibrate", "--measurements", str(file), "--json").stdout)
    assert made["measurements_stored"] == len(CONFIGURATIONS)
    (calibration,) = made["calibrations"]
    assert calibration["accuracy"]["error_before"] > 0.2
    assert calibration["accuracy"]["error_after"] < 0.1
    assert calibration["record"]["model_family"] == "dense"
    assert calibration["models"] == ["llama-3-8b"]

    answer = estimate(hp_tool, OTHER_MODEL)
    truth = true_step_s(OTHER_MODEL)
    before, after = answer["estimate"]["time"]["step_s"], answer["calibrated_estimate"]["time"]["step_s"]
    assert abs(after / truth - 1) < 0.1 < abs(before / truth - 1)
    low, high = answer["calibrated_estimate"]["intervals"]["step_s"]
    assert low < truth < high
    known = answer["calibrated_estimate"]["provenance"]["calibration"]
    assert (known["version"], known["measurements"]) == (1, len(CONFIGURATIONS))

    assert estimate(hp_tool, OTHER_MODEL, "--no-calibration")["calibrated_estimate"] is None
    elsewhere = OTHER_MODEL | {"cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 64, "gpus_per_node": 8}}
    assert estimate(hp_tool, elsewhere)["calibrated_estimate"] is None
    experts = OTHER_MODEL | {"model": "mixtral-8x7b", "parallel": OTHER_MODEL["parallel"] | {"expert_parallel_size": 2}}
    assert estimate(hp_tool, experts)["calibrated_estimate"] is None

    ranked = json.loads(hp_tool("recommend", "-", "--json", "--top", "5", stdin=json.dumps(QUERY)).stdout)
    steps = [row["calibrated_estimate"]["time"]["step_s"] for row in ranked["recommendations"]]
    assert steps == sorted(steps)
    table = hp_tool("recommend", "-", "--top", "3", stdin=json.dumps(QUERY)).stdout
    assert "before" in table and "6 measurements on this cluster" in table
    line = json.dumps(OTHER_MODEL) + "\n"
    assert json.loads(hp_tool("batch", "-", stdin=line).stdout)["calibrated_estimate"]["time"]["step_s"] == after

    again = json.loads(hp_tool("calibrate", "--measurements", str(file), "--json").stdout)
    assert [(each["new"], each["record"]["version"]) for each in again["calibrations"]] == [(False, 1)]
    more = json.dumps(report({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}))
    third = json.loads(hp_tool("calibrate", "--measurements", "-", "--json", stdin=more).stdout)
    assert [(each["new"], each["record"]["version"]) for each in third["calibrations"]] == [(True, 2)]


def test_a_wrong_line_is_named_and_nothing_is_stored(hp_tool, tmp_path):
    broken = report(CONFIGURATIONS[1]) | {"measurment": {}}
    stdin = json.dumps(report(CONFIGURATIONS[0])) + "\n" + json.dumps(broken)
    done = hp_tool("calibrate", "--measurements", "-", stdin=stdin, exit_code=2)
    assert "line 2" in done.stderr and "measurment" in done.stderr
    store = open_store(f"sqlite:///{tmp_path / 'hp.sqlite3'}")
    assert store.measurements().items == ()
    store.close()


def test_without_measurements_it_says_where_they_come_from(hp_tool):
    assert "hp-tool tune" in hp_tool("calibrate").stdout


def test_a_database_that_does_not_answer_costs_the_correction_only(hp_tool):
    query = QUERY | {"parallel": CONFIGURATIONS[0]}
    asked = {"HP_DATABASE_URL": "postgresql://user:secret@127.0.0.1:1/hp"}
    done = hp_tool("estimate", "-", "--json", stdin=json.dumps(query), **asked)
    assert json.loads(done.stdout)["calibrated_estimate"] is None
    assert "not calibrated" in done.stderr and "secret" not in done.stderr
