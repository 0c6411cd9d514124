"""What the repository's host, package indexes, registries and libraries of papers read: workflows,
lock files, images, metadata and the citation, by their published schemas and linters.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hp_tool
from tests.conftest import skip_or_fail
from tests.packaging import lean

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
CHECK, PUBLISH = WORKFLOWS / "check.yml", WORKFLOWS / "publish.yml"
CITATION, COMPOSE = ROOT / "CITATION.cff", ROOT / "docker-compose.yml"
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
SERVER = ROOT / "server.json"


def tool(module: str, distribution: str) -> None:
    """Skip the test, or fail it in CI, unless a development tool is installed."""
    if find_spec(module) is None:
        skip_or_fail(
            component="SCHEMAS",
            reason=f"{distribution} is not installed: pip install 'hp-tool[dev]'",
        )


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        (CHECK, "github-workflows"),
        (PUBLISH, "github-workflows"),
        (CITATION, "citation-file-format"),
        (COMPOSE, "compose-spec"),
    ],
)
def test_a_file_is_what_its_reader_expects(file: Path, schema: str, tmp_path: Path) -> None:
    tool("check_jsonschema", "check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*command, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / file.name
    broken.write_text(
        re.sub(r"^(jobs|authors|services):", "other:", file.read_text(), flags=re.MULTILINE)
    )
    assert subprocess.run([*command, broken], capture_output=True).returncode != 0


def test_the_workflow_runs_what_is_here() -> None:
    jobs = yaml.safe_load(CHECK.read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in lines and os.access(ROOT / ".ci/run", os.X_OK)
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["installations"]["strategy"]["matrix"]["python"] == declared
    (loop,) = (re.findall(r"for extra in (.+); do", line) for line in lines if "for extra" in line)
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {*loop[0].split()} == {*optional} - {"light", "dev"}


@pytest.mark.parametrize("workflow", [CHECK, PUBLISH])
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_only_a_person_publishes() -> None:
    publish = yaml.safe_load(PUBLISH.read_text())
    assert list(publish[True]) == ["workflow_dispatch"]  # YAML reads the key `on` as true
    writers = {
        name
        for name, job in publish["jobs"].items()
        if "write" in {*job.get("permissions", {}).values()}
    }
    assert writers == {"index", "images", "site"}
    assert {publish["jobs"][name]["environment"] for name in writers} == {"release"}
    assert "write" not in CHECK.read_text()


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_locks_have_hashes_and_name_no_index(lock: Path) -> None:
    text = lock.read_text()
    blocks = re.split(r"\n(?=[a-z0-9])", "\n".join(text.splitlines()[2:]))
    assert blocks
    for block in blocks:
        assert re.match(r"[\w.-]+(\[[\w,]+\])?==[\w.+]+( ; [^\\]+)? \\\n +--hash=sha256:", block), (
            block
        )
    assert not re.search(r"://|--(extra-)?index-url|--find-links|\+cpu", text)


def test_locks_satisfy_the_bounds() -> None:
    """A bound that changes needs `make locks`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"api": ["postgresql", "mcp"], "worker": ["postgresql", "profiler", "search"]}
    for name, chosen in (extras | {"ci": ["profiler", "dev"], "site": ["docs", "mcp"]}).items():
        text = (ROOT / f"requirements/{name}.txt").read_text()
        pinned = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==([\w.+]+)", text, re.MULTILINE))
        for requirement in lean.ours(tuple(chosen)):
            version = pinned[requirement.name.lower().replace("_", "-")]
            assert requirement.specifier.contains(version), (name, requirement, version)
    for requirement in map(Requirement, project["dependencies"]):
        assert any(each.operator in ("<", "==") for each in requirement.specifier), requirement


@pytest.mark.parametrize(
    "name",
    [*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]],
)
def test_dependencies_have_upper_bounds(name: str) -> None:
    for requirement in lean.ours((name,)):
        assert any(each.operator in ("<", "==") for each in requirement.specifier), requirement


@pytest.mark.components
@pytest.mark.parametrize("dockerfile", ["Dockerfile", "Dockerfile.gpu"])
def test_dockerfiles_pass_hadolint(dockerfile: str, tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        skip_or_fail(
            component="SCHEMAS", reason="hadolint is not installed: pip install 'hp-tool[dev]'"
        )
    done = subprocess.run([program, ROOT / dockerfile], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / dockerfile
    broken.write_text("FROM python:latest\nRUN cd /tmp\n")
    assert subprocess.run([program, broken], capture_output=True).returncode == 1


def test_images_are_pinned() -> None:
    """Each base image has an exact tag, with a patch release or a month, or a digest."""
    places = "\n".join(
        (ROOT / name).read_text()
        for name in ("Dockerfile", "Dockerfile.gpu", "docker-compose.yml", CHECK)
    )
    images = re.findall(r"(?:ARG BASE=|image: |container: )(\S+)", places)
    assert len(images) == 4
    for image in images:
        assert re.search(r":\d+\.\d+(\.\d+)?[\w.-]*$|@sha256:[0-9a-f]{64}$", image), image


@pytest.mark.components
def test_the_registry_of_agents_tools_accepts_the_server(tmp_path: Path) -> None:
    tool("skillsaw", "skillsaw")
    place = tmp_path / SERVER.name
    command = [sys.executable, "-m", "skillsaw", "lint", str(tmp_path)]
    place.write_text(SERVER.read_text())
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    place.write_text(SERVER.read_text().replace("registryType", "registry"))
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_every_file_names_this_version() -> None:
    command = [sys.executable, ROOT / "scripts/release_check.py"]
    done = subprocess.run([*command, f"v{hp_tool.__version__}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    other = subprocess.run([*command, "v9.9.9"], capture_output=True, text=True)
    assert other.returncode == 1 and "v9.9.9" not in done.stdout and "tag: 9.9.9" in other.stderr


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
