"""`hp-tool batch`: one answer a line, in order; a bad line harms only itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
QUERY = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 16},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 4, "recompute": "selective"},
}
BAD = {"id": "bad", "kind": "training", "modell": "gpt-22b"}


def lines(*queries: object) -> str:
    return "".join(
        (query if isinstance(query, str) else json.dumps(query)) + "\n" for query in queries
    )


def test_answers_come_in_order_and_bad_lines_stay_alone(hp_tool: Run) -> None:
    huge = '{"id": "' + "x" * 1_500_000 + '"}'
    source = lines(
        QUERY | {"id": "a"}, "not json [", BAD, "", huge, "[" * 5000, "[1, 2]", QUERY | {"id": "z"}
    )
    result = hp_tool("batch", "-", stdin=source)
    assert result.returncode == 0
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["status"] for answer in answers] == [
        "ok",
        "error",
        "error",
        "error",
        "error",
        "error",
        "ok",
    ]
    assert [answer["id"] for answer in answers] == ["a", None, "bad", None, None, None, "z"]
    assert answers[0]["estimate"] == answers[-1]["estimate"]
    assert answers[2]["error"]["code"] == "unknown_key"
    assert answers[2]["error"]["field"] == "modell"
    assert answers[3]["error"]["code"] == "too_large"
    assert all(answer["error"].keys() == {"code", "message", "field"} for answer in answers[1:-1])
    assert result.stderr == "7 answered, 5 of them with status error\n"


def test_an_infeasible_line_is_no_error(entry_point: Run) -> None:
    illegal = QUERY | {"parallel": {"tensor_parallel_size": 3}}
    answer = json.loads(entry_point("batch", "-", stdin=lines(illegal)).stdout)
    assert (answer["status"], answer["estimate"]["feasible"]) == ("ok", False)


def test_a_batch_line_is_answered_like_a_single_query_without_repeating_it(
    entry_point: Run, tmp_path: Path
) -> None:
    (tmp_path / "one.json").write_text(json.dumps(QUERY))
    one = json.loads(entry_point("estimate", "one.json", "--json").stdout)
    one["estimate"] |= dict.fromkeys(
        ("narrowest", "with_recipe")
    )  # what stands beside a single answer
    assert json.loads(entry_point("batch", "-", stdin=lines(QUERY)).stdout) == one | {"query": None}


def test_recommend_writes_to_a_file(entry_point: Run, tmp_path: Path) -> None:
    free = {name: value for name, value in QUERY.items() if name != "parallel"}
    (tmp_path / "queries.jsonl").write_text(lines(free, free))
    result = entry_point(
        "batch", "queries.jsonl", "--output=answers.jsonl", "--task=recommend", "--top=2"
    )
    assert (result.returncode, result.stdout) == (0, "")
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [len(answer["recommendations"]) for answer in answers] == [2, 2]
    assert answers[0]["recommendations"] == answers[1]["recommendations"]


def test_files_that_cannot_be_opened_are_bad_input(entry_point: Run, tmp_path: Path) -> None:
    missing = entry_point("batch", "missing.jsonl")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "missing.jsonl" in missing.stderr
    (tmp_path / "queries.jsonl").write_text(lines(QUERY))
    assert (
        entry_point("batch", "queries.jsonl", "--output=no/such/folder/out.jsonl").returncode == 2
    )


def test_a_last_line_without_newline_counts(entry_point: Run) -> None:
    assert (
        len(entry_point("batch", "-", stdin=lines(QUERY) + json.dumps(QUERY)).stdout.splitlines())
        == 2
    )
