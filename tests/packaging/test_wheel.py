"""What is shipped is whole: a wheel made from the source distribution runs from an unrelated
folder, with nothing of the checkout in reach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hp_tool

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.components

SMOKE = """
import io, json, sys, traceback
from contextlib import redirect_stdout
import hp_tool, service
from hp_tool.cli.main import build, main
import typer

def run(*arguments):
    sys.argv, printed = ["hp-tool", *arguments], io.StringIO()
    try:
        with redirect_stdout(printed):
            main()
    except SystemExit as ended:
        return ended.code, printed.getvalue()

def leaves(node, *path):
    if not hasattr(node, "commands"):
        yield path
    for name, child in getattr(node, "commands", {}).items():
        yield from leaves(child, *path, name)

commands = list(leaves(typer.main.get_command(build())))
found = {"homes": [hp_tool.__file__, service.__file__], "commands": [" ".join(path) for path in commands], "runs": {}}
for path in commands:
    found["runs"][" ".join((*path, "--help"))] = run(*path, "--help")[0]
flags = ["--model=gpt-22b", "--gpu=a100-sxm-80gb", "--num-gpus=8", "--sequence-length=2048", "--global-batch-size=16"]
layout = ["--set=parallel={tensor_parallel_size: 8, recompute: selective}"]
code, answer = run("recommend", *flags, "--json", "--plot=plot.html")
found["runs"]["recommend"] = code
open("answer.json", "w").write(answer)
open("query.yaml", "w").write(json.dumps(json.loads(answer)["query"]))
for arguments in (
    ["estimate", *flags, *layout], ["batch", "query.yaml", "--output=answers.jsonl", "--task=recommend", "--jobs=2"],
    ["models"], ["models", "gpt-22b", "--json"], ["gpus"], ["clusters"], ["db", "upgrade"], ["db", "current", "--json"],
    ["db", "backup", "backup.sqlite3"], ["db", "copy", "sqlite:///backup.sqlite3", "sqlite:///copy.sqlite3"],
    ["export", "answer.json", "--format=megatron-lm"],
):
    found["runs"][" ".join(arguments)] = run(*arguments)[0]
from starlette.testclient import TestClient
from service.app import create_app
from service.settings import from_environment
with TestClient(create_app(from_environment(host=None, port=None, database_url=None)), base_url="http://127.0.0.1") as http:
    found["pages"] = {path: http.get(path).status_code for path in ("/", "/healthz", "/v1/gpus", "/openapi.json")}
print(json.dumps(found))
"""  # noqa: E501
"""Runs every command's help, what needs no cluster for real, and the service's pages."""


def test_the_wheel_has_code_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "hp_tool",
        "service",
    }
    shipped = [*(ROOT / "hp_tool").rglob("*"), *(ROOT / "service").rglob("*")]
    wanted = {
        str(path.relative_to(ROOT))
        for path in shipped
        if path.is_file() and "__pycache__" not in path.parts
    }
    migrations = {
        f"hp_tool/store/migrations/versions/{path.name}"
        for path in (ROOT / "migrations/versions").glob("*.py")
    }
    assert wanted | migrations | {"hp_tool/store/migrations/env.py"} <= names


@pytest.mark.long
def test_every_command_of_the_installed_wheel_starts(wheel: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "installed", tmp_path / "elsewhere"
    folder.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(home),
        str(wheel),
    ]
    subprocess.run(install, check=True, timeout=120, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HP_")}
    environment |= {"PYTHONPATH": str(home), "XDG_DATA_HOME": str(folder / "data")}
    done = subprocess.run(
        [sys.executable, "-c", SMOKE],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert all(Path(path).is_relative_to(home) for path in found["homes"])
    assert {"estimate", "recommend", "tune", "batch", "serve", "worker", "db upgrade"} <= set(
        found["commands"]
    )
    assert {command: code for command, code in found["runs"].items() if code != 0} == {}, (
        done.stderr
    )
    assert set(found["pages"].values()) == {200}
    assert json.loads((folder / "answers.jsonl").read_text())["status"] == "ok"
    assert (home / "bin" / "hp-tool").exists()


def test_the_version_is_the_packages(wheel: Path) -> None:
    assert wheel.name == f"hp_tool-{hp_tool.__version__}-py3-none-any.whl"
