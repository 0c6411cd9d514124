"""The list by hand of public files, and how the benchmark judges what became of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.formats.public import PublicFile, fenced, listed, outcome

PAGE = "# Serve\n\n```bash\nvllm serve Qwen/Qwen3-8B -tp 2\n```\n\n```bash\nls\n```\n"
LOAD = {"inference.input_length": 100, "inference.output_length": 10}
FILE = PublicFile(
    repository="a/b",
    ref="HEAD",
    path="page.md",
    line=4,
    kind="serving",
    complete=True,
    expected="read",
    reason="",
    given=LOAD,
    facts={"parallel.tensor_parallel_size": 2, "cluster.num_gpus": 2},
)


def test_each_line_of_the_list_can_be_judged() -> None:
    files = listed()
    assert len({(each.repository, each.path) for each in files}) == len(files) >= 49
    for each in files:
        assert each.expected in ("read", "refused")
        assert bool(each.facts) == (each.expected == "read"), each.path
        assert bool(each.reason) == (each.expected == "refused"), each.path
        assert each.complete or each.expected == "refused", each.path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (FILE, "read exactly"),
        (replace(FILE, facts={"parallel.tensor_parallel_size": 4}), "misread"),
        (replace(FILE, expected="refused", reason="anything"), "misread"),
        (replace(FILE, given={}), "refused for a wrong reason"),
        (
            replace(FILE, expected="refused", reason="does not set the load", given={}),
            "refused for the true reason",
        ),
        (
            replace(FILE, line=None, expected="refused", reason="page of Markdown"),
            "refused for the true reason",
        ),
    ],
)
def test_what_became_of_a_file_is_told(file: PublicFile, expected: str, tmp_path: Path) -> None:
    assert outcome(file, PAGE, folder=tmp_path)[0] == expected


def test_the_block_around_a_line_is_the_command() -> None:
    assert fenced(PAGE, 4) == "vllm serve Qwen/Qwen3-8B -tp 2\n"
    assert fenced(PAGE, 8) == "ls\n"
