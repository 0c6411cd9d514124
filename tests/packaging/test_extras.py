"""What an installation answers without extras, what each extra adds alone, and how a door names the
one that it lacks.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import typer

from hp_tool.cli.main import build
from hp_tool.extras import EXTRAS, Extra
from tests.packaging import lean

pytestmark = pytest.mark.components

WEB = {"fastapi", "starlette", "uvicorn"}
CALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from hp_tool.cli.main import main
{first}
ended = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, out, err = ["hp-tool", *arguments], io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as stop:
        ended.append([stop.code, out.getvalue(), err.getvalue()])
print(json.dumps([ended, sorted({{name.partition(".")[0] for name in sys.modules}})]))
"""
"""Runs commands one after the other in one process; `first` goes before them."""

CASE = (
    "--model=gpt-22b",
    "--gpu=a100-sxm-80gb",
    "--num-gpus=8",
    "--sequence-length=2048",
    "--global-batch-size=16",
)
LAYOUT = "--set=parallel={tensor_parallel_size: 8, recompute: selective}"
SERVING = (
    *("--model=llama-3.1-8b", "--gpu=h100-sxm-80gb", "--num-gpus=1", "--set=kind=inference"),
    *("--set=inference={input_length: 2000, output_length: 500}",),
)
SCRIPT = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 48 --hidden-size 6144 --num-attention-heads 64 --bf16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 16 --vocab-size 51200 \\
  --tensor-model-parallel-size 8 --use-flash-attn --recompute-activations --use-distributed-optimizer --sequence-parallel
"""  # noqa: E501
TRACE = [
    {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#1",
        "ts": 0,
        "dur": 1000,
        "pid": 1,
        "tid": 1,
    },
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 10, "dur": 500, "pid": 1, "tid": 1},
    {
        "ph": "X",
        "cat": "kernel",
        "name": "sm90_xmma_gemm_bf16bf16",
        "ts": 100,
        "dur": 700,
        "pid": 0,
        "tid": 7,
    },
]
SEARCH = "00000000-0000-0000-0000-000000000000"

ANSWERED = {
    "estimate": ["estimate", *CASE, LAYOUT],
    "recommend": ["recommend", *CASE, "--json"],
    "serving": ["recommend", *SERVING, "--top=3"],
    "size": ["size", "--gpu=h100-sxm-80gb", "--num-gpus=64", "--days=30"],
    "export": ["export", str(lean.ROOT / "examples/gpt3-175b.yaml"), "--format=megatron-lm"],
    "export, TOML": ["export", "queries.yaml", "--for=torchtitan"],
    "batch": ["batch", "queries.yaml", "--output=answers.jsonl"],
    "models": ["models", "gpt-22b", "--json"],
    "gpus": ["gpus"],
    "clusters": ["clusters"],
    "recipes": ["recipes"],
    "trainers": ["trainers"],
    "doctor": ["doctor"],
    "watch": ["watch", "steps.jsonl", "--query=queries.yaml", "--json"],
    "explain": ["explain", "trace.json", "--json"],
    "fields": ["fields"],
}
"""Commands that need no extra."""
REFUSED: dict[str, tuple[Extra, list[str]]] = {
    "tune": ("search", ["tune", str(lean.ROOT / "examples/quickstart.yaml")]),
    "calibrate": ("search", ["calibrate"]),
    "measurements": ("search", ["measurements"]),
    "worker": ("search", ["worker"]),
    "db upgrade": ("search", ["db", "upgrade"]),
    "db current": ("search", ["db", "current"]),
    "db backup": ("search", ["db", "backup", "there"]),
    "db copy": ("search", ["db", "copy", "sqlite:///a", "sqlite:///b"]),
    "db prune": ("search", ["db", "prune"]),
    "budget": ("search", ["budget", SEARCH, "--runs=3"]),
    "label": ("search", ["label", SEARCH]),
    "cancel": ("search", ["cancel", SEARCH]),
    "cancel --server": ("client", ["cancel", SEARCH, "--server=http://127.0.0.1:9"]),
    "batch --server": ("client", ["batch", "queries.yaml", "--server=http://127.0.0.1:9"]),
    "report": ("service", ["report", SEARCH]),
    "serve": ("service", ["serve"]),
    "keys create": ("service", ["keys", "create", "--owner=me", "--scope=read"]),
    "keys list": ("service", ["keys", "list"]),
    "keys revoke": ("service", ["keys", "revoke", "one"]),
    "mcp": ("mcp", ["mcp"]),
    "import": ("import", ["import", "train.sh", "--gpu=a100-sxm-80gb"]),
    "recommend --plot": ("plot", ["recommend", *CASE, "--plot=answer.html"]),
}
"""Commands and options that need one, and which."""


def installation(folder: Path, *extras: Extra) -> Path:
    """Return a folder with what pip would install with these extras, beside files that commands
    name.
    """
    try:
        distributions = lean.closure(extras)
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed here")
    lean.link(folder / "installed", distributions)
    query = {
        "model": "llama-3-8b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 8},
        "parallel": {"tensor_parallel_size": 8},
    }
    query |= {"kind": "training", "training": {"sequence_length": 2048, "global_batch_size": 16}}
    (folder / "queries.yaml").write_text(json.dumps(query))
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "trace.json").write_text(json.dumps({"traceEvents": TRACE}))
    (folder / "steps.jsonl").write_text('{"step_s": 0.5}\n' * 50)
    return folder / "installed"


def called(
    installed: Path, commands: list[list[str]], *, first: str = ""
) -> tuple[list[list[Any]], set[str]]:
    """Return (code, standard output, standard error) of each command, and the packages that all of
    them loaded.
    """
    done = lean.run(installed, CALL.format(first=first), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    ended, loaded = json.loads(done.stdout.splitlines()[-1])
    return ended, set(loaded)


def test_an_installation_without_extras_answers(tmp_path: Path) -> None:
    ended, _ = called(installation(tmp_path), [*ANSWERED.values()])
    for name, (code, out, err) in zip(ANSWERED, ended, strict=True):
        assert code == 0, (name, err)
        assert name == "batch" or out, name
    assert json.loads((tmp_path / "answers.jsonl").read_text())["status"] == "ok"


def test_doctor_names_everything_that_is_missing(tmp_path: Path) -> None:
    ((code, out, _),), _ = called(installation(tmp_path), [["doctor"]])
    assert code == 0
    for extra in EXTRAS:
        assert f"pip install -e '{lean.ROOT}[{extra}]'" in out, extra
    assert "Slurm" in out or "slurm" in out


def test_windows_lacks_fcntl_and_gets_answers(tmp_path: Path) -> None:
    installed = installation(tmp_path, "search")
    commands = [
        ANSWERED["recommend"],
        ANSWERED["serving"],
        ANSWERED["export"],
        ANSWERED["doctor"],
        REFUSED["tune"][1],
    ]
    ended, loaded = called(installed, commands, first="sys.modules['fcntl'] = None")
    assert [code for code, *_ in ended] == [0, 0, 0, 0, 2]
    assert "WSL" in ended[3][1]
    assert "`hp-tool tune` needs Linux, macOS or WSL" in ended[4][2]
    code = (
        "import sys; sys.modules['fcntl'] = None; from hp_tool.cluster import launchers; "
        "launchers.create(sys.argv[1])"
    )
    for name in ("local", "slurm", "ray", "kubernetes", "endpoint"):
        assert (
            f"launcher {name} needs Linux, macOS or WSL" in lean.run(installed, code, name).stderr
        )
    assert "sqlalchemy" not in loaded


def test_a_missing_extra_is_named_with_its_command(tmp_path: Path) -> None:
    ended, _ = called(installation(tmp_path), [command for _, command in REFUSED.values()])
    for (name, (extra, _)), (code, out, err) in zip(REFUSED.items(), ended, strict=True):
        assert code == 2, (name, out, err)
        (line,) = err.splitlines()
        assert line.startswith("hp-tool: "), line
        assert line.endswith(f": pip install -e '{lean.ROOT}[{extra}]'"), (name, line)


def test_every_command_is_tried_without_extras() -> None:
    def leaves(node: Any, *path: str) -> list[str]:
        below = getattr(node, "commands", None)
        return (
            [" ".join(path)]
            if below is None
            else [leaf for name in below for leaf in leaves(below[name], *path, name)]
        )

    assert {*leaves(typer.main.get_command(build()))} <= {*ANSWERED, *REFUSED}


def test_a_client_without_its_extra_is_named(tmp_path: Path) -> None:
    installed = installation(tmp_path)
    for module in ("service.client", "service.async_client"):
        error = lean.run(installed, f"import {module}").stderr.splitlines()[-1]
        assert error.endswith(
            f"a client of the service needs httpcore, httpx: pip install -e '{lean.ROOT}[client]'"
        ), error


def test_a_stored_calibration_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    import sqlite3

    installed = installation(tmp_path)
    (tmp_path / "data/hp-tool").mkdir(parents=True)
    with sqlite3.connect(tmp_path / "data/hp-tool/hp_tool.sqlite3") as connection:
        connection.execute("CREATE TABLE hp_calibrations (id)")
        connection.execute("INSERT INTO hp_calibrations VALUES (1)")
    connection.close()
    ((code, out, err),), _ = called(installed, [ANSWERED["estimate"]])
    assert code == 0 and "per step" in out
    assert err.startswith("not calibrated: a stored calibration needs ") and err.endswith(
        f"pip install -e '{lean.ROOT}[search]'\n"
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_table_of_extras_is_the_package_s(extra: Extra) -> None:
    try:
        installed = lean.closure((extra,))
    except PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed here")
    core = {requirement.name.lower() for requirement in lean.ours(())}
    asked = {requirement.name.lower() for requirement in lean.ours((extra,))} - core
    modules = {
        name: {file.parts[0].partition(".")[0] for file in installed[name].files or ()}
        for name in asked
    }
    assert all(len(modules[name] & {*EXTRAS[extra]}) == 1 for name in asked), modules
    assert len(EXTRAS[extra]) == len(asked)


@pytest.mark.parametrize(
    ("extra", "commands"),
    [
        ("import", [REFUSED["import"][1]]),
        ("plot", [REFUSED["recommend --plot"][1]]),
        ("search", [["db", "upgrade"], ["measurements"], ["calibrate"], ["doctor"]]),
        (
            "service",
            [["db", "upgrade"], ["keys", "create", "--owner=me", "--scope=read"], ["keys", "list"]],
        ),
    ],
)
def test_each_extra_works_alone(extra: Extra, commands: list[list[str]], tmp_path: Path) -> None:
    ended, loaded = called(installation(tmp_path, extra), commands)
    assert [code for code, *_ in ended] == [0] * len(commands), ended
    assert extra == "service" or not loaded & WEB


def test_a_client_alone_asks(tmp_path: Path) -> None:
    installed = installation(tmp_path, "client")
    code = (
        "import sys; from service.client import Client\nwith Client(server=sys.argv[1]) as "
        "client: client.search(search_id='x')"
    )
    error = lean.run(installed, code, "http://127.0.0.1:9").stderr
    assert "StoreError" in error and "http://127.0.0.1:9" in error


PAGES = """
from starlette.testclient import TestClient
from service.app import create_app
from service.settings import from_environment
with TestClient(create_app(from_environment(host=None, port=None, database_url=None)), base_url="http://127.0.0.1") as http:
    print(*(http.get(path).status_code for path in ("/", "/healthz", "/v1/gpus", "/openapi.json")))
    print(http.post("/mcp").status_code)
"""  # noqa: E501


def test_the_service_alone_serves_and_names_what_its_tools_need(tmp_path: Path) -> None:
    done = lean.run(installation(tmp_path, "service"), PAGES)
    assert done.stdout.split() == ["200", "200", "200", "200", "501"], done.stderr


def test_tools_for_agents_alone_start(tmp_path: Path) -> None:
    code = (
        "import asyncio; from service.agents.server import build; from service.agents.tools "
        "import Tools; "
    )
    code += "print(len(asyncio.run(build(Tools(connect=None)).list_tools())))"
    done = lean.run(installation(tmp_path, "mcp"), code)
    assert int(done.stdout) > 5, done.stderr


def test_what_runs_beside_a_training_framework_brings_no_web_stack(tmp_path: Path) -> None:
    """A framework in the same environment pins a web framework of its own."""
    installed = installation(tmp_path, "profiler", "search")
    assert not WEB & {path.name for path in installed.iterdir()}
    code = (
        "import hp_tool.cluster.profiler.training, hp_tool.cluster.profiler.endpoint, "
        "hp_tool.loop.tuning, "
        "service.worker, sys; print(*sys.modules)"
    )
    done = lean.run(installed, code)
    assert done.returncode == 0, done.stderr
    assert not WEB & set(done.stdout.split())
