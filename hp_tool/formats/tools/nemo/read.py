"""YAML files of Megatron Bridge and NeMo, in Megatron's arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.formats.reading import Reading, Setting, fraction, sort, table, whole_number
from hp_tool.formats.renamed import file_settings, renamed
from hp_tool.formats.source import Source
from hp_tool.formats.tools.megatron_lm.read import read as read_arguments

_MIXED = {
    "bf16": (), "fp16": (), "fp8_delayed": ("fp8-format=hybrid",), "fp8_current": ("fp8-format=hybrid",
    "fp8-recipe=tensorwise"),
    "fp8_subchannel": ("fp8-format=hybrid", "fp8-recipe=blockwise"), "mxfp8": ("fp8-format=e4m3", "fp8-recipe=mxfp8"),
    "nvfp4": ("fp4-format=e2m1",),
}  # fmt: skip


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}
"""torch's names of number formats, and those of Megatron's arguments; its optimizer keeps fp8 in bytes."""
_BY_PROVIDER = ("normalization", "position_embedding_type", "gated_linear_unit", "add_bias_linear")
"""What a class of model providers decides where a file leaves it out."""
_PLAIN = ("GPTModelProvider", "GPTConfig")
"""Classes whose defaults are Megatron Core's own."""
_DISTRIBUTED = ("mcore_distributed_optim", "distributed_fused_adam")
"""NeMo's optimizers that shard their states over data parallelism."""


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a file of Megatron Bridge's ConfigContainer, or of NeMo."""
    content, num_gpus, spare = source.keys(reading), reading.num_gpus, source.ignore
    leaves = file_settings(content, text=source.text)
    trainer = content.get("trainer") if isinstance(content.get("trainer"), Mapping) else {}
    if num_gpus is None and isinstance(trainer, Mapping) and "devices" in trainer:
        num_gpus = whole_number(trainer["devices"], "trainer.devices") * whole_number(
            trainer.get("num_nodes", 1), "trainer.num_nodes"
        )
    reading.num_gpus = reading.num_gpus or num_gpus
    model = content.get("model")
    provider = str(model.get("_target_", "")).rpartition(".")[2] if isinstance(model, Mapping) else ""
    unsaid = [name for name in _BY_PROVIDER if name not in (model or {})]
    if provider and provider not in _PLAIN and unsaid:
        reading.lack("model", f"{provider} decides {', '.join(unsaid)}, which the file does not say; add --model NAME")
    adapters = content.get("peft") if isinstance(content.get("peft"), Mapping) else {}
    low_rank = str((adapters or {}).get("_target_", "")).endswith(".LoRA")
    elsewhere = ("mixed-precision", "peft") if low_rank else ("mixed-precision",)
    own = [each for each in leaves if plain_of(each) not in elsewhere]
    settings = [_dtype(each) for each in renamed(own, tool="nemo", reading=reading, spare=spare)]
    names = {each.name for each in settings}
    settings += [
        Setting(name=name, written=written, values=tuple(value), line=None) for name, written, value in _precision(content)
    ]
    if "num-query-groups" in names:
        settings.append(Setting(name="group-query-attention", written="model.num_query_groups", values=()))
    activation = str((content.get("model") or {}).get("activation", ""))
    if activation in ("fast-swiglu", "swiglu"):
        settings.append(Setting(name="glu-activation", written="model.activation", values=("swiglu",)))
    optimizer = next((each for each in leaves if each.name in ("model.optim.name", "optim.name")), None)
    if optimizer and optimizer.values[0] in _DISTRIBUTED:
        settings.append(Setting(name="use-distributed-optimizer", written=optimizer.written, values=(), line=optimizer.line))
    read_arguments(settings, reading=reading, num_gpus=num_gpus, spare=spare)
    if low_rank:
        _adapters([each for each in leaves if plain_of(each) == "peft"], reading=reading)
    if provider and provider not in _PLAIN:  # where the file is silent the class decides, not Megatron's default
        fields = {each.field for each in reading.read}
        for name in ("dropout", "cross_entropy"):
            if f"training.{name}" not in fields:
                reading.query["training"].pop(name, None)


def _adapters(leaves: Iterable[Setting], *, reading: Reading) -> None:
    """Bridge's LoRA (megatron/bridge/peft/lora.py) as training.lora; what it leaves out takes that class's defaults."""
    settings = sort(leaves, table=table("bridge-lora"), reading=reading)

    def words(name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return settings[f"peft.{name}"].values if f"peft.{name}" in settings else default

    targets = words("target-modules", ())
    if any("*" in name for name in targets):
        reading.refuse(f"peft.target_modules {', '.join(targets)}: adapters on some of the layers are not modelled")
    lora: dict[str, Any] = {"rank": whole_number(words("dim", ("32",))[0], "peft.dim")}
    lora |= {"target_modules": list(targets)} if targets else {}
    if (dropout := fraction(words("dropout", ("0",))[0], "peft.dropout")) > 0.0:
        lora["dropout"] = dropout
    reading.query["training"] |= {"task": "lora", "lora": lora}


def _dtype(setting: Setting) -> Setting:
    """Return the setting with torch's name of a number format as Megatron's arguments write it."""
    if not setting.name.endswith("-dtype") or len(setting.values) != 1:
        return setting
    name = setting.values[0].removeprefix("torch.")
    return replace(setting, values=(_DTYPES.get(name, name),))


def plain_of(setting: Setting) -> str:
    return setting.name.partition(".")[0]


def _precision(content: Mapping[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """What mixed_precision (a recipe's name, or its fields) and trainer.precision say."""
    mixed = content.get("mixed_precision")
    name = str(mixed) if isinstance(mixed, str) else ""
    if isinstance(mixed, Mapping):
        fields = [
            (key, mixed.get(key)) for key in ("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_param", "fp4")
        ]
        flags = {"fp8": "fp8-format", "fp8_param": "fp8-param-gather", "fp4": "fp4-format"}
        reduced = [("grad-reduce-in-bf16", "mixed_precision.grad_reduce_in_fp32", ())]
        return (reduced if mixed.get("bf16") and mixed.get("grad_reduce_in_fp32") is False else []) + [
            (flags.get(key, key.replace("_", "-")), f"mixed_precision.{key}", () if value is True else (str(value),))
            for key, value in fields
            if value not in (None, False)
        ]
    trainer = content.get("trainer")
    name = name or str(trainer.get("precision", "") if isinstance(trainer, Mapping) else "")
    flags_of_recipe: list[tuple[str, str, tuple[str, ...]]] = []
    if name and "32" not in name:
        flags_of_recipe.append(("fp16" if name.startswith(("fp16", "16")) and "bf16" not in name else "bf16", "precision", ()))
    for kind, texts in _MIXED.items():
        if kind in name:
            flags_of_recipe += [(flag.partition("=")[0], "mixed_precision", (flag.partition("=")[2],)) for flag in texts]
    if "fp8" in name and "subchannel" not in name:
        flags_of_recipe.append(("fp8-param-gather", "mixed_precision", ()))
    return flags_of_recipe
