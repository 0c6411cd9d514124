"""Read Accelerate's configuration file and the equivalent options of `accelerate launch`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_tool.formats.launch import SWITCHES
from hp_tool.formats.reading import (
    Read,
    Reading,
    Setting,
    as_settings,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.trainer import arguments

_KINDS = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM"}
EXCHANGES = {"p2p": "alltoall", "all_gather": "allgather"}
"""Context-parallel communication: torch rotates keys and values by all-to-all, or all-gathers them
(default).
"""
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""FSDP 1 sharding strategies. Files may also give their position in this list, from 1."""
_SECTIONS = {
    "fsdp_": "fsdp_config",
    "parallelism_config_": "parallelism_config",
    **dict.fromkeys(
        ("zero", "offload_", "gradient_accumulation", "deepspeed_"), "deepspeed_config"
    ),
}
"""Prefixes of `accelerate launch` options, and the corresponding file sections."""


def read_accelerate(
    content: Mapping[str, Any],
    *,
    text: str,
    reading: Reading,
    words: Sequence[Setting] = (),
    spare: Iterable[str] = (),
) -> None:
    """Fill the reading with the query of Accelerate's file.

    The script's arguments set the batch size.
    """
    reading.tool = "accelerate"
    if reading.num_gpus is None and str(content.get("num_processes", "")).isdecimal():
        reading.num_gpus = parse_whole_number(content["num_processes"], "num_processes")
    kind = str(content.get("distributed_type", "MULTI_GPU"))
    leaves = {setting.name: setting for setting in as_settings(content, lines=text)}
    if kind not in ("FSDP", "DEEPSPEED", "MULTI_GPU", "NO"):
        reading.refused.append(
            f"distributed_type {kind} is not supported; supported: FSDP, DEEPSPEED, MULTI_GPU"
        )
    settings = [
        *words,
        Setting(
            name="zero-stage", written="distributed_type", values=(_read_zero_stage(kind, leaves),)
        ),
    ]
    precision = _leaf_value(leaves, "mixed-precision", "no")
    if precision not in ("no", "bf16", "fp16", "fp8") and not leaves["mixed-precision"].unknown:
        reading.refuse(
            f"mixed_precision {precision} is not supported; supported: no, bf16, fp16, fp8"
        )
    if precision in ("bf16", "fp16", "fp8"):
        settings.append(
            Setting(name="fp16" if precision == "fp16" else "bf16", written="mixed_precision")
        )
    for name in ("dynamo-backend", "dynamo-config.dynamo-backend"):
        if _leaf_value(leaves, name, "no").lower() not in ("no", "none", "eager"):
            settings.append(replace(leaves[name], name="torch-compile", values=("true",)))
    checkpointed = (
        _leaf_value(leaves, "fsdp-config.fsdp-activation-checkpointing", "false") == "true"
    )
    steps = leaves.pop("deepspeed-config.gradient-accumulation-steps", None)
    if steps is not None and steps.unknown:
        reading.add_unknown_value(steps, "training.global_batch_size")
    elif steps is not None and steps.values != ("auto",):
        settings.append(replace(steps, name="gradient-accumulation-steps"))
    leaves = sort_settings(leaves.values(), table=table("accelerate"), reading=reading, spare=spare)
    degrees = _read_degrees(leaves, reading) if kind == "FSDP" else {}
    replicas = (reading.num_gpus or 0) // math.prod(
        size for size in degrees.values() if isinstance(size, int)
    )
    arguments.read_arguments(None, words=settings, reading=reading, num_gpus=replicas, spare=spare)
    training, parallel = reading.query["training"], reading.query["parallel"]
    if precision == "fp8":
        training["precision"] = "fp8"
    if kind == "FSDP":
        # Without arguments, the trainer is unknown. The Trainer itself does not shard tensors.
        trained = bool(words) and replicas == (reading.num_gpus or 0)
        training["framework"] = "hf-trainer" if trained else "torch-fsdp"
        if trained and parallel["zero_stage"]:
            arguments.add_fsdp_precision(training, words)
        checkpointed = checkpointed or parallel["recompute"] == "full"
        every_layer = "full" if trained else "per_layer"
        parallel["recompute"] = every_layer if checkpointed else "none"
        parallel |= degrees
        # transformers' TP plans shard only weight matrices.
        if parallel["tensor_parallel_size"] > 1:
            parallel["sequence_parallel"] = False
        shard = parse_whole_number(
            _leaf_value(leaves, "parallelism-config.parallelism-config-dp-shard-size", "0"),
            "dp_shard_size",
        )
        copies = parse_whole_number(
            _leaf_value(leaves, "parallelism-config.parallelism-config-dp-replicate-size", "1"),
            "dp_replicate_size",
        )
        if copies > 1:
            parallel["data_parallel_shard_size"] = shard
        _read_shard_groups(leaves, parallel=parallel, reading=reading)
    if (
        device := _leaf_value(leaves, "deepspeed-config.offload-optimizer-device", "none")
    ) != "none":
        training["offload"] = "optimizer"
        if device != "cpu":
            reading.refuse(f"offload_optimizer_device {device} is not supported; supported: cpu")
    names = {setting.name for setting in settings}
    for name, field in (
        ("per-device-train-batch-size", "parallel.micro_batch_size"),
        ("gradient-accumulation-steps", "training.global_batch_size"),
    ):
        # The Trainer, which requires output_dir, has defaults for both.
        if names.isdisjoint((name, "train-batch-size", "output-dir")):
            reading.add_missing(
                field,
                f"it is set by the script's --{name.replace('-', '_')}, not by this file; add",
                example="...",
            )
    if all(read_setting.field != "cluster.num_gpus" for read_setting in reading.read):
        reading.read.append(
            Read(
                flag="num_processes",
                value=_leaf_value(leaves, "num-processes", ""),
                line=None,
                field="cluster.num_gpus",
            )
        )


def _read_degrees(leaves: Mapping[str, Setting], reading: Reading) -> dict[str, Any]:
    """Return the tensor- and context-parallel sizes, and the context-parallel communication."""
    names = {"tensor_parallel_size": "tp-size", "context_parallel_size": "cp-size"}
    sizes: dict[str, Any] = {
        field: parse_whole_number(
            _leaf_value(leaves, f"parallelism-config.parallelism-config-{key}", "1"), key
        )
        for field, key in names.items()
    }
    if sizes["context_parallel_size"] > 1:
        word = _leaf_value(
            leaves, "parallelism-config.parallelism-config-cp-comm-strategy", "allgather"
        )
        if word not in EXCHANGES.values():
            reading.refuse(
                f"parallelism_config_cp_comm_strategy {word} is not supported; supported: "
                f"{', '.join(EXCHANGES.values())}"
            )
        sizes["context_parallel_communication"] = next(
            (exchange for exchange, name in EXCHANGES.items() if name == word), "p2p"
        )
    return sizes


def _read_zero_stage(kind: str, leaves: Mapping[str, Setting]) -> str:
    if kind == "DEEPSPEED":
        return _leaf_value(leaves, "deepspeed-config.zero-stage", "2")
    if kind != "FSDP":
        return "0"
    if _leaf_value(leaves, "fsdp-config.fsdp-version", "1") == "2":
        resharded = _leaf_value(
            leaves, "fsdp-config.fsdp-reshard-after-forward", "true"
        ).upper() in (
            "TRUE",
            "FULL_SHARD",
        )
        return "3" if resharded else "2"
    return {"SHARD_GRAD_OP": "2", "NO_SHARD": "0"}.get(_sharding_strategy(leaves), "3")


def _sharding_strategy(leaves: Mapping[str, Setting]) -> str:
    """Return the sharding strategy of FSDP 1."""
    names = (
        _leaf_value(leaves, f"fsdp-config.fsdp-{name}", "").upper()
        for name in ("sharding-strategy", "reshard-after-forward")
    )
    word = next((name for name in names if name not in ("", "TRUE", "FALSE")), _STRATEGIES[0])
    return _STRATEGIES[int(word) - 1] if word in ("1", "2", "3", "4", "5") else word


def _read_shard_groups(
    leaves: Mapping[str, Setting], *, parallel: dict[str, Any], reading: Reading
) -> None:
    """Record the shard group size if FSDP 1 shards only within each node (HYBRID_SHARD)."""
    strategy = _sharding_strategy(leaves)
    if _leaf_value(leaves, "fsdp-config.fsdp-version", "1") == "2" or strategy in _STRATEGIES[:3]:
        return
    if strategy != "HYBRID_SHARD":
        reading.refuse(
            f"fsdp_sharding_strategy {strategy} is not supported; supported: "
            f"{', '.join(_STRATEGIES[:4])}"
        )
        return
    nodes = parse_whole_number(_leaf_value(leaves, "num-machines", "0"), "num_machines")
    if reading.num_gpus is None or not nodes:
        reading.add_missing(
            "parallel.data_parallel_shard_size",
            "HYBRID_SHARD shards within a node; add",
            example="8",
        )
    elif nodes > 1:
        parallel["data_parallel_shard_size"] = reading.num_gpus // nodes


def trainer_fsdp(words: str, reading: Reading) -> dict[str, Any]:
    """Return the Trainer's --fsdp, such as "full_shard auto_wrap", as Accelerate settings."""
    parts = words.lower().split()
    strategies = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
    if not set(parts).intersection(strategies):
        reading.refuse(f"--fsdp {words} names no strategy; choose one of: {', '.join(strategies)}")
    if "offload" in parts:
        reading.refuse(f"--fsdp {words}: weight offload is not supported")
    if "hybrid_shard_zero2" in parts:
        reading.refuse(f"--fsdp {words}: ZeRO 2 within groups of replicas is not supported")
    return {
        "fsdp_sharding_strategy": next(
            (part.upper() for part in parts if part in strategies), "FULL_SHARD"
        )
    }


def launch_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `accelerate launch` as content of its configuration file."""
    content: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            break
        if word in ("-m", "--module"):  # The script's arguments follow.
            break
        name, separator, value = word.lstrip("-").replace("-", "_").partition("=")
        value = (
            word.partition("=")[2]
            if separator
            else "true"
            if name.replace("_", "-") in SWITCHES
            else next(rest, "")
        )
        section = next((each for start, each in _SECTIONS.items() if name.startswith(start)), None)
        if name in _KINDS:
            content["distributed_type"] = _KINDS[name]
        elif section is not None:
            content.setdefault(section, {})[name] = (
                value.lower() if value.lower() in ("true", "false") else value
            )
        elif name in ("mixed_precision", "num_processes", "num_machines"):
            content[name] = value
    return content if content.keys() - {"num_processes", "num_machines"} else {}


def _leaf_value(leaves: Mapping[str, Setting], name: str, default: str) -> str:
    setting = leaves.get(name)
    return setting.text if setting is not None and setting.values else default
