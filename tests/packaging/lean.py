"""Folders that hold what an installation with some extras would, made of links to what is installed
here.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import hp_tool

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def closure(extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return the distributions, by name, that pip would install beside ours with these extras.
    Raises PackageNotFoundError.
    """
    distributions: dict[str, metadata.Distribution] = {}
    waiting = [*ours(extras)]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name.lower().replace("_", "-"), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(requirement.name)
        distributions[key[0]] = distribution
        waiting += chosen(distribution.requires or [], requirement.extras)
    return distributions


def ours(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield what pyproject.toml asks for, extras that name extras of ours followed."""
    yield from map(Requirement, PROJECT["dependencies"])
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            if requirement.name == PROJECT["name"]:
                yield from ours(tuple(requirement.extras))
            else:
                yield requirement


def chosen(lines: list[str], extras: set[str]) -> Iterator[Requirement]:
    """Yield the requirements of a distribution whose markers hold here."""
    for requirement in map(Requirement, lines):
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": each}) for each in (*extras, "")
        ):
            yield requirement


def link(folder: Path, distributions: dict[str, metadata.Distribution]) -> None:
    """Fill the folder with links to all that the distributions installed at the top of
    site-packages, and our entry points.
    """
    info = folder / f"hp_tool-{hp_tool.__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {PROJECT['name']}\nVersion: {hp_tool.__version__}\n"
    )
    groups = PROJECT["entry-points"].items()
    points = (
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in each.items())
        for group, each in groups
    )
    (info / "entry_points.txt").write_text("\n".join(points))
    for distribution in distributions.values():
        for top in {
            file.parts[0]
            for file in distribution.files or ()
            if file.parts[0] not in ("..", "__pycache__")
        }:
            target = folder / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))).resolve())


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that sees this checkout, the folder's distributions and the standard library,
    and nothing else.
    """
    seen = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{folder}:{ROOT}",
        "XDG_DATA_HOME": str(folder.parent / "data"),
    }
    return subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        cwd=folder.parent,
        env=seen,
        capture_output=True,
        text=True,
        timeout=240,
    )
