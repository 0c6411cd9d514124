"""The images install the package: a wheel can be built from exactly the files that each Dockerfile
copies.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.components


def is_sent(name: str) -> bool:
    """Return True if .dockerignore lets a file of the root folder into the build context."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if fnmatch.fnmatch(name, pattern.removeprefix("!").removeprefix("**/")):
            sent = pattern.startswith("!")
    return sent


def copy_context(dockerfile: str, folder: Path) -> None:
    """Copy what the Dockerfile copies out of the build context before it installs the package."""
    text = (ROOT / dockerfile).read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            assert is_sent(source), f".dockerignore excludes {source}, which {dockerfile} copies"
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / source, folder / target)


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.gpu"])
def test_the_wheel_is_built_from_what_the_dockerfile_copies(
    dockerfile: str, tmp_path: Path
) -> None:
    if find_spec("hatchling") is None:
        skip_or_fail(
            component="HATCHLING", reason="hatchling is not installed: pip install 'hp-tool[dev]'"
        )
    context, built = tmp_path / "context", tmp_path / "built"
    context.mkdir()
    copy_context(dockerfile, context)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)]
    done = subprocess.run(command, cwd=context, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "service/guide/mkdocs.yml",
        "service/guide/service.md",
        "hp_tool/store/migrations/env.py",
    } <= names
