"""A command that starts vLLM or SGLang, as a query: what formats.engines writes, and the engines' own short names."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats import shell

_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "ep": "expert-parallel-size",
}
_NAMES = {f"{short}{end}": name for short, name in _SHORT.items() for end in ("", "-size")} | {
    "context-length": "max-model-len"
}
_SIZES = {
    "tensor-parallel-size": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size",
    "data-parallel-size": "attention_data_parallel_size",
    "expert-parallel-size": "expert_parallel_size",
    "max-num-seqs": "max_num_seqs",
    "max-running-requests": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "chunked-prefill-size": "max_num_batched_tokens",
    "ep-num-redundant-experts": "redundant_experts",
    "num-redundant-experts": "redundant_experts",
}
_PRECISIONS = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float": "fp32", "float32": "fp32"}
_QUANTIZED = {"fp8": "fp8", "mxfp4": "mxfp4", "modelopt_fp4": "nvfp4", "awq": "int4", "gptq": "int4", "w8a8_int8": "int8"}
_CACHES = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bf16": "bf16", "bfloat16": "bf16"}
_READ_ELSEWHERE = {
    "model", "model-path", "dtype", "quantization", "kv-cache-dtype", "gpu-memory-utilization", "mem-fraction-static",
    "enable-expert-parallel", "enable-dp-attention", "eplb-config", "enable-dbo", "enable-two-batch-overlap",
}  # fmt: skip
_IGNORED = {
    "host", "port", "api-key", "served-model-name", "trust-remote-code", "tokenizer", "download-dir", "log-level", "seed",
    "max-model-len", "enable-eplb", "all2all-backend", "moe-a2a-backend", "deepep-mode", "nnodes", "node-rank",
    "dist-init-addr", "data-parallel-address", "data-parallel-rpc-port", "data-parallel-size-local",
    "data-parallel-start-rank", "headless", "load-format", "disable-log-requests", "enable-metrics", "reasoning-parser",
    "tool-call-parser", "enable-auto-tool-choice", "chat-template", "revision", "moe-dense-tp-size", "enable-dp-lm-head",
}  # fmt: skip
"""Names, addresses and logs; lengths, which are the load's; and backends, of which the cost model takes DeepEP's."""


def engine_of(text: str) -> str | None:
    """vllm or sglang where the text starts it."""
    if re.search(r"\bvllm\s+serve\b|vllm\.entrypoints\.", text):
        return "vllm"
    return "sglang" if "sglang.launch_server" in text else None


def read(text: str, *, engine: str, num_experts_of: Callable[[str], int | None]) -> dict[str, Any]:
    """The query of a command, without its load and GPU; `num_gpus` are those of one replica."""
    flags = {_NAMES.get(name, name): words for name, words in shell.flags(_long_names(text)).items()}
    _refuse_unknown(flags, engine=engine)
    parallel = {field: _number(flags, name) for name, field in _SIZES.items() if name in flags}
    model = _model(text, flags)
    groups, t = parallel.get("attention_data_parallel_size", 1), parallel.get("tensor_parallel_size", 1)
    replicas = 1
    if engine == "sglang" and groups > 1:
        if "enable-dp-attention" in flags:  # all ranks are TP's, and limits are those of all groups
            parallel["tensor_parallel_size"] = t = max(t // groups, 1)
            for name in ("max_num_seqs", "max_num_batched_tokens"):
                if name in parallel:
                    parallel[name] = max(parallel[name] // groups, 1)
        else:
            replicas = parallel.pop("attention_data_parallel_size")
    elif groups > 1 and model is not None and num_experts_of(model) is None:
        replicas = parallel.pop("attention_data_parallel_size")
    if "enable-expert-parallel" in flags:
        parallel["expert_parallel_size"] = t * parallel.get("attention_data_parallel_size", 1)
    if "eplb-config" in flags and (copies := _redundant(flags["eplb-config"])):
        parallel["redundant_experts"] = copies
    devices = t * parallel.get("pipeline_parallel_size", 1) * parallel.get("attention_data_parallel_size", 1) * replicas
    inference: dict[str, Any] = {"engine": engine, **_formats(flags)}
    if flags.keys() & {"enable-dbo", "enable-two-batch-overlap"}:
        inference["two_batch_overlap"] = True
    query: dict[str, Any] = {"kind": "inference", "inference": inference, "parallel": parallel, "num_gpus": devices}
    if model is not None:
        query["model"] = model
    used = flags.get("gpu-memory-utilization") or flags.get("mem-fraction-static")
    if used:
        query["constraints"] = {"memory_headroom_fraction": round(1.0 - float(used[0]), 6)}
    return query


def _long_names(text: str) -> str:
    """The text with vLLM's -tp and the like written out."""
    return re.sub(r"(?<!\S)-(tp|pp|dp)(?=[ =])", lambda found: f"--{_SHORT[found[1]]}", text)


def _refuse_unknown(flags: Mapping[str, list[str]], *, engine: str) -> None:
    for name in flags:
        if name not in _SIZES and name not in _READ_ELSEWHERE and name not in _IGNORED:
            raise UnsupportedError(
                f"--{name} of {engine} is not modelled; leave it out, or say what it does with --set", field=f"--{name}"
            )


def _number(flags: Mapping[str, list[str]], name: str) -> int:
    words = flags[name]
    if len(words) != 1 or not words[0].isdecimal():
        raise InputError(f"--{name} wants a whole number", field=f"--{name}")
    return int(words[0])


def _redundant(words: list[str]) -> int:
    try:
        found = json.loads(" ".join(words)).get("num_redundant_experts", 0)
    except (ValueError, AttributeError):
        raise InputError("--eplb-config wants a JSON mapping", field="--eplb-config") from None
    return int(found)


def _model(text: str, flags: Mapping[str, list[str]]) -> str | None:
    for name in ("model", "model-path"):
        if flags.get(name):
            return flags[name][0]
    words = shell.words(text)
    after = words[words.index("serve") + 1 :] if "serve" in words else []
    return after[0] if after and not after[0].startswith("-") else None


def _formats(flags: Mapping[str, list[str]]) -> dict[str, str]:
    """Precision and the cache's, where the command says them: a quantised checkpoint says by itself what it is."""

    def said(name: str, values: Mapping[str, str]) -> str | None:
        word = (flags.get(name) or ["auto"])[0]
        if word != "auto" and word not in values:
            raise UnsupportedError(f"--{name} {word} is not modelled; choose {', '.join(values)}", field=f"--{name}")
        return values.get(word)

    precision = said("quantization", _QUANTIZED) or said("dtype", _PRECISIONS)
    found = {"precision": precision, "kv_cache_precision": said("kv-cache-dtype", _CACHES)}
    return {name: word for name, word in found.items() if word is not None}
