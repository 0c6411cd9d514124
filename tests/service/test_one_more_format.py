"""A format registered by one call is read, written, searched for and listed at every door, with no
other edit.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from hp_tool.cli.main import main
from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.setups import TrainingSetup
from hp_tool.formats.reading import Argument, Reading, Table, as_settings, key_values, sort_settings
from hp_tool.formats.registry import Format, register, unregister
from hp_tool.formats.signs import Sign, has_any_key
from hp_tool.formats.source import Source
from hp_tool.formats.writing import SHAPE_FIELDS, reject_inexpressible
from scripts.formats_table import tables
from service.app import create_app
from service.settings import Settings
from tests.service.coordinator import claim, one_run
from tests.service.test_pages import submit
from tests.trainers.test_command import run, trainer

NAME = "toytrain"
SIZES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vpp": "virtual_pipeline_parallel_size",
    "micro": "micro_batch_size",
    "zero": "zero_stage",
}
WORK = {"length": "sequence_length", "batch": "global_batch_size", "dtype": "precision"}
TABLE = Table(
    {
        f"toy.{key}": Argument(name=f"toy.{key}", arity="1", fate="read", why=why)
        for key, why in (SIZES | WORK).items()
    }
)
TABLE["toy.model"] = Argument(name="toy.model", arity="1", fate="read", why="model")
TABLE["toy.seed"] = Argument(name="toy.seed", arity="1", fate="ignored", why="costs nothing")
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 4096, "global_batch_size": 64},
}
FIXED = QUERY | {
    "parallel": {
        "tensor_parallel_size": 4,
        "micro_batch_size": 2,
        "recompute": "none",
        "zero_stage": 1,
    }
}


def content(setup: TrainingSetup) -> dict[str, Any]:
    expressed = SHAPE_FIELDS | {
        *SIZES.values(),
        *WORK.values(),
        "sequence_parallel",
    }
    reject_inexpressible(setup, tool="Toytrain 1", expressed=expressed, runs="megatron-core")
    toy: dict[str, Any] = {"model": setup.model.name}
    toy |= {key: getattr(setup.parallel, field) for key, field in SIZES.items()}
    return {"toy": toy | {key: getattr(setup.workload, field) for key, field in WORK.items()}}


def write(setup: TrainingSetup) -> str:
    return yaml.safe_dump(content(setup), sort_keys=False)


def read(source: Source, reading: Reading) -> None:
    mapping = source.keys(reading)
    sort_settings(
        as_settings(mapping, lines=source.text), table=TABLE, reading=reading, spare=source.ignore
    )
    toy = mapping["toy"]
    reading.query = {
        "kind": "training",
        "model": toy["model"],
        "training": {field: toy[key] for key, field in WORK.items()},
        "parallel": {field: toy[key] for key, field in SIZES.items()} | {"recompute": "none"},
    }


@pytest.fixture(autouse=True)
def _toytrain() -> Iterator[None]:
    register(
        Format(
            name=NAME,
            signs=(Sign(place="keys", rank=1, matches=has_any_key("toy")),),
            read=read,
            write=write,
            options=lambda setup: key_values(content(setup)),
            notes=lambda text: ("bring your own blocks",),
            framework="megatron-core",
            axes={"context_parallel_size": 1, "recompute": "none"},
            file="toy.yaml",
            flags=lambda setup: [
                f"{name}={value}" for name, value in key_values(content(setup)).items()
            ],
            reads="its YAML file of blocks",
            writes="a YAML file of blocks",
            checked="nothing at all",
        )
    )
    yield
    unregister(NAME)


def command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: str,
    stdin: str = "",
) -> tuple[Any, ...]:
    """The exit status of `hp-tool` in this process, and what it printed on both streams."""
    monkeypatch.setattr(sys, "argv", ["hp-tool", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hp_tool(*words: str, stdin: str = "") -> tuple[Any, ...]:
        monkeypatch.setattr(sys, "argv", ["hp-tool", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    assert NAME in hp_tool("export", "--help")[1] and NAME in hp_tool("import", "--help")[1]
    (tmp_path / "query.json").write_text(json.dumps(FIXED))
    code, text, notes = hp_tool("export", str(tmp_path / "query.json"), "--format", NAME)
    assert code == 0, notes
    assert "bring your own blocks" in notes and yaml.safe_load(text)["toy"]["tp"] == 4
    file = tmp_path / "theirs.yaml"
    file.write_text(text + "  seed: 3\n")
    code, answer, _ = hp_tool("import", str(file), "--num-gpus=16", "--gpu=h100-sxm-80gb", "--json")
    imported = json.loads(answer)
    assert (
        code == 0
        and imported["format"] == NAME
        and imported["search"]["parallel"]["context_parallel_size"] == 1
    )
    assert (
        imported["estimate"]["parallel"]["tensor_parallel_size"] == 4
        and imported["ignored"][0]["flag"] == "toy.seed"
    )
    assert {each["flag"] for each in imported["changes"]} <= {
        "toy.tp",
        "toy.pp",
        "toy.vpp",
        "toy.micro",
        "toy.zero",
    }
    (tmp_path / "free.json").write_text(json.dumps(QUERY))
    code, text, notes = hp_tool("export", str(tmp_path / "free.json"), "--for", NAME)
    assert (
        code == 0
        and f"ranked for {NAME} (megatron-core)" in notes
        and "toy" in yaml.safe_load(text)
    )
    file.write_text(file.read_text() + "  colour: red\n")
    code, _, error = hp_tool("import", str(file), "--num-gpus=16", "--gpu=h100-sxm-80gb")
    assert code == 2 and "toy.colour red is not known to toytrain" in error
    code, _, error = hp_tool("import", "-", "--gpu=h100-sxm-80gb", stdin="colour: red\n")
    assert code == 2 and NAME in error  # where nothing is recognised, what is read is named


def test_the_api(store: Store) -> None:
    app = create_app(Settings(), store=store)
    shapes = app.openapi()["components"]["schemas"]
    assert all(
        NAME in shapes[name]["properties"]["format"]["description"]
        for name in ("ExportRequest", "ImportRequest")
    )
    with TestClient(app, base_url="http://127.0.0.1") as http:
        exported = http.post("/v1/exports", json={"result": FIXED, "format": NAME}).json()
        assert (
            yaml.safe_load(exported["text"])["toy"]["micro"] == 2
            and "bring your own blocks" in exported["notes"]
        )
        body = {
            "command": exported["text"],
            "num_gpus": 16,
            "overrides": {"cluster.gpu": "h100-sxm-80gb"},
        }
        imported = http.post("/v1/imports", json=body).json()
        assert imported["format"] == NAME and imported["query"]["parallel"]["micro_batch_size"] == 2
        refused = http.post("/v1/exports", json={"result": FIXED, "format": "toy"})
        assert (
            refused.status_code == 422
            and refused.json()["field"] == "format"
            and NAME in refused.json()["detail"]
        )


def test_agents(store: Store) -> None:
    pytest.importorskip("mcp")
    from service.agents.server import build
    from service.agents.tools import Tools

    (tool,) = [
        each
        for each in build(Tools(connect=None))._tool_manager.list_tools()
        if each.name == "export_config"
    ]  # type: ignore[arg-type]
    assert NAME in json.dumps(tool.parameters)


def test_the_page_of_a_search(http: TestClient, store: Store, query: dict[str, Any]) -> None:
    search = submit(http, query)
    layout = ParallelConfig(tensor_parallel_size=2)
    one_run(store, claim(store, search), Measurement(status="ok", step_s=0.4), layout)
    shown = http.get(f"/searches/{search}/export", params={"format": NAME})
    assert (
        yaml.safe_load(shown.text)["toy"]["tp"] == 2
        and shown.headers["export-note"] == "bring your own blocks"
    )


def test_a_trainers_command() -> None:
    layout = ParallelConfig(
        tensor_parallel_size=4, data_parallel_size=2, sequence_parallel=True, zero_stage=1
    )
    made = run(trainer("train.py", "{file:toytrain}", "{flags:toytrain}"), config=layout)
    assert made.command[:2] == ("train.py", "toy.yaml") and "toy.tp=4" in made.command
    assert yaml.safe_load(made.files["toy.yaml"])["toy"]["length"] == 8192


def test_the_documentation() -> None:
    listed = tables()
    assert f"| `{NAME}` | its YAML file of blocks |" in listed["read"]
    assert f"| `{NAME}` | a YAML file of blocks | nothing at all |" in listed["written"]
