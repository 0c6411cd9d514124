"""Convert a Hugging Face config.json to a ModelSpec. A table maps the keys of each architecture."""

from collections.abc import Mapping
from typing import Any

from hp_tool.catalog.huggingface import decoders, encoders, experts, hybrids, state_spaces
from hp_tool.catalog.huggingface.family import Config, Family, reject, same, sliding_window
from hp_tool.catalog.huggingface.refused import REFUSED
from hp_tool.catalog.huggingface.structure import read_by_structure
from hp_tool.catalog.huggingface.towers import Tower, describe_tower, find_towers, tower_parameters
from hp_tool.catalog.records import build, nearest
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import UnsupportedError

FAMILIES: dict[str, Family] = {
    **decoders.FAMILIES,
    **experts.FAMILIES,
    **hybrids.FAMILIES,
    **state_spaces.FAMILIES,
    **encoders.FAMILIES,
}
_SAME = same(
    "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim "
    "intermediate_size vocab_size "
    "max_position_embeddings tie_word_embeddings"
)


def is_config(mapping: Config) -> bool:
    """Return True if a mapping has model_type or architectures, as a config.json does."""
    return "model_type" in mapping or "architectures" in mapping


def read_config(config: Config) -> ModelSpec:
    """Return the model in a config.json.

    Raises:
        UnsupportedError: A model_type or layout is not supported; the error names the reason or the
            known types.
        InputError: A value is missing or of the wrong type.
    """
    config, left_out, found_towers = _language_model(config)
    written = {key: value for key, value in config.items() if value is not None}
    if written.get("model_type", "") not in (*FAMILIES, *REFUSED, ""):
        by_structure = read_by_structure(
            written, families=FAMILIES, read=lambda keys, family: _spec(keys, family, "", {})
        )
        if by_structure is not None:
            return by_structure
    return _spec(written, FAMILIES[_model_type(config)], left_out, found_towers)


def _spec(
    written: dict[str, Any], family: Family, left_out: str, beside: Mapping[str, Tower]
) -> ModelSpec:
    model_type = str(written.get("model_type", ""))
    for key, (value, why) in family.required.items():
        reject(written, key, unless=value, why=why)
    names = {**_SAME, **family.keys}
    fields = {
        ours: written[key]
        for ours, theirs in names.items()
        for key in reversed(theirs.split())
        if key in written
    }
    name = (
        written.get("name")
        or str(written.get("_name_or_path", "")).rstrip("/").rsplit("/", 1)[-1]
        or model_type
        or "model"
    )
    known = {"name": name, **family.defaults, **fields, **family.fixed, **family.derive(written)}
    if "gemma3" not in model_type:  # In these types, max_position_embeddings is already scaled.
        known |= _scaled_positions(written, known.get("max_position_embeddings"))
    layers = known.get("num_hidden_layers")
    if isinstance(layers, int) and not family.describes_layers and "blocks" not in known:
        windows = sliding_window(
            written, layers=layers, full_attention_every=family.full_attention_every
        )
        known = windows | known
    if left_out:
        known["left_out"] = left_out
    width = known.get("hidden_size")
    if beside and isinstance(width, int):
        known["tower_parameters"] = sum(
            tower_parameters(tower, into=width) for tower in beside.values()
        )
        # vLLM runs these towers with transformers (AutoModel.from_config in gemma4_mm.py).
        known["tower_replicated"] = "gemma4" in model_type
    return build(ModelSpec, known, field="model")


_SCALED_ALREADY = ("su", "longrope", "llama3", "default", "mrope")
"""RoPE scaling types that do not change max_position_embeddings."""


def _scaled_positions(config: Config, positions: object) -> dict[str, int]:
    """Return max_position_embeddings after the RoPE scaling in the file, as vLLM computes the
    maximum request length.

    Source: vllm/config/model.py. YaRN scales original_max_position_embeddings; other types scale
    the value in the file.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind is None or kind in _SCALED_ALREADY:
        return {}
    original = (
        scaling.get("original_max_position_embeddings", positions) if kind == "yarn" else positions
    )
    factor = scaling.get("factor", 1.0)
    if (
        not isinstance(original, int)
        or not isinstance(factor, int | float)
        or not 1.0 <= factor <= 1e6
    ):
        return {}
    return {"max_position_embeddings": int(original * factor)}


_TEXT = ("text_config", "llm_config", "language_config")


def _language_model(config: Config) -> tuple[Config, str, dict[str, Tower]]:
    """Return (the language model's part of a config.json, a description of the other parts, the
    vision and audio towers).

    A config.json that does not wrap a language model is returned unchanged.
    """
    key = next((key for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    if key is None or config.get("is_encoder_decoder"):
        found_towers = find_towers(
            {name: config[name] for name in ("vision_config", "audio_config") if name in config}
        )
        return (
            config,
            ", ".join(describe_tower(*each) for each in found_towers.items()),
            found_towers,
        )
    inner = dict(config[key])
    # Keys that the wrapping class has outside the language model's part.
    for shared in (
        "name",
        "_name_or_path",
        "tie_word_embeddings",
    ):
        if config.get(shared) is not None:
            inner.setdefault(shared, config[shared])
    if "model_type" not in inner and (text_type := f"{config.get('model_type')}_text") in FAMILIES:
        inner["model_type"] = text_type
    if not inner.get("_name_or_path"):
        inner.setdefault("name", config.get("model_type"))
    found_towers = find_towers(
        {name: tower for name, tower in config.items() if name != key and name.endswith("_config")}
    )
    rest = f"all else of {config.get('model_type') or 'the file'} but its {key}"
    return (
        inner,
        ", ".join((*(describe_tower(*each) for each in found_towers.items()), rest)),
        found_towers,
    )


def _model_type(config: Config) -> str:
    model_type = config.get("model_type")
    if model_type is None:
        architectures = config.get("architectures")
        first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        stem = first.split("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower()
        types = (*FAMILIES, *REFUSED)
        model_type = next(
            (known for known in types if known.replace("_", "").replace("-", "") == stem), first
        )
    if model_type in REFUSED:
        raise UnsupportedError(
            f"model_type {model_type!r} is not supported: {REFUSED[model_type]}",
            field="model.model_type",
        )
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"model_type {model_type!r} is not "
            f"supported{nearest(str(model_type), FAMILIES)}; supported: "
            f"{', '.join(sorted(FAMILIES))}. Describe any other model by its fields",
            field="model.model_type",
        )
    return str(model_type)
