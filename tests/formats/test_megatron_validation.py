"""Exported Megatron commands pass Megatron's own checks: 20 models, three generations of GPUs,
every layout of a small grid.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.formats import shell
from hp_tool.formats.launch import find_launch
from hp_tool.formats.reading import Reading, parse_flags, table
from hp_tool.formats.tools.megatron_lm import torchrun_script
from tests.conftest import skip_or_fail
from tests.formats.cases import setup_of
from tests.formats.megatron_rules import complaints, configured

MODELS = (
    "gpt3-1.3b",
    "gpt3-13b",
    "gpt3-175b",
    "llama-2-7b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-405b",
    "llama-3.2-3b",
    "mistral-7b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen2.5-7b",
    "qwen2.5-72b",
    "qwen3-8b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "nemotron-4-15b",
    "gpt-22b",
)
GPUS = {"a100-sxm-80gb": 8, "h100-sxm-80gb": 9, "b200-sxm-180gb": 10}
"""Of three generations, and the compute capability that Megatron asks for."""

CASES = [
    pytest.param(model, gpu, marks=() if number % len(GPUS) == place else pytest.mark.long)
    for number, model in enumerate(MODELS)
    for place, gpu in enumerate(GPUS)
]
"""Each model on one GPU; the others by `pytest -m long`."""


def queries(model: str, gpu: str) -> list[dict[str, Any]]:
    """Layouts with and without every kind of parallelism, and the switches that Megatron asserts
    something about.
    """
    sizes = itertools.product((1, 8), (1, 2, 4), (1, 4), (1, 2), (0, 1, 3))
    found = []
    for number, (t, p, c, v, zero) in enumerate(sizes):
        if (v > 1 and p == 1) or (zero == 3 and p > 1):
            continue
        experts = any(each in model for each in ("x7b", "x22b", "a3b", "a22b", "deepseek"))
        parallel: dict[str, Any] = {
            "tensor_parallel_size": t,
            "pipeline_parallel_size": p,
            "context_parallel_size": c,
            "virtual_pipeline_parallel_size": v,
            "zero_stage": zero,
            "micro_batch_size": 1,
            "recompute": ("none", "selective", "full")[number % 3],
        }
        if c > 1:
            parallel["context_parallel_communication"] = ("p2p", "a2a", "a2a+p2p", "all_gather")[
                number % 4
            ]
        if experts:
            parallel |= {
                "expert_parallel_size": 8 if zero < 3 else 1,
                "expert_tensor_parallel_size": 1,
            }
        training: dict[str, Any] = {
            "sequence_length": 2048 if model.startswith("gpt") else 4096,
            "global_batch_size": 512,
        }
        if number % 5 == 0 and gpu != "a100-sxm-80gb":
            training["precision"] = "fp8"
        if number % 7 == 0 and not experts:
            training["cuda_graphs"] = True
        if number % 11 == 0 and zero == 1:
            training["offload"] = "optimizer"
        cluster = {"gpu": gpu, "num_gpus": 256}
        found.append(
            {
                "kind": "training",
                "model": model,
                "cluster": cluster,
                "training": training,
                "parallel": parallel,
            }
        )
    return found


def parsed(script: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The arguments of a script as bash passes them on, and the variables that it exports."""
    reading = Reading(tool="megatron-lm")
    followed = shell.read_script(script, variables={"MASTER_ADDR": "node0"})
    launch = find_launch(followed, reading=reading)
    assert launch is not None
    words = {
        each.written[2:]: list(each.values)
        for each in parse_flags(launch.words, table=table("megatron"), reading=reading)
    }
    assert not reading.refused
    exported = [
        line.removeprefix("export ").split("=")
        for line in script.splitlines()
        if line.startswith("export ")
    ]
    return words, dict(exported)


@pytest.mark.components
@pytest.mark.parametrize(("model", "gpu"), CASES)
def test_exported_commands_pass_what_megatron_checks(model: str, gpu: str) -> None:
    try:
        import megatron.core  # noqa: F401
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")
    passed = 0
    for query in queries(model, gpu):
        try:
            setup = setup_of(query)
            if setup.model.num_attention_heads % setup.parallel.tensor_parallel_size:
                continue
            script = torchrun_script(setup)
        except InputError:  # what is illegal, or has no flag, is refused by name
            continue
        words, environment = parsed(script)
        assert (
            complaints(words, world_size=256, environment=environment, architecture=GPUS[gpu]) == []
        ), query
        configured(words)
        passed += 1
    assert passed >= 6


def test_what_a_configuration_needs_to_start_is_there() -> None:
    query = queries("deepseek-v3", "h100-sxm-80gb")[0]
    query["parallel"] |= {
        "tensor_parallel_size": 2,
        "context_parallel_size": 4,
        "context_parallel_communication": "a2a+p2p",
    }
    query["training"]["cuda_graphs"] = False
    words, environment = parsed(torchrun_script(setup_of(query)))
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert [
        words[name] for name in ("moe-router-score-function", "moe-router-enable-expert-bias")
    ] == [["sigmoid"], []]
    assert words["hierarchical-context-parallel-sizes"] == ["4", "1"]
    llama, _ = parsed(torchrun_script(setup_of(queries("llama-3-8b", "b200-sxm-180gb")[0])))
    assert (llama["rotary-base"], llama["norm-epsilon"]) == (["500000"], ["1e-05"])


def test_what_nobody_here_knows_is_listed_and_marked_in_place() -> None:
    older, _ = parsed(torchrun_script(setup_of(queries("llama-30b", "h100-sxm-80gb")[0])))
    assert older["rotary-base"] == ["10000"]  # it is none of Llama 3
    script = torchrun_script(setup_of(queries("gpt-22b", "h100-sxm-80gb")[0] | {"model": "grok-1"}))
    at_the_top = script[: script.index("YOURS=(")]
    assert "--rotary-base" in at_the_top
    assert script.count("FILL IN 5") == 1
