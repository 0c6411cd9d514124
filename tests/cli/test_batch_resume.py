"""Large batches: several processes, kills, resumption, and what a summary tells."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import COMMAND

Run = Callable[..., Any]
QUERY = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 16},
    "parallel": {"tensor_parallel_size": 8, "micro_batch_size": 4, "recompute": "selective"},
}


def write(path: Path, count: int) -> list[str]:
    ids = [f"q{number}" for number in range(count)]
    path.write_text("".join(json.dumps(QUERY | {"id": name}) + "\n" for name in ids))
    return ids


def answered(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def killed_in_the_middle(command: tuple[str, ...], *, folder: Path, output: Path) -> None:
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 40.0
    before = output.stat().st_size if output.exists() else 0
    while not (output.exists() and output.stat().st_size > before) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.components
def test_killed_and_resumed_no_line_is_lost_or_doubled(tmp_path: Path, hp_tool: Run) -> None:
    ids = write(tmp_path / "queries.jsonl", 2000)
    output = tmp_path / "answers.jsonl"
    arguments = ("batch", "queries.jsonl", "--output=answers.jsonl", "--no-calibration")
    killed_in_the_middle((*COMMAND, *arguments), folder=tmp_path, output=output)
    assert 0 < output.read_bytes().count(b"\n") < len(ids)
    with output.open("ab") as stream:  # wherever the kill fell, this is the worst place
        stream.write(b'{"id": "half')
    killed_in_the_middle(
        (*COMMAND, *arguments, "--resume", "--jobs=2"), folder=tmp_path, output=output
    )
    done = hp_tool(*arguments, "--resume", "--jobs=2")
    assert done.returncode == 0
    assert answered(output) == ids
    assert hp_tool(*arguments, "--resume").stderr.startswith(
        "kept 2000 answers from --output\n0 answered"
    )
    assert answered(output) == ids


@pytest.mark.components
def test_several_processes_answer_in_order_like_one(tmp_path: Path, hp_tool: Run) -> None:
    write(tmp_path / "queries.jsonl", 300)
    with (tmp_path / "queries.jsonl").open("a") as stream:
        stream.write(
            "no json [\n" + "x" * 1_100_000 + "\n" + json.dumps(QUERY | {"id": "last"}) + "\n"
        )
    one, two = (hp_tool("batch", "queries.jsonl", f"--jobs={jobs}") for jobs in (1, 2))
    assert one.stdout == two.stdout
    assert one.stderr == two.stderr == "303 answered, 2 of them with status error\n"


def test_a_resumed_file_must_belong_to_the_queries(tmp_path: Path, entry_point: Run) -> None:
    write(tmp_path / "queries.jsonl", 3)
    output = tmp_path / "answers.jsonl"
    command = ("batch", "queries.jsonl", "--output=answers.jsonl", "--resume")
    assert entry_point(*command).returncode == 0  # a file that is not there yet is begun
    answers = output.read_text().splitlines(keepends=True)
    for content, complaint in (
        ("".join(answers[:1]) + "hello\n", "not an answer"),
        ("".join(reversed(answers)), "answers 'q0', not 'q2'"),
        ("".join(answers * 2), "more than the number of queries"),
    ):
        output.write_text(content)
        refused = entry_point(*command)
        assert (refused.returncode, output.read_text()) == (2, content)
        assert complaint in refused.stderr
    output.write_text(answers[0])
    assert "not from --task recommend" in entry_point(*command, "--task=recommend").stderr
    assert entry_point("batch", "queries.jsonl", "--resume").returncode == 2


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 7, 3 << 20])
def test_whole_lines_are_kept_whatever_their_length(tmp_path: Path, size: int) -> None:
    from hp_tool.cli.batch import truncate_incomplete_line

    path = tmp_path / "answers"
    first, second = b'{"status": "ok"}', b'{"status": "error", "id": "' + b"x" * size + b'"}'
    path.write_bytes(first + b"\n" + second + b"\nhalf")
    with path.open("r+b") as stream:
        assert truncate_incomplete_line(stream) == (2, second)
    assert path.read_bytes() == first + b"\n" + second + b"\n"


DAMAGES = (
    b"\0" * 80,
    b'{"status": "ok", "id": "q1{"status": "ok"}',
    b"",
    b"[1]",
    b'{"status": "maybe"}',
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_line_is_named(tmp_path: Path, entry_point: Run, damage: bytes) -> None:
    write(tmp_path / "queries.jsonl", 4)
    output = tmp_path / "answers.jsonl"
    command = ("batch", "queries.jsonl", "--output=answers.jsonl", "--no-calibration")
    assert entry_point(*command).returncode == 0
    lines = output.read_bytes().splitlines()
    output.write_bytes(b"\n".join((lines[0], damage, lines[2], b"")))
    before = output.read_bytes()
    refused = entry_point(*command, "--resume")
    assert (
        refused.returncode == 2
        and "line 2 of the output is not an answer" in refused.stderr
        and "head -n 1" in refused.stderr
    )
    assert output.read_bytes() == before


def test_a_terminal_sees_how_far_it_is(tmp_path: Path) -> None:
    write(tmp_path / "queries.jsonl", 300)
    terminal, end = pty.openpty()
    command = (*COMMAND, "batch", "queries.jsonl", "--output=answers.jsonl", "--no-calibration")
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=end, env=os.environ | {"TERM": "xterm"}
    )
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert b"100%" in shown and b"300 answered" in shown


def test_a_summary_counts_and_names_the_best(tmp_path: Path, entry_point: Run) -> None:
    slow = QUERY | {"id": "slow", "parallel": {**QUERY["parallel"], "recompute": "full"}}  # type: ignore[dict-item]
    illegal = QUERY | {"id": "illegal", "parallel": {"tensor_parallel_size": 3}}
    lines = [slow, QUERY | {"id": "fast"}, illegal, {"id": "bad"}]
    result = entry_point(
        "batch", "-", "--summary", stdin="".join(json.dumps(line) + "\n" for line in lines)
    )
    words = " ".join(result.stderr.replace("│", " ").split())
    assert "answered 4 feasible 2 infeasible 1 heads_not_divisible 1" in words
    assert "errors 1 missing_field 1" in words
    assert "line 2 (fast)" in words
    assert len(result.stdout.splitlines()) == 4
    free = {name: value for name, value in QUERY.items() if name != "parallel"}
    told = entry_point(
        "batch", "-", "--summary", "--task=recommend", stdin=json.dumps(free) + "\n"
    ).stderr
    assert "feasible" in told
