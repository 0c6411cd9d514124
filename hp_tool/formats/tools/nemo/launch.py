"""Read commands that launch a Megatron Bridge recipe or preset by name."""

import re
from collections.abc import Mapping
from typing import Any

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.reading import (
    Ignored,
    Reading,
    Setting,
    parse_flags,
    sort_settings,
    table,
)
from hp_tool.formats.shell import Word
from hp_tool.formats.source import Source
from hp_tool.formats.tools.nemo.overrides import (
    Override,
    apply_overrides,
    is_override,
    parse_override,
)
from hp_tool.formats.tools.nemo.read import (
    decided_fields,
    read_content,
    reject_shape_overrides,
    with_overrides,
)
from hp_tool.formats.tools.nemo.recipes import (
    PRECISIONS,
    Library,
    Preset,
    library_recipe,
    nearest_names,
    preset_of,
    presets,
)
from hp_tool.questions.schema import set_paths

_KEYS_OF_OPTIONS = {
    **dict.fromkeys(("global-batch-size", "gb"), "train.global_batch_size"),
    **dict.fromkeys(("micro-batch-size", "mb"), "train.micro_batch_size"),
    **dict.fromkeys(("seq-length", "sl"), "model.seq_length"),
    **dict.fromkeys(("tensor-model-parallel-size", "tp"), "model.tensor_model_parallel_size"),
    **dict.fromkeys(("pipeline-model-parallel-size", "pp"), "model.pipeline_model_parallel_size"),
    **dict.fromkeys(
        ("virtual-pipeline-model-parallel-size", "vp"),
        "model.virtual_pipeline_model_parallel_size",
    ),
    **dict.fromkeys(("context-parallel-size", "cp"), "model.context_parallel_size"),
    **dict.fromkeys(("expert-model-parallel-size", "ep"), "model.expert_model_parallel_size"),
    **dict.fromkeys(
        ("expert-tensor-parallel-size", "et", "etp"), "model.expert_tensor_parallel_size"
    ),
    "pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
    "cuda-graph-impl": "model.cuda_graph_impl",
    "cuda-graph-scope": "model.cuda_graph_scope",
}
"""Configuration keys that launcher options override."""
_SELECTING_OPTIONS = (
    *("recipe", "model", "mode", "model-recipe-name", "mr", "gpu", "g", "task"),
    *("compute-dtype", "c", "config-variant", "cv"),
)
"""Options that select a recipe."""
_OFF_FIELDS = {
    "training.cuda_graphs": False,
    "training.offload": "none",
    "training.gradient_precision": "fp32",
    "training.optimizer_precision": "fp32",
}
"""Values of fields that a key switches off. Unset fields would get the recipe's values."""
_TASKS = {"pretrain": "pretrain", "sft": "sft", "peft": "lora", "lora": "lora"}
_RELEASE = re.compile(r"nemo[:+#-](\d\d\.\d\d(?:\.\d\d)?)(?!\d)")
"""Matches the release in a container image name."""


def read_launch_command(source: Source, reading: Reading) -> None:
    """Fill the reading with the query of the recipe or preset that a command names.

    Raises:
        InputError: The name is unknown.
    """
    launch, _ = source.launch(reading)
    words = list(launch.words)
    overrides = [word for word in words if is_override(word.text)]
    others = [word for word in words if not is_override(word.text)]
    arguments = table("bridge-launch")
    written = parse_flags(others, table=arguments, reading=reading)
    settings = sort_settings(
        written,
        table=arguments,
        reading=reading,
        spare=source.ignore,
    )
    reading.query = {"kind": "training", "training": {}, "parallel": {}}
    _read_num_gpus(settings, reading)
    if any(each.unknown and each.name in _SELECTING_OPTIONS for each in written):
        return  # Already recorded as missing.
    option_overrides = _option_overrides(settings)
    name = _first_text(settings, "recipe")
    if not name and (model := _first_text(settings, "model")):
        mode = _TASKS.get(_first_text(settings, "mode", "pretrain"), "")
        name = f"{model}_{'peft' if mode == 'lora' else mode}_config"
    if name:
        preset, library = preset_of(name), library_recipe(name)
        if preset is None and library is None:
            raise _unknown_name_error("recipe", name, nearest_names(name))
    else:
        preset, library = _select_preset(settings, source, reading), None
    if preset is not None:
        _read_preset(preset, option_overrides, overrides, source=source, reading=reading)
        if not name:
            release = _named_release(settings, source)
            if release is not None:
                reading.query["training"]["recipe"] = f"megatron-bridge-{release}"
    elif library is not None:
        _read_library(library, option_overrides, overrides, source=source, reading=reading)


def _unknown_name_error(option: str, name: str, similar: str) -> UnsupportedError:
    """Return the error for an unknown recipe or preset, with similar names."""
    hint = f"; the nearest are {similar}" if similar else ""
    return UnsupportedError(f"--{option} {name} is an unknown recipe{hint}", field=f"--{option}")


def _first_text(settings: Mapping[str, Setting], *names: str) -> str:
    """Return the value of the first option that is set; the last argument is the default."""
    for name in names:
        if name in settings:
            return settings[name].text
    return names[-1] if len(names) > 1 and names[-1] not in table("bridge-launch") else ""


def _read_num_gpus(settings: Mapping[str, Setting], reading: Reading) -> None:
    """Record the number of GPUs that the launcher's options set."""
    if reading.num_gpus is not None:
        return
    sizes = [_first_text(settings, *names) for names in (("num-gpus", "ng"), ("nodes",))]
    per_node = _first_text(settings, "gpus-per-node", "gn")
    if sizes[0].isdecimal():
        reading.num_gpus = int(sizes[0])
    elif sizes[1].isdecimal() and per_node.isdecimal():
        reading.num_gpus = int(sizes[1]) * int(per_node)


def _option_overrides(settings: Mapping[str, Setting]) -> list[Override]:
    """Return the launcher's options as overrides of configuration keys."""
    return [
        parse_override(
            Word(f"{_KEYS_OF_OPTIONS[name]}={each.text.replace('None', 'null') or 'null'}", 0)
        )
        for name, each in settings.items()
        if name in _KEYS_OF_OPTIONS
    ]


def _named_release(settings: Mapping[str, Setting], source: Source) -> str | None:
    """Return the release in the query's recipe or the container image; None if neither has one."""
    named = str(source.overrides.get("training.recipe", ""))
    if named.startswith("megatron-bridge-"):
        return named.removeprefix("megatron-bridge-")
    image = _RELEASE.search(_first_text(settings, "container-image", "i"))
    return image[1] if image else None


def _select_preset(settings: Mapping[str, Setting], source: Source, reading: Reading) -> Preset:
    """Return the preset that the options of Bridge's scripts/performance select.

    Raises:
        InputError: No preset matches.
    """
    recipe = _first_text(settings, "model-recipe-name", "mr")
    precision = _first_text(settings, "compute-dtype", "c").lower() or "bf16"
    task = _TASKS.get(_first_text(settings, "task").lower() or "pretrain", "")
    for option, value in (
        ("model_recipe_name", recipe),
        ("gpu", chip := _first_text(settings, "gpu", "g").lower()),
    ):
        if not value:
            raise InputError(
                f"missing --{option}, which selects a preset; add it",
                field=f"--{option}",
                code="missing_field",
            )
    rows = [preset for preset in presets() if preset.recipe == recipe]
    if not rows:
        names = [preset.recipe for preset in presets()]
        raise _unknown_name_error("model_recipe_name", recipe, nearest_names(recipe, among=names))
    release = _named_release(settings, source)
    if release is None:
        newest = f"megatron-bridge-{rows[-1].releases[-1]}"
        raise InputError(
            "presets differ by release, and the container image does not name one; add "
            f"--set training.recipe={newest}",
            field="training.recipe",
            code="missing_field",
        )
    for option, attribute, value in (
        ("container_image", "releases", release),
        ("task", "task", task),
        ("gpu", "chip", chip),
        ("compute_dtype", "precision", precision),
    ):
        matching = [row for row in rows if value in _split_words(getattr(row, attribute))]
        if not matching:
            have = sorted({word for row in rows for word in _split_words(getattr(row, attribute))})
            raise UnsupportedError(
                f"{recipe} has no preset for --{option} {value}; available: {', '.join(have)}",
                field=f"--{option}",
            )
        rows = matching
    return _select_variant(rows, _first_text(settings, "config-variant", "cv").lower(), reading)


def _split_words(value: Any) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def _select_variant(rows: list[Preset], named: str, reading: Reading) -> Preset:
    """Return the preset of a variant (v1, v2).

    Up to 26.06, v2 falls back to v1. Later, both names mean the preset without a variant.

    Raises:
        UnsupportedError: The preset has no such variant.
    """
    variants = {row.variant for row in rows}
    order = [named] if named else []
    order += [""] if named in ("", "v1", "v2") else []
    order += ["v2", "v1"] if named in ("", "v2") else []
    chosen = next((each for each in order if each in variants), None)
    if chosen is None:
        raise UnsupportedError(
            f"unknown --config_variant {named}; choose one of: {', '.join(sorted(variants))}",
            field="--config_variant",
        )
    rows = [row for row in rows if row.variant == chosen]
    of_this_size = [row for row in rows if row.num_gpus == reading.num_gpus]
    if len(of_this_size) == 1 or len(rows) == 1:
        return (of_this_size or rows)[0]
    sizes = ", ".join(sorted({str(row.num_gpus) for row in rows}))
    raise UnsupportedError(
        f"--num_gpus {reading.num_gpus or ''}: there are presets for {sizes} GPUs only",
        field="--num_gpus",
    )


def _read_preset(
    preset: Preset,
    flags: list[Override],
    words: list[Word],
    *,
    source: Source,
    reading: Reading,
) -> None:
    """Fill the reading with a preset's layout and the command's overrides."""
    keys = dict(preset.keys)
    if preset.sequence_length is not None:
        keys["model.seq_length"] = preset.sequence_length
    count = reading.num_gpus or preset.num_gpus
    batch = preset.global_batch_size * count
    if preset.global_batch_size and batch % preset.num_gpus == 0:
        keys["train.global_batch_size"] = batch // preset.num_gpus
    reading.num_gpus = count
    content = _merge_content(keys, flags, words, model=preset.model, source=source, reading=reading)
    for key, field in (
        ("train.global_batch_size", "training.global_batch_size"),
        ("model.seq_length", "training.sequence_length"),
    ):
        section, _, name = key.partition(".")
        if name not in content.get(section, {}):
            reading.add_missing(field, "the preset's own value is unknown; add", example="...")
    read_content(content, source=source, reading=reading)
    decided = decided_fields(content)
    query = reading.query
    training = {
        name: value
        for name, value in query["training"].items()
        if f"training.{name}" in decided or name in ("sequence_length", "global_batch_size")
    }
    training |= {
        name.partition(".")[2]: value
        for name, value in _OFF_FIELDS.items()
        if name in decided and name.partition(".")[2] not in training
    }
    training.pop("overlap", None)
    if overlap := _overlap_fields(query["training"].get("overlap") or {}, decided):
        training["overlap"] = overlap
    if "training.precision" not in decided:
        training |= PRECISIONS[preset.precision]
    training["recipe"] = f"megatron-bridge-{preset.releases[-1]}"
    if preset.task != "pretrain":
        training["task"] = preset.task
    if preset.task == "lora":
        why = "the rank of the preset's adapters is not known; add"
        reading.add_missing("training.lora.rank", why, example=16)
    parallel = {
        name: value
        for name, value in query["parallel"].items()
        if f"parallel.{name}" in decided and value is not None
    }
    reading.query = {
        "kind": "training",
        "model": preset.model,
        "cluster": {"gpu": preset.gpu},
        "training": training,
        "parallel": parallel,
    }
    _drop_missing_shape(reading)


def _overlap_fields(read: Mapping[str, bool], decided: set[str]) -> dict[str, bool]:
    """Return the overlaps that the keys set, on or off."""
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel")
    return {
        name: read.get(name, name != "expert_parallel")
        for name in names
        if f"training.overlap.{name}" in decided
    }


def _read_library(
    recipe: Library,
    flags: list[Override],
    words: list[Word],
    *,
    source: Source,
    reading: Reading,
) -> None:
    """Fill the reading with a library recipe and the command's overrides."""
    content = _merge_content(
        recipe.keys, flags, words, model=recipe.model, source=source, reading=reading
    )
    read_content(content, source=source, reading=reading)
    training = reading.query["training"]
    if not any(read_setting.field == "training.dropout" for read_setting in reading.read):
        training.pop("dropout", None)  # Recipes use models without dropout.
    if recipe.task == "sft":
        training["task"] = "sft"
    if recipe.packed:
        reading.ignored.append(
            Ignored(flag="dataset", reason="packs samples; each row is assumed to be one sequence")
        )
    reading.query["model"] = recipe.model
    _drop_missing_shape(reading)


def _merge_content(
    keys: Mapping[str, Any],
    flags: list[Override],
    words: list[Word],
    *,
    model: str,
    source: Source,
    reading: Reading,
) -> dict[str, Any]:
    """Return the recipe's keys with the command's overrides applied."""
    content = apply_overrides(set_paths({}, keys), flags)
    layers = source.layers_of(model)
    overridden = with_overrides({}, words, reading=reading)
    reject_shape_overrides(overridden, num_layers=layers, source=source, reading=reading)
    content = with_overrides(content, words, reading=Reading(tool=reading.tool))
    content.setdefault("model", {})["num_layers"] = layers
    if layers and (experts := source.num_experts_of(model)):
        content["model"].setdefault("num_moe_experts", experts)
    return content


def _drop_missing_shape(reading: Reading) -> None:
    """Drop missing model shape fields, because the recipe's model determines them."""
    reading.missing = [
        missing_field
        for missing_field in reading.missing
        if not missing_field.field.startswith("model")
    ]
