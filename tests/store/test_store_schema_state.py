"""Whether a database could know something, told without loading SQLAlchemy or making anything."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from hp_tool.store import CALIBRATIONS, may_hold_calibrations, open_store, tables

ROOT = Path(__file__).parents[2]
RECOMMEND = """
import sys
from typer.testing import CliRunner
from hp_tool.cli.main import build
done = CliRunner().invoke(build(), ["recommend", "--model", "gpt-22b", "--gpu", "a100-sxm-80gb", "--num-gpus", "8",
    "--sequence-length", "2048", "--global-batch-size", "8"])
print(done.exit_code, "sqlalchemy" in sys.modules)
"""  # noqa: E501


def test_the_table_is_the_stores() -> None:
    assert tables.calibrations.name == CALIBRATIONS


def test_only_a_file_with_a_calibration_may_hold_one(tmp_path: Path) -> None:
    path = tmp_path / "with space.sqlite3"
    url = f"sqlite:///{path}"
    assert not may_hold_calibrations(url) and not path.exists()
    sqlite3.connect(path).close()
    assert not may_hold_calibrations(url)
    store = open_store(url)
    assert not may_hold_calibrations(url)
    store.save_calibration(cluster_key="c", framework="f", payload={"a": 1}, num_measurements=1)
    assert may_hold_calibrations(url)
    store.close()
    assert may_hold_calibrations(url)
    path.write_bytes(b"no database at all" * 100)
    assert may_hold_calibrations(url)  # opening it will say what is wrong


@pytest.mark.parametrize(
    "url", ["postgresql://user@host/database", "sqlite:///:memory:", "sqlite://", "nonsense"]
)
def test_what_is_no_file_is_left_to_who_opens_it(url: str) -> None:
    assert may_hold_calibrations(url)


def test_a_prediction_without_calibrations_loads_no_sqlalchemy(tmp_path: Path) -> None:
    environment = {**os.environ, "HP_DATABASE_URL": f"sqlite:///{tmp_path / 'hp.sqlite3'}"}
    command = [sys.executable, "-c", RECOMMEND]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert done.stdout.split() == ["0", "False"]
    assert not list(tmp_path.iterdir())
