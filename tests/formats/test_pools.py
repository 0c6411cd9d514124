"""Pools for prefill and decoding: what is exported is read back as it was predicted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_query
from hp_tool.formats.exchange.export import export
from hp_tool.questions import schema
from hp_tool.questions.serving.disaggregated import rank_pools

MODELS = ("qwen3-32b", "llama-3-70b", "llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3")
GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb")
FEW, MANY = 2, 12
"""Rows of each format."""


def asked(seed: int, *, engine: str) -> dict[str, Any]:
    """A query for pools."""
    draw = random.Random(f"pools {engine} {seed}")
    load = {
        "engine": engine,
        "input_length": draw.choice((512, 1000, 4000)),
        "output_length": draw.choice((128, 500)),
        "concurrency": draw.choice((8, 64)),
        "disaggregated": draw.choice(({}, {"prefill_replicas": 2})),
    }
    return {
        "kind": "inference",
        "model": draw.choice(MODELS),
        "cluster": {"gpu": draw.choice(GPUS), "num_gpus": draw.choice((8, 16))},
        "inference": load | draw.choice(({}, {"memory_fraction": 0.85}, {"precision": "fp8"})),
        "parallel": draw.choice(({}, {}, {"max_num_seqs": 128})),
    }


def check(query: dict[str, Any], *, format: str) -> int:
    """How many of the pairs were written; each of them comes back the same."""
    try:
        rows = rank_pools(query=schema.parse_query(query), top=2)
    except (InputError, UnsupportedError):
        return 0
    written = 0
    for rank, row in enumerate(rows, 1):
        try:
            text = export(result=query, format=format, rank=rank)
        except (InputError, UnsupportedError):
            continue
        load = query["inference"]
        given = {
            f"inference.{name}": load[name]
            for name in ("input_length", "output_length", "concurrency")
        }
        given |= {f"cluster.{name}": value for name, value in query["cluster"].items()}
        back = read_query(text, format=format, overrides=given | {"model": query["model"]})
        (again, *_) = rank_pools(query=schema.parse_query(back), top=1)
        assert (again.prefill, again.decode) == (row.prefill, row.decode), text
        for name in ("ttft_s", "tpot_s", "request_rate_per_second", "transfer_s"):
            ours, theirs = getattr(row.estimate, name), getattr(again.estimate, name)
            assert theirs == pytest.approx(ours, rel=1e-9), (name, text)
        written += 1
    return written


@pytest.mark.parametrize("rows", [FEW, pytest.param(MANY, marks=pytest.mark.components)])
@pytest.mark.parametrize(
    ("format", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("llm-d", "vllm")]
)
def test_pools_that_are_exported_come_back_as_they_were_predicted(
    format: str, engine: str, rows: int
) -> None:
    written = 0
    for seed in range(60):
        if written >= rows:
            break
        written += check(asked(seed, engine=engine), format=format)
    assert written >= rows


def test_a_role_of_a_script_is_one_server() -> None:
    query = asked(0, engine="vllm") | {"model": "llama-3-8b", "parallel": {}}
    query["inference"] = {
        "engine": "vllm",
        "input_length": 1000,
        "output_length": 200,
        "concurrency": 64,
        "disaggregated": {},
    }
    text = export(result=query, format="vllm")
    with pytest.raises(InputError, match="kv-transfer-config"):
        read_query(
            text,
            variables={"1": "decode"},
            overrides={
                "cluster.gpu": query["cluster"]["gpu"],
                "inference.input_length": 1000,
                "inference.output_length": 200,
            },
        )


def test_replicas_that_nothing_says_are_missing() -> None:
    query = asked(1, engine="sglang") | {"model": "llama-3-8b", "parallel": {}}
    query["inference"]["disaggregated"] = {}
    query["inference"].pop("precision", None)
    text = export(result=query, format="sglang").replace("replica", "copy")
    with pytest.raises(InputError, match=r"inference\.disaggregated\.prefill_replicas"):
        read_query(
            text,
            overrides={
                "cluster.gpu": query["cluster"]["gpu"],
                "inference.input_length": 1000,
                "inference.output_length": 200,
            },
        )
