"""The wheel that tests of packaging install."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the unpacked source distribution."""
    if find_spec("hatchling") is None:
        skip_or_fail(
            component="HATCHLING", reason="hatchling is not installed: pip install 'hp-tool[dev]'"
        )
    folder = tmp_path_factory.mktemp("packages")

    def build(kind: str, source: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    build("sdist", ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    build("wheel", source)
    (built,) = folder.glob("*.whl")
    return built
