"""Read ms-swift 3 and 4 commands: `swift sft` (Trainer) and `megatron sft` (Megatron Core)."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.formats.megatron_names import config_file_settings
from hp_tool.formats.reading import (
    Reading,
    Setting,
    parse_flags,
    parse_fraction,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.registry import Format, register
from hp_tool.formats.shell import Script
from hp_tool.formats.signs import Sign, matches_pattern
from hp_tool.formats.source import Source, find_file, parse_keys
from hp_tool.formats.tools.megatron_lm.arguments import TABLE
from hp_tool.formats.tools.megatron_lm.read import read_arguments
from hp_tool.formats.tools.megatron_lm.words import UNEVEN_STAGE_FLAGS
from hp_tool.formats.trainer.scripts import read_trainer_command

_ARGUMENTS = {
    "tuner-type": "finetuning-type",
    "train-type": "finetuning-type",
    "target-modules": "lora-target",
    "quant-bits": "quantization-bit",
    "quant-method": "quantization-method",
    "optimizer": "optim",
    **{
        name: name
        for name in (
            "model",
            "lora-rank",
            "lora-dropout",
            "max-length",
            "gradient-accumulation-steps",
            "attn-impl",
            "optim",
            "per-device-train-batch-size",
            "gradient-checkpointing",
            "packing",
            "deepspeed",
        )
    },
}
"""Trainer arguments that are equivalent to ms-swift's."""
_DEFAULTS = {
    "finetuning-type": "lora",
    "lora-dropout": "0.05",
    "gradient-checkpointing": "true",
    "per-device-train-batch-size": "1",
}
_MEGATRON_DEFAULTS = {
    "micro-batch-size": ("1",),
    "global-batch-size": ("16",),
    "recompute-granularity": ("selective",),
    "moe-grouped-gemm": (),
    "use-distributed-optimizer": (),
    "cross-entropy-loss-fusion": (),
    "moe-token-dispatcher-type": ("alltoall",),
    "expert-tensor-parallel-size": ("1",),
    "attention-dropout": ("0",),
    "hidden-dropout": ("0",),
}
"""Defaults of `megatron sft`, as Megatron's arguments. The checkpoint determines dropout."""
_RENAMED = {"virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank"}
_FILE_VARIABLES = "ENV."
"""Prefix of keys in an arguments file that set environment variables."""
_MAX_REFERENCES = 5
"""Maximum length of a chain of variable references in an assignment."""
_MIN_BATCH = 16
"""Minimum number of sequences per optimizer step with the default gradient accumulation."""


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of an ms-swift command.

    Raises:
        InputError: The script has no such command.
    """
    launch, script = source.launch(reading)
    arguments, words, file = table("ms-swift"), list(launch.words), []
    if words and words[0].text.endswith((".yaml", ".yml", ".json")):
        named = Setting(name="config", written=launch.program, values=(words.pop(0).text,))
        file = config_file_settings([named], script, reading)
    variables = {
        each.written.removeprefix(_FILE_VARIABLES): each.text
        for each in file
        if each.written.startswith(_FILE_VARIABLES)
    }
    file = [each for each in file if not each.written.startswith(_FILE_VARIABLES)]
    reading.num_gpus = reading.num_gpus or _count_processes(source, variables, reading)
    if launch.program.startswith("megatron"):
        switched = {
            name: replace(each, arity="?") if each.arity == "0" else each
            for name, each in table(TABLE).items()
        }
        settings = file + parse_flags(words, table={**switched, **arguments}, reading=reading)
        _read_megatron_command(settings, source, reading)
    else:
        settings = file + parse_flags(words, table=arguments, reading=reading)
        _read_trainer_command(settings, script, source, reading)


def _count_processes(source: Source, variables: Mapping[str, str], reading: Reading) -> int | None:
    """Return the number of processes that environment variables set; None if they do not.

    `variables` are those of an arguments file. The environment overrides them.
    """

    def variable_value(name: str, depth: int = 0) -> str:
        assigned = re.search(rf"(?<!\w){name}=['\"]?([^\s'\"\\;]+)", source.text)
        text = source.variables.get(name) or (assigned[1] if assigned else "")
        text = text or variables.get(name, "")
        reference = re.fullmatch(r"\$\{?(\w+)(?::?-([^}]*))?\}?", text)
        return (
            reference
            and depth < _MAX_REFERENCES
            and (variable_value(reference[1], depth + 1) or reference[2])
        ) or text

    counts = {name: variable_value(name) for name in ("NPROC_PER_NODE", "NNODES")}
    for name, text in counts.items():
        if text and not text.isdecimal():
            reading.add_missing(
                "cluster.num_gpus",
                f"{name} is {text}, not a number (set it with --var {name}=...); add",
                example="",
            )
            return None
    if counts["NPROC_PER_NODE"]:
        return int(counts["NPROC_PER_NODE"]) * int(counts["NNODES"] or 1)
    if variable_value("CUDA_VISIBLE_DEVICES").isdecimal():
        return 1
    reading.hints["cluster.num_gpus"] = (
        "NPROC_PER_NODE says it; without, one process spreads the layers over its devices"
    )
    return None


def _renamed_setting(name: str, *values: str, written: str = "") -> Setting:
    return Setting(
        name=name,
        written=written or f"{name.replace('-', '_')} (ms-swift's default)",
        values=values,
    )


def _read_trainer_command(
    settings: list[Setting], script: Script, source: Source, reading: Reading
) -> None:
    """Read a command that trains with Hugging Face's Trainer.

    The training uses DeepSpeed or FSDP if the command names them, and DDP otherwise.
    """
    words_ = [
        replace(setting, name=_ARGUMENTS[setting.name])
        for setting in settings
        if setting.name in _ARGUMENTS
    ]
    others = (setting for setting in settings if setting.name not in _ARGUMENTS)
    texts = {
        setting.name: setting.text
        for setting in sort_settings(
            others, table=table("ms-swift"), reading=reading, spare=source.ignore
        ).values()
    }
    texts_by_name = {word.name: word.text for word in words_}
    unknown = {word.name for word in words_ if word.unknown}
    words_ += [
        _renamed_setting(name, value)
        for name, value in _DEFAULTS.items()
        if name not in texts_by_name
    ]
    kind = texts_by_name.get("finetuning-type", "lora")
    if kind not in ("lora", "full") and "finetuning-type" not in unknown:
        reading.refuse(f"tuner_type {kind} is not supported; supported: lora, full")
    micro_name = "per-device-train-batch-size"
    micro_text = (
        reading.overridden_size("parallel.micro_batch_size")
        if micro_name in unknown
        else texts_by_name.get(micro_name, "1")
    )
    if "gradient-accumulation-steps" not in texts_by_name and reading.num_gpus and micro_text:
        micro = parse_whole_number(micro_text, "per_device_train_batch_size")
        words_.append(
            _renamed_setting(
                "gradient-accumulation-steps",
                str(max(1, math.ceil(_MIN_BATCH / (micro * reading.num_gpus)))),
            )
        )
    words_ += _precision_settings(texts, reading)
    if texts.get("use-liger-kernel") in ("", "true"):
        words_.append(_renamed_setting("use-liger-kernel", "true", written="use_liger_kernel"))
    dtype = texts.get("torch-dtype") or "bfloat16"  # Defaults to the checkpoint's dtype.
    words_.append(_renamed_setting("torch-dtype", dtype, written="torch_dtype"))
    fsdp = _read_fsdp_file(texts.get("fsdp"), script, reading)
    read_trainer_command(words_, script, source, reading, fsdp=fsdp)
    reading.tool = "ms-swift"


def _precision_settings(texts: Mapping[str, str], reading: Reading) -> Iterator[Setting]:
    """Yield the Trainer's precision arguments for torch_dtype, fp16 and bf16 (default: 16 bits)."""
    kinds = {"float16": "fp16", "float32": "", "bfloat16": "bf16", "": "bf16"}
    if (dtype := texts.get("torch-dtype", "")) not in kinds:
        reading.refuse(
            f"torch_dtype {dtype} is not supported; supported: bfloat16, float16, float32"
        )
    flag = next((name for name in ("fp16", "bf16") if texts.get(name, "false") == "true"), None)
    kind = flag if flag is not None else kinds.get(texts.get("torch-dtype", ""), "bf16")
    if kind:
        yield _renamed_setting(kind, "true", written="torch_dtype")


def _read_fsdp_file(name: str | None, script: Script, reading: Reading) -> dict[str, Any]:
    """Return the settings in the --fsdp file, as Accelerate's."""
    if name is None:
        return {}
    text = find_file(script.files, name)
    if text is None and name != "fsdp2":
        reading.add_missing(
            "parallel.zero_stage",
            f"{name}: file not found; pass it with --file {name}",
            example=None,
        )
        return {}
    file_settings = parse_keys(text).get("fsdp_config") if text is not None else None
    words = (
        file_settings
        if isinstance(file_settings, Mapping)
        else {"version": 2, "activation_checkpointing": True}
    )
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {f"fsdp_{key.removeprefix('fsdp_')}": each for key, each in words.items()},
    }


def _read_megatron_command(settings: list[Setting], source: Source, reading: Reading) -> None:
    """Read a command that trains with Megatron Core. The model's name determines its shape."""
    megatron, swift = table(TABLE), table("ms-swift")
    settings = [
        replace(setting, name=_RENAMED.get(setting.name, setting.name)) for setting in settings
    ]
    last = {setting.name: setting for setting in settings}
    read_separately = {
        "model",
        "max-length",
        "torch-dtype",
        "tuner-type",
        "train-type",
        "lora-rank",
        "lora-dropout",
        "target-modules",
    }
    passed: list[Setting] = []
    for setting in settings:
        argument = megatron.get(setting.name)
        if (
            setting.name in read_separately
            or argument is None
            or (argument.fate != "read" and setting.name in swift)
        ):
            continue
        if argument.arity == "0" and setting.text.lower() in ("true", "false"):
            passed += [replace(setting, values=())] if setting.text.lower() == "true" else []
        elif argument.arity == "0" and setting.text and not setting.unknown:
            reading.refuse(f"{setting.written} {setting.text}: must be true or false")
        elif setting.text != "none":
            passed.append(setting)
    others = [
        setting
        for setting in settings
        if setting.name in read_separately or setting.name not in megatron or setting not in passed
    ]
    sort_settings(
        [other for other in others if other.name not in megatron or other.name in swift],
        table=swift,
        reading=reading,
        spare=source.ignore,
    )
    passed += [
        _renamed_setting(name, *values)
        for name, values in _MEGATRON_DEFAULTS.items()
        if name not in last
    ]
    length = last.get("max-length")
    if length is not None:
        if last.get("packing", _renamed_setting("packing", "false")).text.lower() == "false":
            reading.note_length_bound(length.written)
        passed += [replace(length, name=name) for name in ("seq-length", "max-position-embeddings")]
    if (
        last.get("torch-dtype", _renamed_setting("torch-dtype", "bfloat16")).text != "float32"
        and not {"fp16", "bf16"} & last.keys()
    ):
        passed.append(_renamed_setting("bf16", written="torch_dtype"))
    named = last["model"].text if "model" in last else ""
    if (layers := source.layers_of(named)) is not None:
        passed.append(_renamed_setting("num-layers", str(layers), written="the model's layers"))
        if experts := source.num_experts_of(named):
            passed.append(_renamed_setting("num-experts", str(experts), written="its experts"))
    else:  # Uneven stages need the model's number of layers, which is reported as missing.
        passed = [setting for setting in passed if setting.name not in UNEVEN_STAGE_FLAGS]
    read_arguments(passed, reading=reading, num_gpus=reading.num_gpus, spare=source.ignore)
    reading.missing = [
        missing_field
        for missing_field in reading.missing
        if not missing_field.field.startswith("model.")
    ]
    reading.query.pop("model", None)
    if "model" in last:
        reading.query["model"] = last["model"].text
    else:
        reading.add_missing("model", "--model is missing; add", example="NAME")
    kind = last.get(
        "tuner-type", last.get("train-type", _renamed_setting("tuner-type", "full"))
    ).text
    if kind == "lora":
        _read_megatron_adapters(last, reading)
    elif kind != "full":
        reading.refuse(f"tuner_type {kind} is not supported; supported: lora, full")


def _read_megatron_adapters(last: Mapping[str, Setting], reading: Reading) -> None:
    lora: dict[str, Any] = {
        "rank": parse_whole_number(
            last["lora-rank"].text if "lora-rank" in last else "8", "lora_rank"
        )
    }
    lora["dropout"] = parse_fraction(
        last["lora-dropout"].text if "lora-dropout" in last else "0.05", "lora_dropout"
    )
    if "target-modules" in last and (names := last["target-modules"].values) != ("all-linear",):
        lora["target_modules"] = list(names)
    reading.query["training"] |= {"task": "lora", "lora": lora}


register(
    Format(
        name="ms-swift",
        signs=(
            Sign(
                place="script",
                rank=14,
                matches=matches_pattern(
                    r"(?m)^[^#\n]*(?<![\w/-])((megatron|swift)\s+(sft|pt)\b|swift/cli/\S*(sft|pt)\.py)"
                ),
            ),
            Sign(
                place="script",
                rank=14,
                matches=matches_pattern(
                    r"(?m)^[^#\n]*(?<![\w/-])((megatron|swift)\s+rlhf\b|swift/cli/\S*rlhf\.py)"
                ),
                refused="training on preferences or rewards by ms-swift (rlhf)",
            ),
            Sign(
                place="script",
                rank=23,
                matches=matches_pattern(
                    r"(?m)^[^#\n]*(?<![\w/-])(megatron|swift)\s+"
                    r"(app|deploy|eval|export|infer|merge-lora|rollout|sample|web-ui)\b"
                ),
                refused="a command of ms-swift that does not train",
            ),
        ),
        logs=("trainer",),
        read=read,
        reads="a command `swift sft`, `swift pt`, `megatron sft` or `megatron pt`, or "
        "`swift/cli/*.py` under a launcher, with the file of arguments that the command "
        "names",
    )
)
