"""Imports go down the layers, isolated rooms do not know each other, and a start loads little."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    {"hp_tool", "domain", "errors", "extras", "reporter"},
    {"catalog", "cost", "space", "store"},
    {"questions", "loop", "cluster", "wording"},
    {"formats", "traces", "watch"},
    {"api", "cli", "__main__", "service"},
)
"""Packages and modules of hp_tool, and the service, from the lowest layer to the highest."""
GROUPS = {"questions", "loop", "cluster"}
"""Packages whose members are rooms of their own: `loop.search`, `questions.schema`."""
PROFILER = "cluster.profiler"
"""A program that torchrun starts: it imports the lowest layer, and nobody imports it."""
DOOR = "hp_tool"
"""The package itself names what `api` offers, and loads it on first use
(test_a_start_loads_nothing_heavy).
"""
ISOLATED = {"loop.search", "cluster.launchers", "store", "loop.calibration"}
"""Rooms that `questions` and `loop.tuning` connect through ports; they do not import each other,
other than the search, which calls the mathematics of calibration.
"""

PURE = {
    "hp_tool.domain": {"annotated_types"},
    "hp_tool.cost": {"numpy"},
    "hp_tool.space": {"numpy"},
    "hp_tool.loop.calibration": {"numpy", "scipy", "threadpoolctl"},
    "hp_tool.questions.sizing": set(),
    "hp_tool.traces.timeline": {"numpy"},
    "hp_tool.watch.slowdowns": {"numpy"},
}
"""What pure packages may import beside the standard library's data structures and mathematics."""
IMPURE_STDLIB = {
    "asyncio",
    "http",
    "io",
    "os",
    "pathlib",
    "random",
    "socket",
    "sqlite3",
    "subprocess",
    "time",
    "urllib",
}
HOMES = {
    "torch": {PROFILER},
    "megatron": {PROFILER},
    "sqlalchemy": {"store"},
    "alembic": {"store"},
    "optuna": {"loop.search", "loop.tuning", "service"},
    "fastapi": {"service"},
    "starlette": {"service"},
    "uvicorn": {"service"},
    "httpx": {"service", PROFILER},
    "httpcore": {"service"},
    "prometheus_client": {"service"},
    "typer": {"cli", "service"},
    "ray": {"cluster.launchers"},
    "mcp": {"service"},
    "transformers": set(),
    "plotly": {"wording"},
    "kaleido": {"wording"},
}
"""Libraries that only some rooms may know."""
HEAVY = (
    *("torch", "megatron", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "optuna"),
    *("plotly", "ray", "scipy", "sklearn", "httpx", "mcp"),
)


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    room: str
    target: str
    """Dotted name."""

    @property
    def package(self) -> str:
        return self.target.split(".")[0]

    @property
    def target_room(self) -> str | None:
        """The room of our own it leads to; None for libraries."""
        package, _, rest = self.target.partition(".")
        if package == "service":
            return package
        return (room_of_module(rest) if rest else package) if package == "hp_tool" else None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.target}"


def room_of_module(dotted: str) -> str:
    """Return the room of a module below hp_tool; hp_tool for a name such as __version__."""
    name, *rest = dotted.split(".")
    home = ROOT / "hp_tool"
    if not ((home / name).is_dir() or (home / f"{name}.py").is_file()):
        return DOOR
    return f"{name}.{rest[0]}" if rest and name in GROUPS else name


def room_of_file(file: Path) -> str:
    """Return the room that a file belongs to."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "service":
        return "service"
    return DOOR if parts[1] == "__init__" else room_of_module(".".join(parts[1:]))


def imports() -> Iterator[Import]:
    for package in ("hp_tool", "service"):
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                for target in targets(node):
                    yield Import(file, node.lineno, room_of_file(file), target)  # type: ignore[attr-defined]


def targets(node: ast.AST) -> list[str]:
    """Dotted names an import statement brings in; `from package import name` may mean a module, so
    it names both.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def layer(room: str) -> int:
    """Return the number of a room's layer, 0 for the lowest."""
    return next(n for n, names in enumerate(LAYERS) if room.split(".")[0] in names)


@functools.cache
def everything() -> tuple[Import, ...]:
    """All imports; read at the first test, since every process of pytest-xdist collects this
    file.
    """
    return tuple(imports())


@functools.cache
def ours() -> tuple[Import, ...]:
    """Imports of one room of ours by another."""
    return tuple(
        each
        for each in everything()
        if each.target_room is not None and each.target_room != each.room
    )


def complaints(wrong: Iterator[Import]) -> str:
    return "\n".join(str(each) for each in wrong)


def test_every_module_has_a_layer() -> None:
    packages = {each.room.split(".")[0] for each in everything()}
    assert {"domain", "cost", "store", "cli", "service"} <= packages  # the walk found the project
    assert packages - {DOOR} <= set().union(*LAYERS), "add the new module to LAYERS"


def test_imports_go_down_or_stay_in_the_layer() -> None:
    assert not complaints(each for each in ours() if not allowed(each))


def allowed(each: Import) -> bool:
    assert each.target_room is not None
    if each.target_room == "service":  # --server: the command line calls the service's client
        return (
            each.file == ROOT / "hp_tool/cli/server.py" and each.target == "service.client.Client"
        )
    if each.room == DOOR:
        return True
    isolated = each.room in ISOLATED and each.target_room in ISOLATED
    return layer(each.target_room) <= layer(each.room) and (
        not isolated or (each.room, each.target_room) == ("loop.search", "loop.calibration")
    )


def test_rooms_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for each in ours():
        if each.target_room != "service" and each.room != DOOR:
            graph.setdefault(each.room, set()).add(str(each.target_room))
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_the_profiler_is_a_leaf() -> None:
    assert not complaints(each for each in ours() if each.target_room == PROFILER)
    assert not complaints(
        each for each in ours() if each.room == PROFILER and layer(str(each.target_room)) > 0
    )


def test_the_core_is_pure() -> None:
    def impure(each: Import) -> bool:
        module = ".".join(each.file.relative_to(ROOT).with_suffix("").parts)
        allowed = next((PURE[name] for name in PURE if f"{module}.".startswith(f"{name}.")), None)
        if each.target_room is not None or allowed is None:
            return False
        stdlib = each.package in sys.stdlib_module_names and each.package not in IMPURE_STDLIB
        return not stdlib and each.package not in allowed

    assert not complaints(each for each in everything() if impure(each))


def test_libraries_stay_in_their_rooms() -> None:
    assert not complaints(
        each for each in everything() if each.room not in HOMES.get(each.package, {each.room})
    )


@pytest.mark.parametrize(
    "statement", ["import hp_tool", "from hp_tool.cli import main; main.build()"]
)
def test_a_start_loads_nothing_heavy(statement: str) -> None:
    code = (
        f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}} "
        f"& set({HEAVY!r})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.split() == []


def test_a_training_question_loads_nothing_of_others() -> None:
    query = {
        "model": "gpt-22b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
        "parallel": {"tensor_parallel_size": 8},
    }
    query |= {"kind": "training", "training": {"sequence_length": 2048, "global_batch_size": 8}}
    code = (
        f"import hp_tool, sys; assert hp_tool.recommend({query!r}, top=1).recommendations; "
        "print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = result.stdout.split()
    assert "hp_tool.questions.training" in loaded
    others = (
        "questions.serving",
        "formats",
        "loop",
        "cluster",
        "store",
        "cost.lengths",
        "domain.sizing",
        "domain.answer",
    )
    assert not [
        name for name in loaded if name.startswith(tuple(f"hp_tool.{each}" for each in others))
    ]


def test_the_product_imports_nothing_that_is_not_in_the_wheel() -> None:
    """Measurements and benchmarks read the product, never the other way round."""
    outside = {"evidence", "benchmarks", "scripts", "tests"}
    assert not complaints(each for each in everything() if each.package in outside)
