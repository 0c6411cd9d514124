"""What is served is in the precision that was predicted, by the Python API and by `hp-tool export`
as a process.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

import hp_tool
from hp_tool.formats.exchange import read_query
from tests.formats.engine_parsers import parsed
from tests.formats.test_exported_words import run


def query(
    model: Any, precision: str, *, engine: str = "vllm", gpu: str = "b200-sxm-180gb", gpus: int = 8
) -> dict[str, Any]:
    load = {
        "input_length": 1000,
        "output_length": 200,
        "concurrency": 16,
        "engine": engine,
        "precision": precision,
    }
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": gpus},
        "inference": load,
    }


def command(format: str, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The checkpoint that the exported command loads, and its options as the engine's own parser
    takes them.
    """
    text = hp_tool.export(asked, format=format).text
    if format == "llm-d":
        spec = yaml.safe_load(text)["spec"]
        (container,) = spec["template"]["containers"]
        return spec["model"]["uri"].removeprefix("hf://"), parsed("vllm", container["args"])
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    start = {"vllm": "serve", "sglang": "--model-path", "trtllm": "trtllm-serve"}[format]
    place = words.index(start)
    return words[place + 1], parsed(format, [word for word in words[place + 2 :] if word != "$@"])


@pytest.mark.parametrize("format", ["vllm", "sglang", "trtllm", "llm-d"])
@pytest.mark.parametrize(
    ("model", "precision", "checkpoint"),
    [
        ("deepseek-v3", "nvfp4", "nvidia/DeepSeek-V3-FP4"),
        ("deepseek-r1", "nvfp4", "nvidia/DeepSeek-R1-FP4"),
        ("deepseek-v3", "fp8", "deepseek-ai/DeepSeek-V3"),
        ("qwen3-32b", "fp8", "Qwen/Qwen3-32B-FP8"),
        ("qwen3-32b", "bf16", "Qwen/Qwen3-32B"),
        ("gpt-oss-120b", "mxfp4", "openai/gpt-oss-120b"),
    ],
)
def test_a_checkpoint_of_the_predicted_precision_is_named(
    format: str, model: str, precision: str, checkpoint: str
) -> None:
    path, options = command(
        format, query(model, precision, engine="vllm" if format == "llm-d" else format)
    )
    assert path == checkpoint and "--quantization" not in options


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("deepseek-v3", "nvfp4"),
        ("deepseek-v3", "fp8"),
        ("qwen3-8b", "int4"),
        ("qwen2.5-7b", "fp8"),
        ("qwen3-8b", "bf16"),
    ],
)
def test_the_precision_comes_back(engine: str, model: str, precision: str) -> None:
    text = hp_tool.export(query(model, precision, engine=engine), format=engine).text
    load = {"inference.input_length": 1000, "inference.output_length": 200}
    read = read_query(text, overrides={"cluster.gpu": "b200-sxm-180gb"} | load)
    assert read["inference"].get("precision", "bf16") == precision


def test_weights_without_a_narrow_checkpoint_are_narrowed_by_the_engine_or_refused_by_name() -> (
    None
):
    path, options = command("vllm", query("qwen2.5-7b", "fp8"))
    assert (path, options["--quantization"]) == ("Qwen/Qwen2.5-7B", "fp8")
    for model, precision, format in (
        ("qwen2.5-7b", "fp8", "trtllm"),
        ("qwen2.5-7b", "nvfp4", "vllm"),
        ("qwen3-30b-a3b", "int8", "sglang"),
        ("deepseek-v3", "bf16", "vllm"),
    ):
        ran = run(
            "export",
            "-",
            "--format",
            format,
            content=query(model, precision, engine=format, gpus=16),
        )
        assert (
            ran.returncode == 2 and "inference.precision" in ran.stderr and precision in ran.stderr
        ), ran.stderr
