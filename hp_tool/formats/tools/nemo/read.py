"""Read YAML files of Megatron Bridge and NeMo by converting their keys to Megatron's arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.errors import InputError
from hp_tool.formats.megatron_names import file_settings, megatron_argument, rename_settings
from hp_tool.formats.reading import (
    Reading,
    Setting,
    as_settings,
    hyphenated,
    parse_fraction,
    parse_whole_number,
    sort_settings,
    table,
)
from hp_tool.formats.shell import Word
from hp_tool.formats.source import Source
from hp_tool.formats.tools.megatron_lm.arguments import TABLE
from hp_tool.formats.tools.megatron_lm.read import read_arguments as read_arguments
from hp_tool.formats.tools.nemo.overrides import (
    apply_overrides,
    parse_override,
    parse_override_list,
)
from hp_tool.formats.writing import DTYPES

_PRECISION_RECIPES = {
    "fp8_delayed": ("fp8-format=hybrid",),
    "fp8_current": ("fp8-format=hybrid", "fp8-recipe=tensorwise"),
    "fp8_subchannel": ("fp8-format=hybrid", "fp8-recipe=blockwise"),
    "mxfp8": ("fp8-format=e4m3", "fp8-recipe=mxfp8"),
    "nvfp4": ("fp4-format=e2m1",),
}
"""Megatron flags, by parts of a mixed-precision recipe's name."""
_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()} | {"half": "fp16", "uint8": "fp8"}
"""Megatron's names for torch dtypes. The optimizer stores fp8 as uint8."""
_PROVIDER_KEYS = (
    "normalization",
    "position_embedding_type",
    "gated_linear_unit",
    "add_bias_linear",
)
"""Keys whose defaults depend on the model provider class."""
_PLAIN_PROVIDERS = ("GPTModelProvider", "GPTConfig")
"""Provider classes with Megatron Core's defaults."""
_SHAPE_KEYS = {"num_layers", "hidden_size", "_target_", "encoder", "num_attention_heads"}
"""Keys of `model` in a complete configuration. A file of overrides leaves them to its recipe."""
_FIELDS_OF_PROVIDERS = (
    "training.dropout",
    "training.cross_entropy",
    "parallel.moe_token_dispatcher_type",
)
"""Fields for which model provider classes override Megatron Core's defaults."""
_FIELDS_OF_RECIPES = (
    *_FIELDS_OF_PROVIDERS,
    "training.cuda_graphs",
    "training.gradient_precision",
    "training.optimizer_precision",
    "training.offload",
)
"""Fields for which recipes override Megatron Core's defaults."""
_SEPARATELY_READ_KEYS = {
    "trainer.precision": "training.precision",
    "model.activation": "model.gated_mlp",
    "model.optim.name": "parallel.zero_stage",
    "optim.name": "parallel.zero_stage",
    "model.-target-": "model",
}
"""Fields set by keys that Megatron's argument table lacks."""
_DISTRIBUTED_OPTIMIZERS = ("mcore_distributed_optim", "distributed_fused_adam")
"""NeMo's optimizers that shard optimizer states across data-parallel ranks."""


def read(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a Megatron Bridge or NeMo file, or of recipe overrides.

    Raises:
        InputError: The file is invalid.
    """
    if source.mapping is not None:
        content = source.keys(reading)
        if "model" in content and _SHAPE_KEYS.isdisjoint(_section(content, "model")):
            _read_overrides(content, source=source, reading=reading)
        else:
            read_content(content, source=source, reading=reading)
    elif words := parse_override_list(source.text):
        _read_overrides(with_overrides({}, words, reading=reading), source=source, reading=reading)
    else:
        raise InputError(
            "this is neither a YAML file nor a list of recipe overrides (KEY=VALUE)", field="format"
        )


def with_overrides(
    content: dict[str, Any], words: Iterable[Word], *, reading: Reading
) -> dict[str, Any]:
    """Return the content with KEY=VALUE words applied; reject those that delete a key."""
    overrides = [parse_override(word) for word in words]
    for override in overrides:
        if override.deletes:
            reading.refuse(f"~{override.key}: deleting a key is not supported")
    return apply_overrides(content, (override for override in overrides if not override.deletes))


_DECIDED_FIELDS = {
    "model.tensor_model_parallel_size": "parallel.tensor_parallel_size",
    "model.pipeline_model_parallel_size": "parallel.pipeline_parallel_size",
    "model.virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline_parallel_size",
    "model.context_parallel_size": "parallel.context_parallel_size",
    "model.sequence_parallel": "parallel.sequence_parallel",
    "model.recompute_granularity": "parallel.recompute",
    "ddp.use_distributed_optimizer": "parallel.zero_stage",
    "train.micro_batch_size": "parallel.micro_batch_size",
    "train.global_batch_size": "training.global_batch_size",
    "model.seq_length": "training.sequence_length",
    "mixed_precision": "training.precision",
}
"""Keys that every recipe sets, and the fields that they determine."""


def _read_overrides(content: dict[str, Any], *, source: Source, reading: Reading) -> None:
    """Fill the reading with the query of overrides whose recipe is unknown.

    Fields that only the recipe sets are recorded as missing.
    """
    layers = source.layers_of("")
    if layers is None:
        why = "the recipe defines the model, and the overrides do not name it; add"
        reading.add_missing("model", why, example="NAME")
        length = _section(content, "model").get("seq_length")
        training = {"sequence_length": length} if isinstance(length, int) else {}
        reading.query = {"kind": "training", "training": training, "parallel": {}}
        return
    reject_shape_overrides(content, num_layers=layers, source=source, reading=reading)
    of_recipe = {"model": {"num_layers": layers}}
    read_content(_merge_content(content, of_recipe), source=source, reading=reading)
    for key, field in _DECIDED_FIELDS.items():
        section, _, name = key.rpartition(".")
        if name not in (_section(content, section) if section else content):
            reading.add_missing(
                field, f"{key} comes from the recipe, which overrides do not name; add"
            )
    _drop_unset_fields(reading, content, _FIELDS_OF_RECIPES)


def _drop_unset_fields(reading: Reading, content: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Drop fields that no key sets, so that the recipe's defaults apply, not Megatron Core's."""
    decided = decided_fields(content)
    for path in paths:
        if path not in decided:
            section, _, name = path.partition(".")
            reading.query[section].pop(name, None)


def decided_fields(content: Mapping[str, Any]) -> set[str]:
    """Return the query fields that the keys determine."""
    fields = set()
    for setting in as_settings(content):
        argument = table(TABLE).get(megatron_argument(setting.name, tool="nemo").removesuffix("!"))
        if argument is not None and argument.fate == "read":
            fields.add(argument.why)
        if setting.name.partition(".")[0] == "mixed-precision":
            fields.add("training.precision")
    return fields


def reject_shape_overrides(
    content: Mapping[str, Any], *, num_layers: int | None, source: Source, reading: Reading
) -> None:
    """Reject overrides that change the shape of the recipe's model."""
    spared = {hyphenated(name) for name in source.ignore}
    for name, value in _section(content, "model").items():
        argument = table(TABLE).get(
            megatron_argument(hyphenated(f"model.{name}"), tool="nemo").rstrip("!")
        )
        shapes = argument is not None and argument.why.startswith("model.")
        same = name == "num_layers" and str(value) == str(num_layers)
        if shapes and not same and hyphenated(f"model.{name}") not in spared:
            reading.refuse(
                f"model.{name} {value} changes the recipe's model; import the YAML file "
                "that the run saves"
            )


def _merge_content(content: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations section by section; `over` takes precedence."""
    merged = dict(content)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            merged[key] = _merge_content(before, value)
        else:
            merged[key] = value
    return merged


def read_content(content: Mapping[str, Any], *, source: Source, reading: Reading) -> None:
    """Fill the reading with the query of a Megatron Bridge or NeMo configuration."""
    num_gpus, spare = reading.num_gpus, source.ignore
    leaves = file_settings(content, text=source.text)
    reading.add_unknown_values(leaves, _SEPARATELY_READ_KEYS)
    reading.add_unknown_values(
        leaves,
        {
            leaf.name: "training.precision"
            for leaf in leaves
            if _outermost_key(leaf) == "mixed-precision"
        },
    )
    trainer, model, adapters = (_section(content, name) for name in ("trainer", "model", "peft"))
    if num_gpus is None and "devices" in trainer:
        nodes = parse_whole_number(trainer.get("num_nodes", 1), "trainer.num_nodes")
        num_gpus = parse_whole_number(trainer["devices"], "trainer.devices") * nodes
    reading.num_gpus = reading.num_gpus or num_gpus
    provider = str(model.get("_target_", "")).rpartition(".")[2]
    unset = [name for name in _PROVIDER_KEYS if name not in model]
    if provider and provider not in _PLAIN_PROVIDERS and unset:
        reading.add_missing(
            "model",
            f"{provider} sets {', '.join(unset)}, which the file omits; add",
            example="NAME",
        )
    low_rank = str(adapters.get("_target_", "")).endswith(".LoRA")
    elsewhere = ("mixed-precision", "peft") if low_rank else ("mixed-precision",)
    megatron_leaves = [leaf for leaf in leaves if _outermost_key(leaf) not in elsewhere]
    settings = [
        _with_short_dtype(setting)
        for setting in rename_settings(megatron_leaves, tool="nemo", reading=reading, spare=spare)
    ]
    names = {setting.name for setting in settings}
    settings += _precision_settings(content)
    if "num-query-groups" in names:
        settings.append(Setting(name="group-query-attention", written="model.num_query_groups"))
    if model.get("activation") in ("fast-swiglu", "swiglu"):
        settings.append(
            Setting(name="glu-activation", written="model.activation", values=("swiglu",))
        )
    optimizer = next(
        (leaf for leaf in leaves if leaf.name in ("model.optim.name", "optim.name")), None
    )
    if optimizer and optimizer.values[0] in _DISTRIBUTED_OPTIMIZERS:
        settings.append(
            Setting(
                name="use-distributed-optimizer", written=optimizer.written, line=optimizer.line
            )
        )
    read_arguments(settings, reading=reading, num_gpus=num_gpus, spare=spare)
    if low_rank:
        _read_adapters([leaf for leaf in leaves if _outermost_key(leaf) == "peft"], reading=reading)
    if provider and provider not in _PLAIN_PROVIDERS:  # This class has its own defaults.
        _drop_unset_fields(reading, content, _FIELDS_OF_PROVIDERS)


def _read_adapters(leaves: Iterable[Setting], *, reading: Reading) -> None:
    """Read Bridge's LoRA settings (megatron/bridge/peft/lora.py)."""
    settings = sort_settings(leaves, table=table("bridge-lora"), reading=reading)

    def setting_values(name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        return settings[f"peft.{name}"].values if f"peft.{name}" in settings else default

    targets = setting_values("target-modules", ())
    if any("*" in name for name in targets):
        reading.refuse(
            f"peft.target_modules {', '.join(targets)}: adapters on some layers only "
            "are not supported"
        )
    lora: dict[str, Any] = {
        "rank": parse_whole_number(setting_values("dim", ("32",))[0], "peft.dim")
    }
    lora |= {"target_modules": list(targets)} if targets else {}
    if (dropout := parse_fraction(setting_values("dropout", ("0",))[0], "peft.dropout")) > 0.0:
        lora["dropout"] = dropout
    reading.query["training"] |= {"task": "lora", "lora": lora}


def _with_short_dtype(setting: Setting) -> Setting:
    """Return the setting with torch's dtype replaced by Megatron's name, such as bf16."""
    if not setting.name.endswith("-dtype") or len(setting.values) != 1:
        return setting
    name = setting.values[0].removeprefix("torch.")
    return replace(setting, values=(_DTYPES.get(name, name),))


def _outermost_key(setting: Setting) -> str:
    return setting.name.partition(".")[0]


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _precision_settings(content: Mapping[str, Any]) -> list[Setting]:
    """Return Megatron's arguments for mixed_precision and trainer.precision."""
    mixed = content.get("mixed_precision")
    if isinstance(mixed, Mapping):
        return _precision_fields(mixed)
    name = mixed if isinstance(mixed, str) else ""
    name = name or str(_section(content, "trainer").get("precision", ""))
    settings = []
    if name and "32" not in name:
        half = name.startswith(("fp16", "16")) and "bf16" not in name
        settings.append(Setting(name="fp16" if half else "bf16", written="precision"))
    for flag in (
        flag for kind, flags in _PRECISION_RECIPES.items() if kind in name for flag in flags
    ):
        settings.append(
            Setting(
                name=flag.partition("=")[0],
                written="mixed_precision",
                values=(flag.partition("=")[2],),
            )
        )
    if "fp8" in name and "subchannel" not in name:
        settings.append(Setting(name="fp8-param-gather", written="mixed_precision"))
    return settings


def _precision_fields(mixed: Mapping[str, Any]) -> list[Setting]:
    fields = ("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp8_param", "fp4")
    flags = {"fp8": "fp8-format", "fp8_param": "fp8-param-gather", "fp4": "fp4-format"}
    settings = []
    if mixed.get("bf16") and mixed.get("grad_reduce_in_fp32") is False:
        settings.append(
            Setting(name="grad-reduce-in-bf16", written="mixed_precision.grad_reduce_in_fp32")
        )
    for key in fields:
        if (value := mixed.get(key)) not in (None, False):
            name, values = (
                flags.get(key, key.replace("_", "-")),
                () if value is True else (str(value),),
            )
            settings.append(Setting(name=name, written=f"mixed_precision.{key}", values=values))
    return settings
