"""`hp-tool calibrate` as its users have it, and what later commands make of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import command_line
from tests.command_line import COMMAND, Ended
from tests.learning.machine import CONFIGURATIONS, OTHER_MODEL, QUERY, lines, report, true_step_s

HpTool = Callable[..., Ended]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a user with a database of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    return kept | {"HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}"}


@pytest.fixture
def hp_tool(environment: dict[str, str]) -> HpTool:
    """Runs `hp-tool ARGUMENTS` as its entry point does, in this process."""

    def run(*arguments: str, stdin: str = "", exit_code: int = 0, **variables: str) -> Ended:
        ended = command_line.hp_tool(*arguments, stdin=stdin, **environment | variables)
        assert ended.returncode == exit_code, ended.stderr
        return ended

    return run


@pytest.fixture
def hp_tool_process(environment: dict[str, str]) -> HpTool:
    """Runs each as a process of its own."""

    def run(*arguments: str, stdin: str = "") -> Ended:
        command = (*COMMAND, *arguments)
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=True,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


def estimate(hp_tool, query, *arguments, **options):
    return json.loads(
        hp_tool("estimate", "-", "--json", *arguments, stdin=json.dumps(query), **options).stdout
    )


@pytest.mark.long
def test_reports_from_a_file_correct_estimates_of_other_models_and_sizes_on_that_cluster(
    hp_tool_process, tmp_path
):
    hp_tool = hp_tool_process
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
    before, after = (
        answer["estimate"]["time"]["step_s"],
        answer["calibrated_estimate"]["time"]["step_s"],
    )
    assert abs(after / truth - 1) < 0.1 < abs(before / truth - 1)
    low, high = answer["calibrated_estimate"]["intervals"]["step_s"]
    assert low < truth < high
    known = answer["calibrated_estimate"]["provenance"]["calibration"]
    assert (known["version"], known["measurements"]) == (1, len(CONFIGURATIONS))

    assert estimate(hp_tool, OTHER_MODEL, "--no-calibration")["calibrated_estimate"] is None
    elsewhere = OTHER_MODEL | {
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 64, "gpus_per_node": 8}
    }
    assert estimate(hp_tool, elsewhere)["calibrated_estimate"] is None
    experts = OTHER_MODEL | {
        "model": "mixtral-8x7b",
        "parallel": OTHER_MODEL["parallel"] | {"expert_parallel_size": 2},
    }
    assert estimate(hp_tool, experts)["calibrated_estimate"] is None

    ranked = json.loads(
        hp_tool("recommend", "-", "--json", "--top", "5", stdin=json.dumps(QUERY)).stdout
    )
    _, *others = [
        row["expected_step_s"] for row in ranked["recommendations"]
    ]  # the first is the simplest of its group
    assert others == sorted(others)
    table = hp_tool("recommend", "-", "--top", "3", stdin=json.dumps(QUERY)).stdout
    assert "before" in table and "6 measurements on this cluster" in table
    line = json.dumps(OTHER_MODEL) + "\n"
    assert (
        json.loads(hp_tool("batch", "-", stdin=line).stdout)["calibrated_estimate"]["time"][
            "step_s"
        ]
        == after
    )

    again = json.loads(hp_tool("calibrate", "--measurements", str(file), "--json").stdout)
    assert [(each["new"], each["record"]["version"]) for each in again["calibrations"]] == [
        (False, 1)
    ]
    more = json.dumps(report({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}))
    third = json.loads(hp_tool("calibrate", "--measurements", "-", "--json", stdin=more).stdout)
    assert [(each["new"], each["record"]["version"]) for each in third["calibrations"]] == [
        (True, 2)
    ]


def test_a_training_that_reports_all_the_time_does_not_crowd_others_out(hp_tool, tmp_path):
    file = tmp_path / "measured.jsonl"
    hourly = report(OTHER_MODEL["parallel"], query=OTHER_MODEL)
    step_s = hourly["measurement"]["step_s"]
    reports = [
        hourly | {"measurement": hourly["measurement"] | {"step_s": step_s * (1 + 1e-5 * n)}}
        for n in range(300)
    ]
    file.write_text(lines() + "".join(json.dumps(each) + "\n" for each in reports))
    made = json.loads(hp_tool("calibrate", "--measurements", str(file), "--json").stdout)
    assert made["measurements_stored"] == len(CONFIGURATIONS) + len(reports)
    (calibration,) = made["calibrations"]
    assert calibration["models"] == ["llama-3-70b", "llama-3-8b"]
    assert (
        calibration["accuracy"]["measurements"] < 100
    )  # a few of the three hundred say what all do
    answer = estimate(hp_tool, OTHER_MODEL)
    assert answer["calibrated_estimate"]["time"]["step_s"] == pytest.approx(step_s, rel=0.03)


def test_lines_are_stored_or_refused_one_by_one(hp_tool, tmp_path):
    told = [report(parallel) for parallel in CONFIGURATIONS]
    step_s = [each["measurement"]["step_s"] for each in told]
    told[0]["measurement"] = {
        "tokens_per_second_per_gpu": 32 * 4096 / 16 / step_s[0]
    }  # nothing else is needed
    told[1]["measurement"] = {"step_s": 4 * step_s[1]}
    told[2]["measurement"] = {"step_s": 30 * step_s[2]}
    told[3]["measurement"] = {"step_s": -1.0}
    told[4]["measurment"] = {}
    stdin = "\n".join([*map(json.dumps, told), "neither JSON nor a mapping"])
    done = hp_tool("calibrate", "--measurements", "-", "--json", stdin=stdin)
    answer = json.loads(done.stdout)
    refused = [
        (each["line"], each["field"], each["code"]) for each in answer["measurements_refused"]
    ]
    assert refused[:2] == [
        (4, "measurement.step_s", "invalid_value"),
        (5, "measurment", "unknown_key"),
    ]
    assert (
        refused[2][0] == 7
        and "did you mean measurement?" in answer["measurements_refused"][1]["message"]
    )
    assert answer["measurements_stored"] == 4 and len(answer["measurements_held"]) == 1
    assert "line 4 rejected: measurement.step_s must be from" in done.stderr
    assert "times off the predicted" in done.stderr and "until it is accepted" in done.stderr
    assert answer["calibrations"][0]["record"]["num_measurements"] == 3

    stored = json.loads(hp_tool("measurements", "--json").stdout)["measurements"]
    assert {each["measurement"]["status"] for each in stored} == {"ok"}
    rated = next(each for each in stored if each["parallel"]["tensor_parallel_size"] == 2)
    assert rated["measurement"]["step_s"] == pytest.approx(step_s[0])
    nothing = hp_tool("calibrate", "--measurements", "-", stdin="broken", exit_code=2)
    assert (
        "line 1 rejected" in nothing.stderr
        and "0 measurements stored, 1 line rejected" in nothing.stdout
    )


def test_a_measurement_is_excluded_and_taken_back_each_as_a_version(hp_tool):
    hp_tool("calibrate", "--measurements", "-", stdin=lines())
    query = QUERY | {"parallel": CONFIGURATIONS[0]}
    before = estimate(hp_tool, query)["calibrated_estimate"]
    rows = json.loads(hp_tool("measurements", "--model", "llama-3-8b", "--json").stdout)[
        "measurements"
    ]
    identity = rows[0]["id"]

    changed = json.loads(hp_tool("measurements", "--exclude", identity, "--json").stdout)
    assert [each["state"] for each in changed["measurements"]] == ["excluded"]
    (made,) = changed["calibrations"]
    assert (made["record"]["version"], made["record"]["num_measurements"]) == (
        2,
        len(CONFIGURATIONS) - 1,
    )
    assert identity not in made["record"]["payload"]["measurement_ids"]
    assert (
        estimate(hp_tool, query)["calibrated_estimate"]["provenance"]["calibration"]["version"] == 2
    )

    table = hp_tool("measurements", "--delete", identity).stdout
    assert (
        "deleted" in table and identity in table and "version" not in table.splitlines()[-1]
    )  # it taught nothing before
    assert identity not in hp_tool("measurements").stdout
    assert "version 3" in hp_tool("measurements", "--accept", identity).stdout
    after = estimate(hp_tool, query)["calibrated_estimate"]
    assert after["time"] == before["time"]
    assert (
        "No measurement 'nobody'"
        in hp_tool("measurements", "--accept", "nobody", exit_code=2).stderr
    )


def test_runs_without_a_step_time_say_that_they_correct_none(hp_tool):
    failed = report(CONFIGURATIONS[0]) | {"measurement": {"status": "oom"}}
    hp_tool("calibrate", "--measurements", "-", stdin=json.dumps(failed))
    query = QUERY | {"parallel": CONFIGURATIONS[1]}
    done = estimate(hp_tool, query)
    known = done["calibrated_estimate"]["provenance"]
    assert known["calibration"]["correction"] == pytest.approx(1.0)
    assert "no run of the calibration has a step time" in known["calibration_unused"]


def test_when_all_is_excluded_nothing_is_corrected(hp_tool):
    hp_tool("calibrate", "--measurements", "-", stdin=json.dumps(report(CONFIGURATIONS[0])))
    query = QUERY | {"parallel": CONFIGURATIONS[0]}
    assert estimate(hp_tool, query)["calibrated_estimate"] is not None
    (row,) = json.loads(hp_tool("measurements", "--json").stdout)["measurements"]
    (made,) = json.loads(hp_tool("measurements", "--exclude", row["id"], "--json").stdout)[
        "calibrations"
    ]
    assert (made["record"]["version"], made["record"]["num_measurements"]) == (2, 0)
    assert estimate(hp_tool, query)["calibrated_estimate"] is None


@pytest.mark.parametrize(
    ("measured_on", "asked_about"),
    [
        (
            {"gpu": "h100-sxm-80gb", "num_gpus": 16, "gpus_per_node": 8},
            {"gpu": "h100-sxm-80gb", "num_gpus": 4},
        ),
        ({"gpu": "gb200-nvl72", "num_gpus": 64}, {"gpu": "gb200-nvl72", "num_gpus": 8}),
    ],
)
def test_jobs_of_any_size_on_one_kind_of_machine_teach_each_other(
    hp_tool, measured_on, asked_about
):
    parallel = {"tensor_parallel_size": 2, "recompute": "full", "zero_stage": 3}
    told = report(parallel, query=QUERY | {"cluster": measured_on})
    hp_tool("calibrate", "--measurements", "-", stdin=json.dumps(told))
    answer = estimate(hp_tool, QUERY | {"cluster": asked_about, "parallel": parallel})
    known = answer["calibrated_estimate"]["provenance"]["calibration"]
    assert (known["runs"], known["models"]) == (1, {"llama-3-8b": 1})
    corrected = (
        answer["calibrated_estimate"]["time"]["step_s"] / answer["estimate"]["time"]["step_s"]
    )
    assert known["correction"] == pytest.approx(corrected) and corrected > 1.0


def test_an_answer_says_why_nothing_corrects_it(hp_tool):
    def why(**changes):
        answer = estimate(hp_tool, QUERY | {"parallel": CONFIGURATIONS[0]} | changes)
        assert answer["calibrated_estimate"] is None
        return answer["estimate"]["provenance"].get("calibration_unused")

    assert why() is None  # there is no database at all
    hp_tool("calibrate", "--measurements", "-", stdin=json.dumps(report(CONFIGURATIONS[0])))
    assert "megatron-core was measured, not torch-fsdp" in why(
        training=QUERY["training"] | {"framework": "torch-fsdp"}, parallel={"zero_stage": 3}
    )
    slower = QUERY["cluster"] | {"inter_node_bandwidth_bytes_per_second": 12.5e9}
    assert "another node, domain or network" in why(cluster=slower)
    assert "no measurements on a100-sxm-80gb/node8" in why(
        cluster={"gpu": "a100-sxm-80gb", "num_gpus": 16}
    )
    experts = OTHER_MODEL | {
        "model": "mixtral-8x7b",
        "parallel": OTHER_MODEL["parallel"] | {"expert_parallel_size": 2},
    }
    assert "only dense models were measured" in why(**experts)


def test_without_measurements_it_says_where_they_come_from(hp_tool):
    assert "hp-tool tune" in hp_tool("calibrate").stdout


def test_a_database_that_does_not_answer_costs_the_correction_only(hp_tool):
    query = QUERY | {"parallel": CONFIGURATIONS[0]}
    asked = {"HP_DATABASE_URL": "postgresql://user:secret@127.0.0.1:1/hp"}
    done = hp_tool("estimate", "-", "--json", stdin=json.dumps(query), **asked)
    assert json.loads(done.stdout)["calibrated_estimate"] is None
    assert "not calibrated" in done.stderr and "secret" not in done.stderr
