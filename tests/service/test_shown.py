"""A field of a query says where it is declared how people see it; everything that shows fields
follows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fields_table import PAGE, with_tables

ROOT = Path(__file__).parents[2]
KNOB = '''
    toy_knob: Annotated[int, Interval(ge=1, le=9), Shown("Toy knob", "Toys", unset="one")] = 1
    """How much toy there is."""
'''
ASKED = """
import json, os
from fastapi.testclient import TestClient
from hp_tool import estimate
from hp_tool.cli.main import build
from hp_tool.store import open_store
from scripts.fields_table import tables
from service.app import create_app
from service.settings import Settings
from typer.testing import CliRunner

app = create_app(Settings(), store=open_store(f"sqlite:///{os.getcwd()}/toy.sqlite3"))
with TestClient(app, base_url="http://127.0.0.1:8000") as http:
    query = {"kind": "training", "model": "gpt3-13b", "cluster": {"gpu": "h100", "num_gpus": 8},
             "training": {"sequence_length": 2048, "global_batch_size": 64, "toy_knob": 12}}
    print(json.dumps({
        "explorer": http.get("/explorer?model=gpt3-13b&cluster.num_gpus=8&training.global_batch_size=64").text,
        "openapi": http.get("/openapi.json").json()["components"]["schemas"],
        "refused": http.post("/v1/estimates", json=query).json()["detail"],
        "help": CliRunner().invoke(build("fields"), ["fields", "toy knob"]).output,
        "table": tables(),
        "client": estimate(query | {"training": query["training"] | {"toy_knob": 2},
                                    "parallel": {"tensor_parallel_size": 8}}).query["training"]["toy_knob"],
    }))
"""  # noqa: E501


def test_the_tables_of_the_page_are_those_of_the_fields() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python scripts/fields_table.py"


@pytest.mark.components
def test_a_new_knob_is_one_field(tmp_path: Path) -> None:
    """In a copy of the code with one field more, which nothing else names."""
    for name in ("hp_tool", "service", "scripts", "migrations", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    declared = tmp_path / "hp_tool/domain/workload.py"
    head, mark, rest = declared.read_text(encoding="utf-8").partition("    sequence_length: ")
    declared.write_text(head.rstrip() + "\n" + KNOB + mark + rest, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", ASKED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    seen = json.loads(run.stdout.decode().splitlines()[-1])
    assert 'name="training.toy_knob"' in seen["explorer"]
    assert "Toy knob" in seen["explorer"] and 'max="9"' in seen["explorer"]
    (described,) = (
        each["properties"]["toy_knob"]
        for each in seen["openapi"].values()
        if "toy_knob" in each.get("properties", ())
    )
    assert described["title"] == "Toy knob" and described["description"] == "How much toy there is."
    assert "from 1 to 9, got 12" in seen["refused"]
    assert "training.toy_knob" in seen["help"] and "a whole number from 1 to 9" in seen["help"]
    assert (
        "| `training.toy_knob` | Toy knob | a whole number from 1 to 9 | one | How much toy there "
        "is. |" in seen["table"]
    )
    assert seen["client"] == 2
