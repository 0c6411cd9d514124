"""Fitted constants in the catalog's files, and their check against the rows they come from."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accuracy import fit_trainers, ledger, page
from evidence import fit as evidence_fit
from evidence import fitted_file
from evidence.fitted_file import FittedFile
from evidence.table import FOLDER
from hp_tool.catalog import documents

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog of constants with one file, `die.yaml`."""
    monkeypatch.setattr(fitted_file, "FOLDER", tmp_path)
    file = FittedFile(file="die.yaml", fields={"rate": 0.5, "link": {"s": 2e-6}, "scan": 3.0})
    file.write(command="python -m benchmarks.fit")
    return tmp_path


def test_a_file_names_its_command(folder: Path) -> None:
    text = (folder / "die.yaml").read_text(encoding="utf-8")
    assert text.startswith("# Written by python -m benchmarks.fit; do not edit by hand.\n")


def test_a_fit_removes_fields_that_no_other_fit_writes(folder: Path) -> None:
    FittedFile(file="die.yaml", fields={"rate": 0.6}, keeps=("scan",)).write()
    assert documents.read(folder / "die.yaml") == {"rate": 0.6, "scan": 3.0}


def test_a_fit_of_single_fields_keeps_the_others(folder: Path) -> None:
    FittedFile(file="die.yaml", fields={"scan": 4.0}, keeps=None).write()
    stored = documents.read(folder / "die.yaml")
    assert stored == {"rate": 0.5, "link": {"s": 2e-6}, "scan": 4.0}


@pytest.mark.parametrize(
    ("fields", "keeps", "expected"),
    [
        ({"rate": 0.5002, "link": {"s": 2e-6}}, ("scan",), []),  # equal to three digits
        ({"rate": 0.51, "link": {"s": 2e-6}}, ("scan",), ["die.yaml: rate is 0.5, fitted 0.51"]),
        ({"link": {"s": 3e-6}}, None, ["die.yaml: link.s is 2e-06, fitted 3e-06"]),
        ({"rate": 0.5, "link": {"s": 2e-6}}, (), ["die.yaml: scan is 3.0, fitted None"]),
        ({"new": "words"}, None, ["die.yaml: new is None, fitted 'words'"]),
    ],
)
def test_differences_name_the_constant_and_both_values(
    folder: Path, fields: dict[str, Any], keeps: tuple[str, ...] | None, expected: list[str]
) -> None:
    assert list(FittedFile(file="die.yaml", fields=fields, keeps=keeps).differences()) == expected


@pytest.mark.parametrize(
    ("only", "written"), [((), ["fit", "ledger", "page"]), (("pools",), ["fit"])]
)
def test_a_whole_fit_records_the_ledger_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, only: tuple[str, ...], written: list[str]
) -> None:
    """Constants come first, because the ledger's figures are predicted by them."""
    steps: list[str] = []
    monkeypatch.setattr(evidence_fit, "fit", lambda chosen, folder: steps.append("fit"))
    monkeypatch.setattr(ledger, "compute", lambda folder: {})
    monkeypatch.setattr(ledger, "record", lambda now, reason: steps.append("ledger"))
    monkeypatch.setattr(page, "main", lambda: steps.append("page"))
    named = [word for name in only for word in ("--only", name)]
    monkeypatch.setattr(sys, "argv", ["evidence.fit", "--kernels", str(tmp_path), *named])
    evidence_fit.main()
    assert steps == written


def check(data: Path, *names: str) -> dict[str, str]:
    """Run `evidence.fit --check` on a folder; return what it printed of each fit."""
    only = [word for name in names for word in ("--only", name)]
    command = [sys.executable, "-m", "evidence.fit", "--check", "--data", str(data), *only]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    printed = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == any(text != "reproduced" for text in printed.values()), done.stderr
    return printed


OWN_OF_TRAINERS = {
    "time_log_sd",
    "expert_time_log_sd",
    "pair_log_sd",
    "expert_pair_log_sd",
    "memory_log_sd",
    "fragmentation_fraction",
    "untimed_expert_log_sd",
    "fitted_on",
}
"""Fields that a trainer's own rows give."""


@pytest.mark.parametrize("name", fit_trainers.OPTIMIZERS)
def test_a_trainer_has_the_constants_of_the_fsdp_profile_it_inherits(name: str) -> None:
    """A refit of torch-fsdp alone leaves the trainers' profiles stale."""
    derived = dataclasses.asdict(fit_trainers.inherited_constants(name))
    fields = {key: value for key, value in derived.items() if key not in OWN_OF_TRAINERS}
    file = FittedFile(file=f"frameworks/{name}/default.yaml", fields=fields, keeps=None)
    assert list(file.differences()) == []


@pytest.mark.components
def test_a_changed_row_changes_the_constants_of_its_own_fit(tmp_path: Path) -> None:
    """InternEvo's steps take twice as long: its profile changes, that of pools does not."""
    data = tmp_path / "data"
    shutil.copytree(FOLDER, data)
    (table,) = data.glob("training/*internevo*.csv")
    assert check(data, "internevo", "pools") == {"internevo": "reproduced", "pools": "reproduced"}

    with table.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        if row["step_s"]:
            row["step_s"] = str(2.0 * float(row["step_s"]))
            speed = "tokens_per_second_per_gpu"
            row[speed] = str(float(row[speed]) / 2.0)
    with table.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = check(data, "internevo", "pools")
    assert found["pools"] == "reproduced"
    assert "frameworks/internevo/default.yaml: elementwise_traffic_factor is" in found["internevo"]
