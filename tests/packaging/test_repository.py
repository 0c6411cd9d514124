"""What the repository's host and libraries of papers read: the workflow and the citation, by their
published schemas.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import hp_tool
from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/check.yml"
CITATION = ROOT / "CITATION.cff"


@pytest.mark.parametrize(
    ("file", "schema"), [(WORKFLOW, "github-workflows"), (CITATION, "citation-file-format")]
)
def test_a_file_is_what_its_reader_expects(file: Path, schema: str, tmp_path: Path) -> None:
    if find_spec("check_jsonschema") is None:
        skip_or_fail(
            component="SCHEMAS",
            reason="check-jsonschema is not installed: pip install 'hp-tool[dev]'",
        )
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / file.name
    broken.write_text(re.sub(r"^(jobs|authors):", "other:", file.read_text(), flags=re.MULTILINE))
    assert subprocess.run([*command, broken], capture_output=True).returncode != 0


def test_the_workflow_runs_what_is_here() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in lines and os.access(ROOT / ".ci/run", os.X_OK)
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["pythons"]["strategy"]["matrix"]["python"] == declared


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load(CITATION.read_text())["version"] == hp_tool.__version__


@pytest.mark.parametrize(
    ("subject", "named"),
    [
        ("cost: charge NVL72 rails per tray", None),
        ("docs/cost-model: state the ring's latency", None),
        ("Merge branch 'pins'", None),
        ("Charge NVL72 rails per tray", "area: verb object"),
        ("cost: Charge NVL72 rails per tray", "area: verb object"),
        ("cost: charge NVL72 rails per tray.", "area: verb object"),
        ("cost: " + "x" * 67, "73 characters"),
    ],
)
def test_a_commit_s_subject_has_an_area_and_a_verb(
    subject: str, named: str | None, tmp_path: Path
) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nWhy.\n")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "commit_subject.py", message],
        capture_output=True,
        text=True,
    )
    assert done.returncode == (named is not None)
    assert named is None or named in done.stderr
