"""Query files as careless hands and hostile ones write them: valid ones, changed in a few
places.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import yaml

SEEDS: tuple[dict[str, Any], ...] = (
    {
        "id": "dense",
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {
            "gpu": "h100-sxm-80gb",
            "num_gpus": 16,
            "gpus_per_node": 8,
            "price_per_gpu_hour": 2.0,
        },
        "training": {
            "sequence_length": 4096,
            "global_batch_size": 32,
            "precision": "bf16",
            "total_tokens": 1e11,
        },
        "parallel": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "micro_batch_size": 1,
            "recompute": "selective",
        },
        "constraints": {"max_days": 100, "memory_headroom_fraction": 0.05},
    },
    {
        "kind": "training",
        "model": {
            "name": "tiny",
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 1024,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
        },
        "cluster": {"node_type": "dgx-h100", "num_gpus": 8},
        "training": {
            "sequence_length": 512,
            "global_batch_size": 16,
            "framework": "megatron-core",
            "overlap": None,
            "lora": {"rank": 8, "target_modules": ["linear_qkv"]},
            "task": "lora",
        },
        "parallel": {
            "expert_parallel_size": 2,
            "recompute": {"granularity": "full", "method": "block", "num_layers": 1},
        },
        "search": {"launcher": "local", "budget_runs": 2, "seed": 3},
        "objective": "throughput",
    },
    {
        "kind": "training",
        "model": "mixtral-8x7b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 32},
        "training": {
            "sequence_length": 2048,
            "global_batch_size": 64,
            "optimizer": "adam",
            "sequence_lengths": "full-rows",
            "packed": False,
        },
        "parallel": {
            "pipeline_layout": "Et*16|t*16L",
            "zero_stage": 1,
            "rank_order": "tp-cp-ep-dp-pp",
            "expert_tensor_parallel_size": 1,
            "context_parallel_communication": "p2p",
        },
    },
    {
        "kind": "training",
        "model": "gpt-22b",
        "cluster": {
            "stages": [
                {"gpu": "a100-sxm-80gb", "num_gpus": 8},
                {"gpu": "h100-sxm-80gb", "num_gpus": 8},
            ]
        },
        "training": {"sequence_length": 2048, "global_batch_size": 16},
        "parallel": {"pipeline_parallel_size": 2},
    },
    {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8, "gpus_per_node": 8},
        "inference": {
            "input_length": 4000,
            "output_length": 1000,
            "concurrency": 64,
            "precision": "fp8",
            "engine": "vllm",
        },
        "parallel": {"tensor_parallel_size": 4},
        "targets": {"ttft_s": 1.0, "tpot_s": 0.03},
    },
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    8,
    1 << 20,
    1 << 31,
    10**30,
    0.5,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "\0",
    "x" * 3000,
    "1",
    "none",
    "full",
    "../../etc/passwd",
    "{{7*7}}",
    "\ud800",
    "ünï",
    "cpu",
    "gpt3-175b",
    [],
    [1],
    [0, 1, 2],
    [[[]]],
    {},
    {"name": "x"},
    {"gpu": "cpu"},
    ["a"] * 300,
    "b200-sxm-180gb",
    "vllm",
    "inference",
)
BYTES = (
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"]",
    b":",
    b",",
    b'"',
    b"- ",
    b"&a ",
    b"*a",
    b"!!python/object:os.system x",
    b"\n",
    b"1e999",
)


def mutated(*, count: int, seed: int = 0) -> Iterator[bytes]:
    """`count` query files, the same for the same seed: JSON or YAML of a valid query with one to
    four changes.
    """
    choice = random.Random(seed)
    for _ in range(count):
        query = copy.deepcopy(choice.choice(SEEDS))
        for _ in range(choice.choice((1, 1, 1, 2, 4))):
            _change(query, choice)
        text = _written(query, choice)
        yield _torn(text, choice) if choice.random() < 0.2 else text


def _change(query: dict[str, Any], choice: random.Random) -> None:
    """One change somewhere in the structure."""
    places = list(_places(query))
    if not places:
        return
    node, key = choice.choice(places)
    value = copy.deepcopy(node[key])
    match choice.randrange(9):
        case 0:
            del node[key]
        case 1 if isinstance(key, str):
            node[key[:-1] + choice.choice("xs_ ")] = node.pop(key)
        case 2 if isinstance(value, int | float) and not isinstance(value, bool):
            node[key] = choice.choice(
                (value * 1000, value // 3, -value, value + 0.5, value * 1e200, str(value))
            )
        case 3:
            other, name = choice.choice(places)
            node[key] = copy.deepcopy(other[name])
        case 4:
            node[key] = [copy.deepcopy(value) for _ in range(choice.choice((1, 2, 50)))]
        case 5 if isinstance(node, dict):
            node[
                choice.choice(
                    ("id", "unknown", "name", "training", "parallel", "trainer", "inference")
                )
            ] = value
        case 6:
            node[key] = choice.choice((1, 2, 4, 8, 16, 64, 0.5, 1e12))
        case _:
            node[key] = copy.deepcopy(choice.choice(VALUES))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a structure."""
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in list(items):
        yield node, key
        yield from _places(value)


def _written(query: dict[str, Any], choice: random.Random) -> bytes:
    """As text; JSON where YAML cannot write it. What is no Unicode stays escaped in JSON."""
    if choice.random() < 0.3:
        try:
            return yaml.safe_dump(query, allow_unicode=True).encode()
        except (yaml.YAMLError, UnicodeEncodeError):
            pass
    return json.dumps(query).encode()


def _torn(text: bytes, choice: random.Random) -> bytes:
    """Cut, or with bytes put in or taken out."""
    place = choice.randrange(len(text) + 1)
    match choice.randrange(4):
        case 0:
            return text[:place]
        case 1:
            return text[:place] + choice.choice(BYTES) * choice.choice((1, 1, 200)) + text[place:]
        case 2:
            return text[:place] + text[place + choice.randint(1, 20) :]
        case _:
            return b"[" * choice.choice((10, 5000)) + text
