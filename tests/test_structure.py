"""The counter of branches: what it counts, at a commit and now."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.structure.__main__ import table
from benchmarks.structure.count import BRANCHES, OTHERS, by_folder, files_now, files_of_commit, naming

SOURCE = '''"""if for while: words count nothing."""
from typing import Any, cast
def first(rows: Any, kind: str) -> list[Any]:
    if kind == "training" and rows and isinstance(rows, list):
        return [cast(int, row) if row else 0 for row in rows if row.zero_stage]
    elif rows.kind in ("a", "b"):
        while True:
            pass
    try:
        for row in rows: pass
    except (OSError, ValueError): pass
    match rows:
        case []: return []
        case _: return rows  # fmt: skip
'''


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit with one file of two functions, and a working tree that has changed since."""
    (tmp_path / "hp_tool" / "cost" / "deep").mkdir(parents=True)
    (tmp_path / "hp_tool" / "cost" / "deep" / "a.py").write_text(SOURCE)
    (tmp_path / "hp_tool" / "b.yaml").write_text("zero_stage: 1")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "hp_tool" / "cost" / "deep" / "a.py").write_text("x = 1 if 2 else 3\n")
    (tmp_path / "hp_tool" / "new.py").write_text("y = 1\n")
    return tmp_path


def test_branches_are_counted_at_a_commit_and_now(repository: Path) -> None:
    before = files_of_commit(repository, "HEAD", roots=("hp_tool",))
    now = files_now(repository, roots=("hp_tool",))
    counts = by_folder(before)["hp_tool/cost"]
    branches = {name: counts[name] for name in BRANCHES.values()}
    assert branches == {
        "if": 2, "ternary": 1, "for": 1, "while": 1, "comprehension": 1, "except": 1, "bool-op": 1, "case": 2,
    }  # fmt: skip
    assert counts["branches"] == sum(branches.values()) == 10
    assert {name: counts[name] for name in OTHERS} == {"isinstance": 1, "Any": 2, "cast": 1, "kind": 2, "fmt: skip": 1}
    assert counts["lines"] == 14
    assert naming(before, "zero_stage") == ["hp_tool/b.yaml", "hp_tool/cost/deep/a.py"]
    assert naming(now, "zero_stage") == ["hp_tool/b.yaml"] and not naming(before, "zero")
    rows = [row.split() for row in table(by_folder(before), by_folder(now), columns=["branches"])]
    assert rows[1:] == [
        ["hp_tool", "0", "->", "0", "-", "->", "0.000"],
        ["hp_tool/cost", "10", "->", "1", "0.714", "->", "1.000"],
        ["all", "10", "->", "1", "0.714", "->", "0.500"],
    ]
