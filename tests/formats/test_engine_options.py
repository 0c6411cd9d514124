"""Exported commands speak the options, and the values, that the named versions of vLLM and SGLang accept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.errors import UnsupportedError
from hp_tool.exchange import export
from hp_tool.formats.tools import sglang, trtllm, vllm
from tests.formats.engine_parsers import parsed

QUANTIZATION = {"fp8"}
"""Words of vLLM's --quantization that exports use, which its parser does not check (QuantizationMethods of
vllm/model_executor/layers/quantization/__init__.py)."""
VERSIONS = {"vllm": vllm.VERSION, "sglang": sglang.VERSION, "trtllm": trtllm.VERSION}
LAYOUTS = (
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 4, "attention_data_parallel_size": 2},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8},
    {"attention_data_parallel_size": 8, "expert_parallel_size": 8, "redundant_experts": 16},
)


def words_of(engine: str, *, parallel: dict[str, int] | None = None, format: str | None = None, **inference: Any) -> list[str]:
    """The words behind the exported command and its model."""
    load = {"input_length": 1000, "output_length": 200, "concurrency": 16, "engine": engine}
    query = {
        "kind": "inference",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": load | inference,
        "parallel": parallel or {"tensor_parallel_size": 4},
    }
    script = export(result=query, format=format or engine)
    if format == "llm-d":
        (container,) = yaml.safe_load(script)["spec"]["template"]["containers"]
        return list(container["args"])
    words = [word for word in shlex.split(script.replace("\\\n", " "), comments=True) if word != "$@"]
    command = {"vllm": "serve", "sglang": "sglang.launch_server", "trtllm": "trtllm-serve"}[engine]
    return words[words.index(command) + (1 if engine == "sglang" else 2) :]


def options(engine: str, **asked: Any) -> dict[str, str | None]:
    """The exported command's options; None behind a switch."""
    words = words_of(engine, **asked)
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: None if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


@pytest.mark.parametrize(("engine", "format"), [("vllm", "vllm"), ("sglang", "sglang"), ("vllm", "llm-d")])
@pytest.mark.parametrize(
    ("precision", "parallel"),
    [*((precision, LAYOUTS[0]) for precision in ("fp16", "fp8", "int4", "nvfp4")), *(("bf16", one) for one in LAYOUTS)],
    ids=str,
)
def test_the_engines_own_parser_accepts_the_command(engine: str, format: str, precision: str, parallel: dict[str, int]) -> None:
    recorded = json.loads((Path(__file__).with_name("engine_options") / f"{engine}.json").read_text())
    assert f" {VERSIONS[engine]}'s" in recorded["source"]
    cache = "fp16" if precision == "fp16" else None
    words = words_of(engine, format=format, parallel=parallel, precision=precision, kv_cache_precision=cache)
    given = parsed(engine, words)
    assert all(value > 0 for value in given.values() if isinstance(value, int | float))
    assert given.get("--quantization") in {None, *QUANTIZATION} and len(given) >= 6


@pytest.mark.parametrize("parallel", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], ids=str)
def test_trtllm_serve_knows_the_words_of_its_command(parallel: dict[str, int]) -> None:
    given = parsed("trtllm", words_of("trtllm", parallel=parallel, precision="fp8", kv_cache_precision="fp8"))
    ranks = parallel.get("tensor_parallel_size", 1) * parallel.get("attention_data_parallel_size", 1)
    assert given["--tensor_parallel_size"] == ranks and given["--backend"] == "pytorch" and given["--max_seq_len"] > 1200
    with pytest.raises(AssertionError):
        parsed("trtllm", ["--max_num_seqs=8"])


def test_the_parsers_refuse_what_the_engines_do() -> None:
    for word in ("--max-num-sequences=8", "--max-num-seqs=many", "--all2all-backend=deepep"):
        with pytest.raises(AssertionError):
            parsed("vllm", [word])
    with pytest.raises(AssertionError):
        parsed("sglang", ["--kv-cache-dtype=fp8"])


@pytest.mark.parametrize(
    ("engine", "asked", "word"),
    [
        ("vllm", {"precision": "fp8"}, None),  # the engine's own choice, which the estimate assumed
        ("vllm", {"precision": "fp8", "kv_cache_precision": "fp8"}, "fp8"),
        ("vllm", {"precision": "fp8", "kv_cache_precision": "bf16"}, "auto"),
        ("vllm", {}, None),
        ("sglang", {"precision": "fp8"}, None),
        ("sglang", {"precision": "fp8", "kv_cache_precision": "fp8"}, "fp8_e4m3"),
    ],
)
def test_the_cache_precision_is_said_where_it_is_asked_for(engine: str, asked: dict[str, str], word: str | None) -> None:
    found = options(engine, **asked)
    assert found.get("--kv-cache-dtype") == word and found["--dtype"] == "bfloat16"


@pytest.mark.parametrize("precision", ["nvfp4", "fp32"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_cache_without_a_word_is_refused(engine: str, precision: str) -> None:
    with pytest.raises(UnsupportedError, match=r"set inference\.kv_cache_precision to bf16"):
        options(engine, kv_cache_precision=precision)


def test_limits_are_of_one_scheduler_in_vllm_and_of_all_attention_groups_in_sglang() -> None:
    parallel = {
        "attention_data_parallel_size": 8,
        "expert_parallel_size": 8,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
    }
    one = options("vllm", parallel=parallel)
    assert (one["--max-num-seqs"], one["--max-num-batched-tokens"]) == ("64", "4096")
    every = options("sglang", parallel=parallel)
    assert (every["--max-running-requests"], every["--chunked-prefill-size"]) == ("512", "32768")


def test_vllm_divides_experts_over_all_ranks_or_none() -> None:
    with pytest.raises(UnsupportedError, match="set expert_parallel_size to 4 or 1"):
        options("vllm", parallel={"tensor_parallel_size": 4, "expert_parallel_size": 2})
    assert "--enable-expert-parallel" in options("vllm", parallel={"tensor_parallel_size": 4, "expert_parallel_size": 4})
    assert options("sglang", parallel={"tensor_parallel_size": 4, "expert_parallel_size": 2})["--ep-size"] == "2"


def test_second_copies_and_two_batches_have_words() -> None:
    parallel = {"attention_data_parallel_size": 8, "expert_parallel_size": 8, "redundant_experts": 16}
    one = options("vllm", parallel=parallel, two_batch_overlap=True)
    assert "--enable-eplb" in one and json.loads(one["--eplb-config"] or "") == {"num_redundant_experts": 16}
    assert "--enable-dbo" in one and one["--all2all-backend"] == "deepep_low_latency"
    other = options("sglang", parallel=parallel, two_batch_overlap=True)
    assert "--enable-eplb" in other and other["--ep-num-redundant-experts"] == "16"
    assert "--enable-two-batch-overlap" in other and other["--moe-a2a-backend"] == "deepep"
    assert "--enable-eplb" not in options("sglang", parallel=parallel | {"redundant_experts": 0})
    with pytest.raises(UnsupportedError, match="no two-batch overlap"):
        options("trtllm", parallel=parallel, two_batch_overlap=True)
    query = {
        "kind": "inference",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": {"input_length": 1000, "output_length": 200, "concurrency": 16, "engine": "trtllm"},
        "parallel": parallel,
    }
    assert '"load_balancer": {"num_slots": 144, "layer_updates_per_iter": 1}' in export(result=query, format="trtllm")
