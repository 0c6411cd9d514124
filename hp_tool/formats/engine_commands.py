"""Read the command that starts a vLLM, SGLang or TensorRT-LLM server."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool import catalog
from hp_tool.catalog.library import stored_precision
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.launch import Launch
from hp_tool.formats.megatron_names import config_file_settings, file_settings
from hp_tool.formats.reading import (
    Ignored,
    Read,
    Reading,
    Setting,
    describe_unknown_parts,
    hyphenated,
    look_up,
    parse_flags,
    parse_fraction,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.shell import Script
from hp_tool.formats.source import Source
from hp_tool.formats.writing import DTYPES

_OPTIONS_BY_SHORT_NAME = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "ep": "expert-parallel-size",
}
_QUERY_NAMES = {
    f"{short}{end}": name for short, name in _OPTIONS_BY_SHORT_NAME.items() for end in ("", "-size")
} | {"context-length": "max-model-len"}
_QUERY_NAMES_BY_ENGINE = {
    "trtllm": {
        "tensor-parallel-size": "tensor-parallel-size",
        "moe-expert-parallel-size": "expert-parallel-size",
        "max-batch-size": "max-num-seqs",
        "max-num-tokens": "max-num-batched-tokens",
        "max-seq-len": "max-model-len",
        "kv-cache-config.dtype": "kv-cache-dtype",
        **dict.fromkeys(
            (
                "kv-cache-free-gpu-memory-fraction",
                "free-gpu-memory-fraction",
                "kv-cache-config.free-gpu-memory-fraction",
            ),
            "gpu-memory-utilization",
        ),
    }
}
"""Query fields by option, for the options of each engine that differ from vLLM's."""
_SIZE_FIELDS = {
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
_PRECISIONS = {theirs: ours for ours, theirs in DTYPES.items()} | {"half": "fp16", "float": "fp32"}
_QUANTIZATIONS = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "modelopt": "fp8",
    "modelopt_fp4": "nvfp4",
    "awq": "int4",
    "gptq": "int4",
    "w8a8_int8": "int8",
}
_CACHE_PRECISIONS = {
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def command_reader(engine: str) -> Callable[[Source, Reading], None]:
    """Return the function that reads the server commands of an engine."""

    def read_engine_command(source: Source, reading: Reading) -> None:
        if engine == "trtllm" and source.mapping is not None:
            _read_options_file(source, reading)
            return
        launch, script = source.launch(reading)
        words, model = list(launch.words), None
        if engine == "trtllm" and words and words[0].text == "serve":
            words.pop(0)
        if engine != "sglang" and words and not words[0].text.startswith("-"):
            first = words.pop(0)
            model = None if first.unknown else first.text
            if first.unknown:
                reading.add_missing(
                    "model",
                    f"the model is {describe_unknown_parts(first.unknown)}; add",
                    example="NAME",
                )
        if reading.num_gpus != source.num_gpus and "torchrun" not in launch.launchers:
            reading.num_gpus = source.num_gpus  # srun starts a single server.
        arguments = table(engine)
        settings = parse_flags(words, table=arguments, reading=reading)
        settings = [
            replace(setting, name=_expand_abbreviation(setting.name, arguments))
            for setting in settings
        ]
        settings = [
            replace(setting, name="config") if setting.name == "extra-llm-api-options" else setting
            for setting in settings
        ]
        options = [setting for setting in settings if setting.name != "config"]
        if source.is_pool:
            options = _drop_transfer_options(options, reading)
        read_command(
            [
                *_environment_settings(source, launch, engine=engine),
                *_config_file_settings(settings, script, reading, engine=engine),
                *options,
            ],
            engine=engine,
            model=model,
            reading=reading,
            source=source,
        )

    return read_engine_command


_VARIABLE_PREFIXES = {
    "vllm": ("VLLM_",),
    "sglang": ("SGLANG_", "SGL_"),
    "trtllm": ("TRTLLM_", "TLLM_"),
}
"""Prefixes of the environment variables of each engine."""
_TRANSFER_OPTIONS = ("kv-transfer-config", "disaggregation-")
"""Options for KV cache transfer between pools. A query with pools implies them."""


def _environment_settings(source: Source, launch: Launch, *, engine: str) -> list[Setting]:
    """Return the engine's environment variables, from the container and the script, as settings."""
    prefixes = _VARIABLE_PREFIXES[engine]
    exported = [
        Setting(
            name=hyphenated(name),
            written=name,
            values=(word.text,),
            unknown=word.unknown,
            line=word.line,
        )
        for name, word in launch.environment.items()
        if name.startswith(prefixes) and name not in source.environment
    ]
    of_container = [
        Setting(name=hyphenated(name), written=name, values=(value,))
        for name, value in source.environment.items()
        if name.startswith(prefixes)
    ]
    return (
        exported
        + of_container
        + [
            Setting(name=hyphenated(name), written=name, unknown=(f"${name}",))
            for name in source.unset
            if name.startswith(prefixes)
        ]
    )


def _drop_transfer_options(settings: Iterable[Setting], reading: Reading) -> list[Setting]:
    """Return the settings without those that connect the pools."""
    remaining = []
    for setting in settings:
        if setting.name.startswith(_TRANSFER_OPTIONS):
            reading.ignore(setting, "connects the prefill and decoding pools")
        else:
            remaining.append(setting)
    return remaining


_HARMLESS_OVERRIDES = re.compile(
    r"(text_config\.)?(num_nextn_predict_layers$|max_position_embeddings$|rope_)"
)
"""Keys of --hf-overrides that extend the context or add draft layers. Other options determine their
cost.
"""


def _drop_harmless_overrides(settings: Iterable[Setting], reading: Reading) -> list[Setting]:
    """Return the settings without overrides of config.json that affect neither speed nor memory."""
    remaining = []
    for setting in settings:
        named = setting.name in ("hf-overrides", "json-model-override-args")
        keys = _override_keys(setting.text) if named else []
        if keys and all(_HARMLESS_OVERRIDES.match(key) for key in keys):
            reading.ignore(setting, f"{', '.join(keys)}: no effect on speed or memory")
        else:
            remaining.append(setting)
    return remaining


def _override_keys(text: str) -> list[str]:
    """Return the dotted keys of a JSON mapping, up to two levels deep."""
    try:
        content = json.loads(text)
    except ValueError:
        return []
    if not isinstance(content, dict):
        return []
    inner = content.pop("text_config", {})
    return [*content, *(f"text_config.{key}" for key in inner)] if isinstance(inner, dict) else []


def _expand_abbreviation(name: str, arguments: Mapping[str, Any]) -> str:
    """Expand an abbreviated option as argparse does; return `name` if it is not a unique prefix."""
    if name in arguments or "." in name or len(name) < MIN_ABBREVIATION:
        return name
    matching = [each for each in arguments if each.startswith(name)]
    return matching[0] if len(matching) == 1 else name


MIN_ABBREVIATION = 6
"""Minimum length of an abbreviated option."""


def _read_options_file(source: Source, reading: Reading) -> None:
    """Fill the reading from a TensorRT-LLM options file that comes without its command.

    The model and the number of ranks are missing, because the command would set them.
    """
    content = source.keys(reading)
    settings = _options_from_keys(file_settings(content, text=source.text), engine="trtllm")
    names = {setting.name for setting in settings}
    if not names & {"tensor-parallel-size", "tp-size"}:
        size = "attention_data" if "enable-attention-dp" in names else "tensor"
        why = "this file does not set it, only the command's --tp_size does; add"
        reading.add_missing(f"parallel.{size}_parallel_size", why, example=8)
    read_command(settings, engine="trtllm", model=None, reading=reading, source=source)
    for missing_field in reading.missing:
        reading.query["parallel"].pop(missing_field.field.removeprefix("parallel."), None)


def _config_file_settings(
    words: list[Setting], script: Script, reading: Reading, *, engine: str
) -> list[Setting]:
    """Return the options in the file that --config names."""
    return _options_from_keys(config_file_settings(words, script, reading), engine=engine)


def _options_from_keys(settings: Iterable[Setting], *, engine: str) -> list[Setting]:
    """Return the keys of a configuration file as command options, without switches that are off."""
    options = []
    for setting in settings:
        argument = look_up(setting.name, table(engine))
        if argument is None or argument.arity != "0":
            options.append(setting)
        elif setting.values != ("false",):
            options.append(replace(setting, values=()))
    return options


def read_command(
    settings: Iterable[Setting], *, engine: str, model: str | None, reading: Reading, source: Source
) -> None:
    """Fill the reading with the query of a server command.

    `model` is the positional argument of `vllm serve`. The number of GPUs is that of one replica.
    """
    settings = _drop_harmless_overrides(settings, reading)
    by_name = sort_settings(settings, table=table(engine), reading=reading, spare=source.ignore)
    names = _QUERY_NAMES | _QUERY_NAMES_BY_ENGINE.get(engine, {})
    flags = {
        names.get(name, name): list(each.values)
        for name, each in by_name.items()
        if not each.unknown
    }
    sizes_known = not any(
        missing_field.field.startswith("parallel.") for missing_field in reading.missing
    )
    parallel = {
        field: _parse_number(flags, name) for name, field in _SIZE_FIELDS.items() if name in flags
    }
    model = model or next(
        (flags[name][0] for name in ("model", "model-path") if flags.get(name)), None
    )
    served = (flags.get("served-model-name") or [""])[0]
    if model is not None and model.startswith("/") and catalog.has_entry("models", served):
        reading.ignored.append(
            Ignored(
                flag=model,
                reason=f"a folder; its model is assumed to be {served} (--served-model-name)",
            )
        )
        model = served
    groups, t = (
        parallel.get("attention_data_parallel_size", 1),
        parallel.get("tensor_parallel_size", 1),
    )
    replicas = 1
    if engine == "sglang" and groups > 1:
        # --tp counts all ranks, and limits apply to all attention groups together.
        if "enable-dp-attention" in flags:
            parallel["tensor_parallel_size"] = t = max(t // groups, 1)
            for name in ("max_num_seqs", "max_num_batched_tokens"):
                if name in parallel:
                    parallel[name] = max(parallel[name] // groups, 1)
        else:
            replicas = parallel.pop("attention_data_parallel_size")
    elif groups > 1 and model is not None and source.num_experts_of(model) is None:
        replicas = parallel.pop("attention_data_parallel_size")
    if engine == "trtllm" and "enable-attention-dp" in flags:  # Each rank has its own attention.
        parallel |= {"attention_data_parallel_size": t, "tensor_parallel_size": 1}
        groups, t = t, 1
    if "enable-expert-parallel" in flags:
        parallel["expert_parallel_size"] = t * parallel.get("attention_data_parallel_size", 1)
    deepep = (
        flags.get("moe-a2a-backend") == ["deepep"]
        or "enable-deepep-moe" in flags
        or "enable-ep-moe" in flags
    )
    if engine == "sglang" and deepep:  # DeepEP shards the experts across all ranks.
        parallel["expert_parallel_size"] = t * parallel.get("attention_data_parallel_size", 1)
    slots = flags.get("moe-config.load-balancer.num-slots")
    experts = None if slots is None or model is None else source.num_experts_of(model)
    if slots is not None and experts is not None:
        parallel["redundant_experts"] = parse_whole_number(slots[0], "num_slots") - experts
    if "eplb-config" in flags and (copies := _redundant_experts(flags["eplb-config"])):
        parallel["redundant_experts"] = copies
    devices = (
        t
        * parallel.get("pipeline_parallel_size", 1)
        * parallel.get("attention_data_parallel_size", 1)
        * replicas
    )
    inference: dict[str, Any] = {"engine": engine, **_read_precisions(flags)}
    published = "bf16" if model is None else source.precision_of(model)
    narrow = stored_precision(model) if model is not None and published == "bf16" else published
    if "quantization" not in flags and narrow not in (None, "bf16"):
        inference["precision"] = narrow
        reading.read.append(
            Read(flag="checkpoint", value=str(model), line=None, field="inference.precision")
        )
    stated = _STATED_MODEL.search(source.text) if model is None else None
    if stated is not None and "quantization" not in flags:
        inference["precision"] = stated[1]
        reading.read.append(
            Read(flag="MODEL", value=stated[1], line=None, field="inference.precision")
        )
    if flags.keys() & {"enable-dbo", "enable-two-batch-overlap"}:
        inference["two_batch_overlap"] = True
    if (speculative := _read_speculation(flags, source, reading)) is not None:
        inference["speculative"] = speculative
    query: dict[str, Any] = {"kind": "inference", "inference": inference, "parallel": parallel}
    if model is not None:
        query["model"] = model
    reading.num_gpus = reading.num_gpus or (devices if sizes_known else None)
    longest = _read_longest(flags)
    if longest is not None:
        inference["max_model_len"] = longest
        if model is not None:
            name = next(name for name in _LENGTH_OPTIONS if name in by_name)
            _check_longest(name, longest, model=model, positions=source.positions_of(model))
    bound = f" (at most {longest} together)" if longest is not None else ""
    for name, example in (("input_length", 4000), ("output_length", 1000)):
        reading.add_missing(
            f"inference.{name}",
            f"a server command does not set the load{bound}; add",
            example=example,
        )
    used = flags.get("gpu-memory-utilization") or flags.get("mem-fraction-static")
    if used:
        inference["memory_fraction"] = parse_fraction(used[0], "memory fraction")
    reading.query = query


_STATED_MODEL = re.compile(r"set MODEL to the checkpoint in (\w+):")
"""Matches the comment in an exported script that gives the precision of the user's own checkpoint.
"""
_LENGTH_OPTIONS = ("max-model-len", "context-length", "max-seq-len")
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
"""Unit suffixes of vLLM's lengths (`human_readable_int` of vllm/engine/arg_utils.py)."""


def _read_longest(flags: Mapping[str, list[str]]) -> int | None:
    """Return the maximum request length in tokens; None if the engine chooses it.

    Raises:
        InputError: The value is not a number of tokens.
    """
    words = flags.get("max-model-len")
    if not words or words in (["auto"], ["-1"], ["None"]):
        return None
    number = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([kKmM]?)", " ".join(words))
    if number is None:
        raise InputError(
            f"--max-model-len must be a number of tokens, got {' '.join(words)[:40]}",
            field="--max-model-len",
        )
    return int(float(number[1]) * _SUFFIXES[number[2]])


def _check_longest(name: str, longest: int, *, model: str, positions: int | None) -> None:
    """Check that the maximum request length does not exceed the model's context length.

    Raises:
        InputError: The request length is too large; the server would not start.
    """
    if positions is not None and longest > positions:
        raise InputError(
            f"--{name} {longest} exceeds the {positions:,} positions of {model} "
            "(max_position_embeddings), so the server would not start; lower it, or "
            "pass the config.json with the RoPE scaling in use",
            field=f"--{name}",
        )


def _read_speculation(
    flags: Mapping[str, list[str]], source: Source, reading: Reading
) -> dict[str, Any] | None:
    """Return the draft method and the number of drafted tokens.

    The acceptance rate and the cost of drafting depend on the load, so the command does not contain
    them.
    """
    words = flags.get("speculative-config") or flags.get("sc")
    config: dict[str, Any] = {}
    if words:
        try:
            config = json.loads(" ".join(words))
        except ValueError:
            raise InputError(
                "--speculative-config must be a JSON mapping", field="--speculative-config"
            ) from None
    config |= {
        name.partition(".")[2].replace("-", "_"): values[0]
        for name, values in flags.items()
        if name.startswith("speculative-config.") and values
    }
    method = str(config.get("method", "")) or (flags.get("speculative-algorithm") or [""])[0]
    draft = config.get("model") or next(
        (flags[name][0] for name in _DRAFT_OPTIONS if flags.get(name)), None
    )
    steps = config.get("num_speculative_tokens") or next(
        (flags[name][0] for name in _STEP_OPTIONS if flags.get(name)), None
    )
    if not (method or draft or steps):
        return None
    if (flags.get("speculative-eagle-topk") or ["1"]) != ["1"]:
        reading.refuse(
            "--speculative-eagle-topk: trees of drafts are not supported; set 1 for a chain"
        )
    for name in config.keys() - {"method", "model", "num_speculative_tokens"} - _IGNORED_DRAFT_KEYS:
        reading.refuse(f"--speculative-config.{name}: not supported")
    if steps is None and "speculative-num-draft-tokens" in flags:
        steps = (
            _parse_number(flags, "speculative-num-draft-tokens") - 1
        )  # The number includes the last accepted token.
    if steps is None:
        reading.add_missing(
            "inference.speculative.num_speculative_tokens",
            "the command leaves it to the engine's default; add",
            example=3,
        )
    path = "inference.speculative"
    reading.add_missing(f"{path}.acceptance_rate", "it depends on the load; add", example=0.7)
    if "ngram" not in method.lower():
        reading.add_missing(
            f"{path}.draft_cost_fraction",
            "the time of one draft relative to one pass of the model; add",
            example=0.05,
        )
    count = {} if steps is None else {"num_speculative_tokens": parse_whole_number(steps, path)}
    return count | ({} if draft is None or str(draft) == "none" else {"draft_model": str(draft)})


_DRAFT_OPTIONS = ("speculative-model", "speculative-draft-model-path", "speculative-draft-model")
_STEP_OPTIONS = ("num-speculative-tokens", "speculative-num-steps")
_IGNORED_DRAFT_KEYS = {
    "attention_backend",
    "moe_backend",
    "quantization",
    "draft_tensor_parallel_size",
    "max_model_len",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "revision",
    "use_local_argmax_reduction",
    "enforce_eager",
}
"""Keys of vLLM's SpeculativeConfig that do not change the number of drafted tokens."""


def _parse_number(flags: Mapping[str, list[str]], name: str) -> int:
    words = flags[name]
    if len(words) != 1 or not words[0].isdecimal():
        raise InputError(f"--{name} must be a whole number", field=f"--{name}")
    return parse_whole_number(words[0], f"--{name}")


def _redundant_experts(words: list[str]) -> int:
    try:
        count = json.loads(" ".join(words)).get("num_redundant_experts", 0)
    except (ValueError, AttributeError):
        raise InputError("--eplb-config must be a JSON mapping", field="--eplb-config") from None
    return parse_whole_number(count, "--eplb-config")


def _read_precisions(flags: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the precisions of weights and KV cache that the command sets.

    For a quantised checkpoint, the command sets no weight precision: the checkpoint determines it.
    """

    def map_precision(name: str, values: Mapping[str, str]) -> str | None:
        word = (flags.get(name) or ["auto"])[0]
        if word != "auto" and word not in values:
            raise UnsupportedError(
                f"--{name} {word} is not supported; supported: {', '.join(values)}",
                field=f"--{name}",
            )
        return values.get(word)

    precision = map_precision("quantization", _QUANTIZATIONS) or map_precision("dtype", _PRECISIONS)
    number_formats = {
        "precision": precision,
        "kv_cache_precision": map_precision("kv-cache-dtype", _CACHE_PRECISIONS),
    }
    return {name: word for name, word in number_formats.items() if word is not None}
