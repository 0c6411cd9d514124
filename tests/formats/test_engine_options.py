"""Exported commands speak the options, and the values, that the named versions of vLLM and SGLang
accept.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import export
from hp_tool.formats.tools import sglang, trtllm, vllm
from hp_tool.questions import schema
from hp_tool.questions.answers import answer_recommend
from tests.formats.engine_parsers import parsed

QUANTIZATION = {"fp8"}
"""Words of vLLM's --quantization that exports use, which its parser does not check
(QuantizationMethods of vllm/model_executor/layers/quantization/__init__.py).
"""
VERSIONS = {"vllm": vllm.VERSION, "sglang": sglang.VERSION, "trtllm": trtllm.VERSION}
LAYOUTS = (
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 4, "attention_data_parallel_size": 2},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8},
    {"attention_data_parallel_size": 8, "expert_parallel_size": 8, "redundant_experts": 16},
)


def words_of(
    engine: str,
    *,
    parallel: dict[str, int] | None = None,
    format: str | None = None,
    **inference: Any,
) -> list[str]:
    """The words behind the exported command and its model."""
    load = {"input_length": 1000, "output_length": 200, "concurrency": 16, "engine": engine}
    query = {
        "kind": "inference",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": load | inference,
        "parallel": parallel or {"tensor_parallel_size": 4},
    }
    return _words(export(result=query, format=format or engine), format or engine)


def _words(script: str, format: str) -> list[str]:
    if format == "llm-d":
        (container,) = yaml.safe_load(script)["spec"]["template"]["containers"]
        return list(container["args"])
    words = [
        word for word in shlex.split(script.replace("\\\n", " "), comments=True) if word != "$@"
    ]
    command = {"vllm": "serve", "sglang": "sglang.launch_server", "trtllm": "trtllm-serve"}[format]
    return words[words.index(command) + (1 if format == "sglang" else 2) :]


def options(engine: str, **asked: Any) -> dict[str, str | None]:
    """The exported command's options; None behind a switch."""
    words = words_of(engine, **asked)
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {
        word: None if after.startswith("--") else after
        for word, after in pairs
        if word.startswith("--")
    }


@pytest.mark.parametrize(
    ("engine", "format"), [("vllm", "vllm"), ("sglang", "sglang"), ("vllm", "llm-d")]
)
@pytest.mark.parametrize(
    ("precision", "parallel"),
    [
        *((precision, LAYOUTS[0]) for precision in ("fp16", "fp8", "int4", "nvfp4")),
        *(("bf16", one) for one in LAYOUTS),
    ],
    ids=str,
)
def test_the_engines_own_parser_accepts_the_command(
    engine: str, format: str, precision: str, parallel: dict[str, int]
) -> None:
    recorded = json.loads(
        (Path(__file__).with_name("engine_options") / f"{engine}.json").read_text()
    )
    assert f" {VERSIONS[engine]}'s" in recorded["source"]
    cache = "fp16" if precision == "fp16" else None
    words = words_of(
        engine, format=format, parallel=parallel, precision=precision, kv_cache_precision=cache
    )
    given = parsed(engine, words)
    assert all(value > 0 for value in given.values() if isinstance(value, int | float))
    assert given.get("--quantization") in {None, *QUANTIZATION} and len(given) >= 6


@pytest.mark.parametrize("parallel", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[4]], ids=str)
def test_trtllm_serve_knows_the_words_of_its_command(parallel: dict[str, int]) -> None:
    given = parsed(
        "trtllm", words_of("trtllm", parallel=parallel, precision="fp8", kv_cache_precision="fp8")
    )
    ranks = parallel.get("tensor_parallel_size", 1) * parallel.get(
        "attention_data_parallel_size", 1
    )
    assert (
        given["--tensor_parallel_size"] == ranks
        and given["--backend"] == "pytorch"
        and given["--max_seq_len"] > 1200
    )
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
def test_the_cache_precision_is_said_where_it_is_asked_for(
    engine: str, asked: dict[str, str], word: str | None
) -> None:
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
    assert "--enable-expert-parallel" in options(
        "vllm", parallel={"tensor_parallel_size": 4, "expert_parallel_size": 4}
    )
    assert (
        options("sglang", parallel={"tensor_parallel_size": 4, "expert_parallel_size": 2})[
            "--ep-size"
        ]
        == "2"
    )


def test_second_copies_and_two_batches_have_words() -> None:
    parallel = {
        "attention_data_parallel_size": 8,
        "expert_parallel_size": 8,
        "redundant_experts": 16,
    }
    one = options("vllm", parallel=parallel, two_batch_overlap=True)
    assert "--enable-eplb" in one and json.loads(one["--eplb-config"] or "") == {
        "num_redundant_experts": 16
    }
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
        "inference": {
            "input_length": 1000,
            "output_length": 200,
            "concurrency": 16,
            "engine": "trtllm",
        },
        "parallel": parallel,
    }
    assert '"load_balancer": {"num_slots": 144, "layer_updates_per_iter": 1}' in export(
        result=query, format="trtllm"
    )


POOLS = {
    "prefill_tensor_parallel_size": 2,
    "decode_tensor_parallel_size": 4,
    "prefill_replicas": 2,
    "decode_replicas": 1,
    "prefill_attention_data_parallel_size": 1,
    "decode_attention_data_parallel_size": 1,
}


def pool_query(**inference: Any) -> dict[str, Any]:
    load = {"input_length": 1000, "output_length": 200, "concurrency": 16, "disaggregated": POOLS}
    cluster = {"gpu": "h200-sxm-141gb", "num_gpus": 8}
    return {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": cluster,
        "inference": load | inference,
    }


def roles(script: str) -> dict[str, list[str]]:
    """The words of each process that a script of pools starts."""
    lines = script.replace("\\\n", " ").splitlines()
    starts = {
        lines[place - 1].rstrip(")"): line
        for place, line in enumerate(lines)
        if line.lstrip().startswith("exec ")
    }
    return {name: shlex.split(line.replace('"$@"', ""))[1:] for name, line in starts.items()}


def test_both_pools_of_vllm_hand_their_caches_over() -> None:
    words = roles(export(result=pool_query(engine="vllm"), format="vllm"))
    sides = {name: parsed("vllm", each[2:]) for name, each in words.items()}
    assert {name: side["--tensor-parallel-size"] for name, side in sides.items()} == {
        "prefill": 2,
        "decode": 4,
    }
    for side in sides.values():
        assert json.loads(side["--kv-transfer-config"]) == {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }


def test_sglangs_pools_know_each_others_ranks_and_have_a_router() -> None:
    words = roles(export(result=pool_query(engine="sglang"), format="sglang"))
    sides = {name: parsed("sglang", words[name][3:]) for name in ("prefill", "decode")}
    assert {name: side["--disaggregation-mode"] for name, side in sides.items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }
    assert (
        sides["prefill"]["--tensor-parallel-size"] == 2
        and sides["prefill"]["--disaggregation-decode-tp"] == 4
    )
    assert words["router"][:4] == [
        "python",
        "-m",
        "sglang_router.launch_router",
        "--pd-disaggregation",
    ]


def test_an_answers_pools_are_exported_by_rank_and_trtllm_has_none() -> None:
    query = schema.parse_query(
        pool_query(engine="vllm") | {"inference": pool_query()["inference"] | {"disaggregated": {}}}
    )
    answer = json.loads(schema.to_json(answer_recommend(query, top=3)))
    for rank in (1, 3):
        words = roles(export(result=answer, format="vllm", rank=rank))
        row = answer["disaggregated"][rank - 1]
        sizes = {
            name: parsed("vllm", each[2:])["--tensor-parallel-size"] for name, each in words.items()
        }
        assert sizes == {name: row[name]["tensor_parallel_size"] for name in ("prefill", "decode")}
    with pytest.raises(InputError, match="Rank 4"):
        export(result=answer, format="vllm", rank=4)
    with pytest.raises(UnsupportedError, match="trtllm cannot describe separate prefill"):
        export(result=answer, format="trtllm")


@pytest.mark.parametrize(
    ("model", "drafting", "method", "algorithm"),
    [
        ("qwen3-32b", {}, {"method": "ngram"}, "NGRAM"),
        ("deepseek-v3", {"draft_cost_fraction": 0.02}, {"method": "mtp"}, "NEXTN"),
        (
            "qwen3-32b",
            {"draft_cost_fraction": 0.05, "draft_model": "a/qwen3-32b-EAGLE-3"},
            {"method": "eagle3"},
            "EAGLE3",
        ),
        (
            "qwen3-32b",
            {"draft_cost_fraction": 0.1, "draft_model": "Qwen/Qwen3-0.6B"},
            {},
            "STANDALONE",
        ),
    ],
)
def test_what_drafts_has_words(
    model: str, drafting: dict[str, Any], method: dict[str, str], algorithm: str
) -> None:
    speculative = {"num_speculative_tokens": 3, "acceptance_rate": 0.7} | drafting
    load = {
        "input_length": 1000,
        "output_length": 200,
        "concurrency": 16,
        "speculative": speculative,
    }
    query = {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": load,
    }
    query |= {"parallel": {"tensor_parallel_size": 8}}
    if model == "deepseek-v3":
        query["inference"] = load | {"precision": "fp8"}
    draft = {"model": drafting["draft_model"]} if "draft_model" in drafting else {}
    for format in ("vllm", "llm-d"):
        words = _words(export(result=query, format=format), format)
        config = json.loads(parsed("vllm", words)["--speculative-config"])
        assert config == method | draft | {"num_speculative_tokens": 3}
    given = parsed("sglang", _words(export(result=query, format="sglang"), "sglang"))
    assert (
        given["--speculative-algorithm"] == algorithm
        and given["--speculative-num-draft-tokens"] == 4
    )
    assert given.get("--speculative-draft-model-path") == drafting.get("draft_model")
    with pytest.raises(UnsupportedError, match="speculative decoding is not supported for trtllm"):
        export(result=query, format="trtllm")


def test_drafts_that_nobody_names_are_asked_for() -> None:
    speculative = {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_cost_fraction": 0.1}
    with pytest.raises(UnsupportedError) as unknown:
        words_of("vllm", speculative=speculative)
    assert unknown.value.field == "inference.speculative.draft_model"
