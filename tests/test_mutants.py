"""Mutants: what is drawn, and that a trial tells those that the tests see from those that they do
not.
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.mutants.generate import Mutant, draw, find_mutants
from benchmarks.mutants.reached import read
from benchmarks.mutants.trial import Copy

ROOT = Path(__file__).parents[1]
SOURCE = '''"""A docstring with 1 + 1."""
Number = int | float
@cached(size=8)
def area(width: "1 + 1", height: int = 2) -> list[3]:
    assert width > 0
    if not width or isinstance(height, int | float):
        raise ValueError(f"{width + 1} is 2 + 2")
    sides = [side for side in (width, height) if side]
    return (width
            * height) if 1.5 <= max(sides) else -width
'''
FAULTS = """
def area(width: "1 + 1", height: int = 3) -> list[3]:
if not (not width or isinstance(height, int | float)):
if not width and isinstance(height, int | float):
if width or isinstance(height, int | float):
sides = [side for side in (width, height) if not (side)]
/ height) if 1.5 <= max(sides) else -width
* height) if not (1.5 <= max(sides)) else -width
* height) if 1.5 < max(sides) else -width
* height) if 1.875 <= max(sides) else -width
* height) if 1.5 <= min(sides) else -width
* height) if 1.5 <= max(sides) else width
"""


def faulty_line(mutant: Mutant) -> str:
    return mutant.diff(SOURCE.encode()).split("\n+ ")[1]


def test_operators_constants_and_conditions_are_mutated_and_nothing_else() -> None:
    every = [
        mutant
        for mutant in find_mutants(SOURCE.encode(), path="area.py")
        if mutant.kind == "operator"
    ]
    assert sorted(map(faulty_line, every)) == sorted(FAULTS.strip().splitlines())


LOCKED = """def move(self, a, b, c):
    with self._lock, open("f") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        row = find(QUERY.where(a == b).with_for_update(skip_locked=True))
    with alone(a, lock=b), autocommit_block(): pass
    return (a + b) * (c) / 2.0 // a
"""
LOST = """
return (a + b) * (c)  // a
return (a + b)  / 2.0 // a
with __import__("contextlib").nullcontext(), open("f") as file:
None
row = find(QUERY.where(a == b))
with __import__("contextlib").nullcontext(), autocommit_block(): pass
"""


def test_a_factor_is_dropped_and_a_lock_is_lost() -> None:
    lost = [
        mutant
        for mutant in find_mutants(LOCKED.encode(), path="move.py")
        if mutant.kind != "operator"
    ]
    faults = [mutant.diff(LOCKED.encode()).split("\n+ ")[1] for mutant in lost]
    assert sorted(faults) == sorted(LOST.strip().splitlines())
    assert [mutant.kind for mutant in lost].count("factor") == 2


def package(mutant: Mutant) -> str:
    """Return the package below hp_tool that a fault is in: `cost`, `loop/search`."""
    parts = mutant.path.split("/")[1:]
    return parts[0] if parts[0] in ("cost", "store") else "/".join(parts[:2])


@pytest.mark.components
def test_locks_are_drawn_where_jobs_and_rows_are_shared_and_predictions_only_of_the_core() -> None:
    locks = draw(ROOT, seed=0, count=1000, kinds=["lock"])
    assert {package(mutant) for mutant in locks} >= {"store", "cluster/launchers"}
    factors = draw(ROOT, seed=0, count=300, kinds=["factor"])
    assert {package(mutant) for mutant in factors} == {
        "cost",
        "loop/calibration",
        "loop/search",
    }


def test_a_mutant_knows_the_function_that_runs_it() -> None:
    functions = [mutant.function for mutant in find_mutants(SOURCE.encode(), path="area.py")]
    assert functions.count(None) == 1  # a default is computed on import
    assert set(functions) == {None, "area.py:area"}


@pytest.mark.components
def test_a_seed_draws_the_same_faults_again_and_each_is_another_program() -> None:
    drawn = draw(ROOT, seed=3, count=40)
    assert drawn == draw(ROOT, seed=3, count=40)
    assert len(set(drawn)) == 40
    assert set(drawn) != set(draw(ROOT, seed=4, count=40))
    assert {package(mutant) for mutant in drawn} <= {
        "cost",
        "loop/calibration",
        "loop/search",
        "store",
        "cluster/launchers",
        "loop/tuning",
    }
    assert {mutant.kind for mutant in drawn} >= {"operator", "factor"}
    for mutant in drawn:
        source = (ROOT / mutant.path).read_bytes()
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))


@pytest.mark.long
def test_a_trial_names_the_test_that_sees_a_fault_and_leaves_out_those_that_fail_anyway(
    tmp_path: Path,
) -> None:
    source = (
        "def area(width, height):\n    return width * height\n\ndef unseen(x):\n    return x + 1\n"
    )
    test = """
from hp_tool.cost.area import area
def test_that_fails_anyway():
    assert False
def test_area():
    assert area(2, 3) == 6
"""
    files = {
        "hp_tool/cost/area.py": source,
        "tests/cost/test_area.py": test,
        "hp_tool/__init__.py": "",
        "hp_tool/cost/__init__.py": "",
    }
    repository = tmp_path / "repository"
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    copy = Copy.create(repository, tmp_path / "copy")
    times, _, plus, _ = find_mutants(source.encode(), path="hp_tool/cost/area.py")
    copy.record(tmp_path / "reached.json")
    reached = read(tmp_path / "reached.json")
    assert copy.judge(times, reached=reached).killed_by == "tests/cost/test_area.py::test_area"
    assert copy.unreliable == {"tests/cost/test_area.py::test_that_fails_anyway"}
    assert copy.killers == {"tests/cost/test_area.py": 1}
    assert copy.judge(times, reached=reached, limit_s=0.0).killed_by is not None, (
        "one file runs in any case"
    )
    unseen = copy.judge(plus, reached=reached)
    assert (unseen.killed_by, unseen.reached, unseen.diff) == (
        None,
        False,
        "- return x + 1\n+ return x - 1",
    )
    assert copy.judge(replace(plus, function=times.function), reached=reached).killed_by is None
    assert {name: (copy.root / name).read_text() for name in files} == files
