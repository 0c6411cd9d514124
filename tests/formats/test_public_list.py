"""The list by hand of public files, and how the benchmark judges what became of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.formats import sets
from benchmarks.formats.public import PublicFile, classify, code_block, read_list

PAGE = "# Serve\n\n```bash\nvllm serve Qwen/Qwen3-8B -tp 2\n```\n\n```bash\nls\n```\n"
LOAD = {"inference.input_length": 100, "inference.output_length": 10}
FILE = PublicFile(
    repository="a/b",
    ref="HEAD",
    path="page.md",
    line=4,
    kind="serving",
    complete=True,
    expected="read",
    reason="",
    given=LOAD,
    facts={"parallel.tensor_parallel_size": 2, "cluster.num_gpus": 2},
)


def test_each_line_of_the_list_can_be_judged() -> None:
    files = read_list()
    assert len({(each.repository, each.path) for each in files}) == len(files) >= 49
    for each in files:
        assert each.expected in ("read", "refused")
        assert bool(each.facts) == (each.expected == "read"), each.path
        assert bool(each.reason) == (each.expected == "refused"), each.path
        assert each.complete or each.expected == "refused", each.path


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (FILE, "read exactly"),
        (replace(FILE, facts={"parallel.tensor_parallel_size": 4}), "misread"),
        (replace(FILE, expected="refused", reason="anything"), "misread"),
        (replace(FILE, given={}), "refused for a wrong reason"),
        (
            replace(FILE, expected="refused", reason="does not set the load", given={}),
            "refused for the true reason",
        ),
        (
            replace(FILE, line=None, expected="refused", reason="page of Markdown"),
            "refused for the true reason",
        ),
    ],
)
def test_what_became_of_a_file_is_told(file: PublicFile, expected: str, tmp_path: Path) -> None:
    assert classify(file, PAGE, folder=tmp_path)[0] == expected


def test_the_block_around_a_line_is_the_command() -> None:
    assert code_block(PAGE, 4) == "vllm serve Qwen/Qwen3-8B -tp 2\n"
    assert code_block(PAGE, 8) == "ls\n"


SWIFT = "NPROC_PER_NODE=2 swift {} --model {} --max_length 1024 --tuner_type {}\n"


def test_sets_know_what_is_in_scope(tmp_path: Path) -> None:
    examples = tmp_path / "modelscope+ms-swift/examples"
    recipes = tmp_path / "vllm-project+recipes/models/a"
    titan = tmp_path / "pytorch+torchtitan/torchtitan/models/llama3"
    for folder in (examples, recipes, titan):
        folder.mkdir(parents=True)
    scripts = {
        "lora": SWIFT.format("sft", "Qwen/Qwen3-8B", "lora"),
        "length": SWIFT.format("sft", "Qwen/Qwen3-8B", "full").replace("--max_length 1024", ""),
        "adapter": SWIFT.format("sft", "Qwen/Qwen3-8B", "boft"),
        "pictures": SWIFT.format("sft", "Qwen/Qwen3-VL-8B-Instruct", "lora"),
        "choices": SWIFT.format("rlhf", "Qwen/Qwen3-8B", "lora"),
    }
    for name, text in scripts.items():
        (examples / f"{name}.sh").write_text(text)
    guide = "".join(
        f"```bash\nvllm serve {name}\n```\n"
        for name in ("Qwen/Qwen3-8B", "LiquidAI/LFM2.5-1.2B-Instruct", "... --port 1")
    )
    (recipes / "b.yaml").write_text(yaml.safe_dump({"meta": {"tasks": ["text"]}, "guide": guide}))
    (titan / "config_registry.py").write_text(
        "from torchtitan.models.llama3 import model_registry\n"
        "def run() -> Trainer.Config:\n"
        '    return Trainer.Config(model_spec=model_registry("8B"))\n'
    )
    found = {
        file.name: file.scope or sets.refusal_of(file)
        for files in sets.SETS.values()
        for file in files(tmp_path)
    }
    assert found["lora.sh"] == found["length.sh"] == found["llama3 run"] == ""
    assert found["adapter.sh"] == "another adapter" and found["pictures.sh"] == "no text model"
    assert found["choices.sh"] == "no training, or one on preferences"
    assert found["models/a/b.yaml#0"] == "" and "layers" in found["models/a/b.yaml#1"]
    assert found["models/a/b.yaml#2"] == "no whole command"
