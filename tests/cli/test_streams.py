"""Streams that fail under the command line: one line that says so, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.command_line import COMMAND

QUERY = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 4},
    "parallel": {"tensor_parallel_size": 8},
}


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A shell's redirections around `hp-tool`, which it finds as "$@"."""
    (folder / "query.json").write_text(json.dumps(QUERY))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    environment["XDG_DATA_HOME"] = str(folder / "data")
    asked = ("bash", "-c", command, "bash", *COMMAND)
    return subprocess.run(
        asked, capture_output=True, text=True, timeout=60, cwd=folder, env=environment, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_is_said_and_no_fault_of_the_queries(tmp_path: Path) -> None:
    for arguments in ("estimate query.json --json", "batch query.json"):
        ended = shell(f'"$@" {arguments} >/dev/full', tmp_path)
        assert (ended.returncode, ended.stderr) == (1, "hp-tool: No space left on device\n")


def test_a_closed_standard_input_is_named(tmp_path: Path) -> None:
    ended = shell('"$@" estimate - <&-', tmp_path)
    assert (ended.returncode, ended.stderr) == (
        2,
        "hp-tool: standard input is closed; name a file instead of -\n",
    )


def test_a_database_without_a_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = shell('HP_DATABASE_URL="sqlite:///$PWD/file/of/hp.sqlite3" "$@" db upgrade', tmp_path)
    assert ended.returncode == 1 and ended.stderr.startswith(
        "hp-tool: Cannot create the database folder "
    )
    assert "HP_DATABASE_URL" in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["estimate query.json --nope", "estimat query.json", "recommend query.json --top many"],
)
def test_a_wrong_command_line_is_said_in_json_too(arguments: str, tmp_path: Path) -> None:
    ended = shell(f'"$@" {arguments} --json', tmp_path)
    answer = json.loads(ended.stdout)
    assert (ended.returncode, answer["status"], answer["error"]["code"]) == (2, "error", "usage")
    assert "Usage: " in ended.stderr and "Traceback" not in ended.stderr


def test_whoever_reads_may_leave(tmp_path: Path) -> None:
    ended = shell('"$@" models --json | head -c 5 >/dev/null; echo "${PIPESTATUS[0]}"', tmp_path)
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    ended = shell(
        '"$@" estimate --model "$(printf "a\\033[31m\\u202eb")" --gpu h100-sxm-80gb', tmp_path
    )
    assert ended.returncode == 2 and "\x1b" not in ended.stderr and "\u202e" not in ended.stderr
    (tmp_path / "train.sh").write_text("torchrun pretrain_gpt.py --x\x1b[31my 1 \x1b]0;title\x07\n")
    ended = shell('"$@" import train.sh', tmp_path)
    assert ended.returncode == 2 and "\x1b" not in ended.stderr + ended.stdout
