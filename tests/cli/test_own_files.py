"""Commands and Python functions take a path where the service takes a name alone; what is stored
holds no path.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hp_tool as python
from hp_tool.errors import InputError
from hp_tool.loop.tuning import tune
from hp_tool.questions import schema
from hp_tool.store import open_store
from tests.tuning.cpu_engine import CpuEngine

Run = Callable[..., Any]
MODEL = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1024}
QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "mine.json",
    "cluster": {"gpu": "cpu", "num_gpus": 2},
    "training": {"sequence_length": 128, "global_batch_size": 8, "precision": "fp32"},
    "parallel": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
    "search": {"budget_runs": 1},
}
COMMAND = """torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
  --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1024
"""  # noqa: E501


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(json.dumps(MODEL))
    (tmp_path / "lengths.txt").write_text("64\n128\n")
    lengths = QUERY["training"] | {"sequence_lengths": "lengths.txt"}
    (tmp_path / "query.json").write_text(json.dumps(QUERY | {"training": lengths}))
    (tmp_path / "plain.json").write_text(json.dumps(QUERY))
    (tmp_path / "train.sh").write_text(COMMAND)
    report = {
        "query": QUERY,
        "parallel": {"micro_batch_size": 1},
        "measurement": {"status": "ok", "step_s": 0.5},
    }
    (tmp_path / "reports.jsonl").write_text(json.dumps(report))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "query.json", "--set", "parallel.micro_batch_size=1"),
        ("recommend", "query.json"),
        ("batch", "query.json", "--format", "yaml"),
        ("batch", "query.json", "--format", "yaml", "--jobs", "2"),
        ("export", "plain.json", "--format", "megatron-lm"),
        (
            "import",
            "train.sh",
            "--gpu",
            "cpu",
            "--model",
            "mine.json",
            "--set",
            "training.sequence_lengths=lengths.txt",
        ),
        (
            "size",
            "--gpu",
            "h100-sxm-80gb",
            "--num-gpus",
            "8",
            "--tokens",
            "1e9",
            "--model",
            "mine.json",
        ),
        ("models", "mine.json"),
        ("calibrate", "--measurements", "reports.jsonl"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[4:5]),
)
def test_a_command_takes_paths(entry_point: Run, files: Path, arguments: tuple[str, ...]) -> None:
    ended = entry_point(*arguments)
    assert ended.returncode == 0, ended.stderr
    assert '"error"' not in ended.stdout


def test_python_takes_paths(files: Path) -> None:
    assert python.recommend(files / "query.json").recommendations
    assert python.recommend(python.make_query(QUERY)).recommendations
    assert python.size(
        gpu="h100-sxm-80gb", num_gpus=8, tokens=1e9, model="mine.json"
    ).sizing.feasible


def test_a_search_keeps_what_its_file_said(files: Path) -> None:
    store = open_store(f"sqlite:///{files / 'hp.sqlite3'}")
    try:
        search = tune(
            query=schema.parse_own_query(QUERY), store=store, launcher=CpuEngine(num_gpus=2)
        ).search.id
        (files / "mine.json").unlink()
        kept = store.get_search(search_id=search).query["model"]
        assert (kept["name"], kept["vocab_size"]) == ("mine", 1024)
        lengths = QUERY["training"] | {"sequence_lengths": "lengths.txt"}
        asked = QUERY | {"model": MODEL | {"name": "mine"}, "training": lengths}
        with pytest.raises(InputError) as caught:  # before anything is stored
            tune(query=schema.parse_own_query(asked), store=store, launcher=CpuEngine(num_gpus=2))
        assert (caught.value.field, store.list_searches(limit=9).items[0].id) == (
            "training.sequence_lengths",
            search,
        )
    finally:
        store.close()
