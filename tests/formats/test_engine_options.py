"""Exported commands speak the options, and the values, that the named versions of vLLM and SGLang accept."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from hp_tool.errors import UnsupportedError
from hp_tool.exchange import export
from hp_tool.formats.engines import VERSIONS

NUMBER, SWITCH = "a number", "no value"
Values = str | frozenset[str]

VLLM_0_12_0: dict[str, Values] = {
    # vllm/engine/arg_utils.py, EngineArgs.add_cli_args
    "--tensor-parallel-size": NUMBER,
    "--pipeline-parallel-size": NUMBER,
    "--data-parallel-size": NUMBER,
    "--enable-expert-parallel": SWITCH,
    "--enable-eplb": SWITCH,
    "--eplb-config": "a mapping",
    "--all2all-backend": frozenset({"naive", "pplx", "deepep_high_throughput", "deepep_low_latency"}),
    "--enable-dbo": SWITCH,
    "--max-num-seqs": NUMBER,
    "--max-num-batched-tokens": NUMBER,
    "--max-model-len": NUMBER,
    "--gpu-memory-utilization": NUMBER,
    # vllm/config/model.py, ModelDType
    "--dtype": frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"}),
    # vllm/model_executor/layers/quantization/__init__.py, QuantizationMethods
    "--quantization": frozenset({
        "awq", "deepspeedfp", "tpu_int8", "fp8", "ptpc_fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4", "bitblas",
        "gguf", "gptq_marlin_24", "gptq_marlin", "gptq_bitblas", "awq_marlin", "gptq", "compressed-tensors", "bitsandbytes",
        "hqq", "experts_int8", "ipex", "quark", "moe_wna16", "torchao", "auto-round", "rtn", "inc", "mxfp4", "petit_nvfp4",
        "cpu_gptq", "cpu_awq",
    }),
    # vllm/config/cache.py, CacheDType, without `bfloat16`: "an invalid option for models that do not default to fp8"
    "--kv-cache-dtype": frozenset({"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"}),
}  # fmt: skip

SGLANG_0_5_6_POST2: dict[str, Values] = {
    # sglang/srt/server_args.py, ServerArgs.add_cli_args
    "--model-path": "a path",
    "--tp-size": NUMBER,
    "--pp-size": NUMBER,
    "--dp-size": NUMBER,
    "--ep-size": NUMBER,
    "--enable-dp-attention": SWITCH,
    "--enable-eplb": SWITCH,
    "--ep-num-redundant-experts": NUMBER,
    "--moe-a2a-backend": frozenset({"none", "deepep", "mooncake", "ascend_fuseep"}),
    "--enable-two-batch-overlap": SWITCH,
    "--max-running-requests": NUMBER,
    "--chunked-prefill-size": NUMBER,
    "--context-length": NUMBER,
    "--mem-fraction-static": NUMBER,
    "--dtype": frozenset({"auto", "half", "float16", "bfloat16", "float", "float32"}),
    # QUANTIZATION_CHOICES
    "--quantization": frozenset({
        "awq", "fp8", "gptq", "marlin", "gptq_marlin", "awq_marlin", "bitsandbytes", "gguf", "modelopt", "modelopt_fp8",
        "modelopt_fp4", "petit_nvfp4", "w8a8_int8", "w8a8_fp8", "moe_wna16", "qoq", "w4afp8", "mxfp4", "auto-round",
        "compressed-tensors", "modelslim",
    }),
    "--kv-cache-dtype": frozenset({"auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"}),
}  # fmt: skip

ACCEPTED = {"vllm": ("0.12.0", VLLM_0_12_0), "sglang": ("0.5.6.post2", SGLANG_0_5_6_POST2)}
LAYOUTS = (
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 4, "attention_data_parallel_size": 2},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8},
    {"attention_data_parallel_size": 8, "expert_parallel_size": 8, "redundant_experts": 16},
)


def options(engine: str, *, parallel: dict[str, int] | None = None, **inference: Any) -> dict[str, str | None]:
    """The exported command's options; None behind a switch."""
    load = {"input_length": 1000, "output_length": 200, "concurrency": 16, "engine": engine}
    query = {
        "kind": "inference",
        "model": "qwen3-30b-a3b",
        "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
        "inference": load | inference,
        "parallel": parallel or {"tensor_parallel_size": 4},
    }
    script = export(result=query, format=engine)
    words = [word for word in shlex.split(script.replace("\\\n", " "), comments=True) if word != "$@"]
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


@pytest.mark.parametrize("engine", ACCEPTED)
@pytest.mark.parametrize(
    ("precision", "parallel"),
    [*((precision, LAYOUTS[0]) for precision in ("fp16", "fp8", "int8", "int4", "nvfp4")), *(("bf16", one) for one in LAYOUTS)],
    ids=str,
)
def test_the_version_accepts_every_option_and_its_value(engine: str, precision: str, parallel: dict[str, int]) -> None:
    version, accepted = ACCEPTED[engine]
    assert VERSIONS[engine] == version
    cache = "fp16" if precision == "fp16" else None
    for name, value in options(engine, parallel=parallel, precision=precision, kv_cache_precision=cache).items():
        kind = accepted[name]
        if isinstance(kind, frozenset):
            assert value in kind, name
        elif kind == NUMBER:
            assert value is not None and float(value) > 0.0, name
        else:
            assert (value is None) == (kind == SWITCH), name


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
@pytest.mark.parametrize("engine", ACCEPTED)
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
