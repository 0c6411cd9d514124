"""Other editions of hp-tool beside this one: an older one from the repository's history, and a
newer one whose queries know a field more. Each is a folder, and its processes import from there.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from hp_tool.store import schema
from tests.service.processes import free_port, wait_for

ROOT = Path(__file__).parents[2]
PARTS = ("hp_tool", "service", "migrations")
OLDER = schema.LAST_PREVIEW
NOVELTY = "novelty"
"""The field of `search` that only the newer edition knows."""
SETTINGS = (
    'class SearchSettings(Strict):\n    """tune only: the budget of real runs, and where '
    'they run."""\n'
)
TRAINER = """
import json, pathlib, sys, time
micro_batch, zero_stage, pause_s, go = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4])
time.sleep(pause_s)
while not go.exists():
    time.sleep(0.05)
day = float(pathlib.Path(sys.argv[5]).read_text())
for step in range(1, 6):
    print(json.dumps({"step": step, "step_s": micro_batch + zero_stage / 10 + day}), flush=True)
"""  # noqa: E501
"""A training whose step time names its configuration and its day, so that a result that stands at
another one is seen.
"""


def quick_trainer(catalog: Path, *, go: Path, pause_s: float = 0.1) -> None:
    """Register the trainer `quick`, whose runs wait for the file `go`."""
    (catalog / "trainers").mkdir(parents=True, exist_ok=True)
    script, day = catalog / "train.py", catalog / "day"
    script.write_text(TRAINER)
    day.write_text("0")
    command = [
        sys.executable,
        str(script),
        "{micro_batch_size}",
        "{zero_stage}",
        str(pause_s),
        str(go),
        str(day),
    ]
    trainer = {"command": command, "reader": "json", "launch": "command"}
    (catalog / "trainers" / "quick.yaml").write_text(yaml.safe_dump(trainer))


def expected_step_s(parallel: Any, *, day: int = 0) -> float:
    """The step time that the quick trainer prints for a configuration while the file `day` of the
    catalogue names this one.
    """
    return float(parallel.micro_batch_size + parallel.zero_stage / 10 + day)


@dataclass(frozen=True)
class Edition:
    """An installation of hp-tool in a folder."""

    folder: Path

    @contextmanager
    def process(
        self, *arguments: str, database_url: str, home: Path
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A running `hp-tool` of this edition and its log; told to end with SIGTERM."""
        log_path = home / f"{self.folder.name}-{arguments[0]}-{free_port()}.log"
        with log_path.open("wb") as log:
            running = subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(database_url, home),
                stderr=log,
                stdout=log,
            )
            try:
                yield running, log_path
            finally:
                if running.poll() is None:
                    running.send_signal(signal.SIGTERM)
                    running.wait(timeout=60)

    @contextmanager
    def api(self, *, database_url: str, home: Path) -> Iterator[str]:
        """A ready API; its URL."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        with self.process("serve", "--port", str(port), database_url=database_url, home=home) as (
            serving,
            log,
        ):
            wait_for(lambda: serving.poll() is not None or _ready(url))
            assert serving.poll() is None, log.read_text()
            yield url

    def run(
        self, *arguments: str, database_url: str, home: Path
    ) -> subprocess.CompletedProcess[str]:
        """A finished `hp-tool` of this edition."""
        environment = self.environment(database_url, home)
        command = self.command(*arguments)
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    @staticmethod
    def command(*arguments: str) -> list[str]:
        """argv; `-c` looks in the working folder first, and so imports this edition."""
        return [sys.executable, "-c", "from hp_tool.cli.main import main; main()", *arguments]

    @staticmethod
    def environment(database_url: str, home: Path) -> dict[str, str]:
        folders = {"HP_RUNS_DIR": str(home / "runs"), "HP_CATALOG_DIR": str(home / "catalog")}
        not_inherited = ("HP_API_KEY", "PYTHONPATH", "PYTHONSAFEPATH")
        inherited = {name: value for name, value in os.environ.items() if name not in not_inherited}
        return {**inherited, **folders, "HP_DATABASE_URL": database_url}


THIS = Edition(ROOT)


def newer(folder: Path) -> Edition:
    """This edition with one more field in `search`."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part, folder / part
        )  # with what is compiled: its processes would do it again
    path = folder / "hp_tool" / "domain" / "query.py"
    text = path.read_text()
    assert SETTINGS in text
    path.write_text(
        text.replace(SETTINGS, f'{SETTINGS}\n    {NOVELTY}: int = 0\n    """What is new."""\n')
    )
    return Edition(folder)


def older(folder: Path, *, commit: str = OLDER) -> Edition:
    """The edition of a commit of this repository; skips where its history is not here."""
    if (reason := extract(folder, commit=commit)) is not None:
        pytest.skip(reason)
    return Edition(folder)


def extract(folder: Path, *, commit: str = OLDER) -> str | None:
    """Lay the files of a commit into a folder; None, or why they cannot be had."""
    try:
        archive = subprocess.run(
            ["git", "archive", commit, *PARTS, "tests"], cwd=ROOT, capture_output=True, check=False
        )
    except FileNotFoundError:
        return "git is not installed"
    if archive.returncode != 0:
        return f"no history with {commit[:8]} here: {archive.stderr.decode().strip()}"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return None


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
