"""`vllm serve` and sglang.launch_server as queries of kind inference: one replica of what the command starts."""

from collections.abc import Iterable, Mapping
from typing import Any

from hp_tool.formats.reading import Read, Reading, Setting, sort, table, whole_number

_SHARE = {"vllm": 0.9, "sglang": 0.88}
_TYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "auto": "bf16"}
_QUANTIZED = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "awq_marlin": "int4", "gptq_marlin": "int4", "modelopt_fp4": "nvfp4",
              "w8a8_int8": "int8", "w8a8_fp8": "fp8", "compressed-tensors": ""}  # fmt: skip
_CACHE = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "bf16": "bf16"}


def read(words: Iterable[Setting], *, engine: str, model: str | None, reading: Reading, spare: Iterable[str] = ()) -> None:
    """Fill `reading` with the query of a serving command; `model` stands before the options of `vllm serve`."""
    found = sort(words, table=table(engine), reading=reading, spare=spare)

    def given(*names: str) -> str | None:
        setting = next((found[name] for name in names if name in found), None)
        if setting is not None and setting.unknown:
            field = table(engine)[setting.name].why
            reading.lack(
                field, f"{setting.written} is {', '.join(setting.unknown)}, which nothing sets here; add --set {field}=..."
            )
            return None
        return None if setting is None else " ".join(setting.values)

    def size(*names: str) -> int:
        return whole_number(given(*names) or 1, f"--{names[0]}")

    ranks, stages, groups = (
        size("tensor-parallel-size", "tp", "tp-size"),
        size("pipeline-parallel-size", "pp", "pp-size"),
        size("data-parallel-size", "dp", "dp-size"),
    )
    experts = size("ep-size", "ep", "expert-parallel-size")
    parallel: dict[str, Any] = {"pipeline_parallel_size": stages}
    replicas = 1
    if engine == "sglang":  # TP counts all ranks; without attention data parallelism --dp-size starts replicas
        attention = groups if "enable-dp-attention" in found else 1
        replicas = groups if attention == 1 else 1
        tensor, whole = max(ranks // attention, 1), ranks
        if "enable-ep-moe" in found:
            experts = ranks
    else:
        attention = groups if "enable-expert-parallel" in found else 1
        replicas = groups if attention == 1 else 1
        tensor, whole = ranks, ranks * attention
        experts = whole if "enable-expert-parallel" in found else 1
    parallel |= {"tensor_parallel_size": tensor, "attention_data_parallel_size": attention, "expert_parallel_size": experts}
    for field, names in (
        ("max_num_seqs", ("max-num-seqs", "max-running-requests")),
        ("max_num_batched_tokens", ("max-num-batched-tokens", "chunked-prefill-size")),
    ):
        if (value := given(*names)) is not None:
            parallel[field] = max(whole_number(value, f"--{names[0]}") // (attention if engine == "sglang" else 1), 1)
    inference: dict[str, Any] = {"engine": engine, "precision": _precision(given("dtype"), given("quantization", "q"), reading)}
    cache = given("kv-cache-dtype")
    if cache is not None and cache not in _CACHE:
        reading.refused.append(f"--kv-cache-dtype {cache}: is not modelled")
    elif cache is not None and _CACHE[cache]:
        inference["kv_cache_precision"] = _CACHE[cache]
    name = model or given("model", "model-path")
    reading.query = {"kind": "inference", "inference": inference, "parallel": parallel}
    if name:
        reading.query["model"] = name
        if model:
            reading.read.append(Read(flag="MODEL", value=model, line=None, field="model"))
    share = given("gpu-memory-utilization", "mem-fraction-static")
    if share is not None:
        reading.query["constraints"] = {"memory_headroom_fraction": round(max(1.0 - float(share), 0.0), 6)}
    longest = given("max-model-len", "context-length")
    bound = f" (at most {longest} together)" if longest else ""
    for field, example in (("input_length", 2048), ("output_length", 256)):
        reading.lack(f"inference.{field}", f"a command does not say its load{bound}; add --set inference.{field}={example}")
    reading.num_gpus = reading.num_gpus or whole * stages * replicas


def _precision(kind: str | None, quantization: str | None, reading: Reading) -> str:
    if quantization is not None and quantization != "None":
        if _QUANTIZED.get(quantization):
            return _QUANTIZED[quantization]
        reading.lack(
            "inference.precision", f"--quantization {quantization}: say what the weights are, as --set inference.precision=fp8"
        )
    return _TYPES.get(kind or "auto", "bf16")


def settings(values: Mapping[str, Any]) -> list[Setting]:
    """Options as a mapping, as settings."""
    return [
        Setting(name=name, written=f"--{name}", values=() if value is True else (str(value),)) for name, value in values.items()
    ]
