"""Resolve a model's name, file or mapping to a ModelSpec."""

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tool.catalog import documents, library, records
from hp_tool.catalog.huggingface.quantization import attention_is_wide, weight_precision
from hp_tool.catalog.huggingface.read import is_config, read_config
from hp_tool.catalog.model_checks import check_model
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError

COUNTS = {"num_parameters": total_parameters, "num_active_parameters": active_parameters}
"""Names of the parameter counts that are computed from a model's fields and printed with them."""


def model(name: str) -> ModelSpec:
    """Return a model by catalogue name or alias (a Hugging Face id), or from a user's file.

    A file is a config.json (or the folder that contains it), or YAML or JSON with ModelSpec's
    fields. It is read only if the name is an OwnFile.

    Raises:
        NotFoundError: The name is unknown; the error names the nearest known names.
    """
    if is_own_file(name):
        return _model_from_file(_config_path(name))
    if is_file_name(name):
        raise InputError(
            f"Model {name[:200]!r} is a file path, which is not accepted here; send its "
            "content as a mapping instead.",
            field="model",
        )
    return _model_from_entry(library.entry("models", name))


def checkpoint(name: object) -> str | None:
    """Return the Hugging Face id or local folder of a model's weights; None if unknown.

    An instruction-tuned checkpoint is preferred to its base model.
    """
    if not isinstance(name, str):
        return None
    if is_own_file(name):
        return str(Path(name).parent if name.endswith(".json") else Path(name))
    entry = library.entry("models", name)
    ids = [alias for alias in entry.aliases if "/" in alias]
    every = [*ids, *itertools.chain(*entry.checkpoints.values())]
    matching_ids = [
        each
        for each in every
        if name.casefold() in (each.casefold(), each.rpartition("/")[2].casefold())
    ]
    if "/" in name and not matching_ids:
        return name
    return next(
        iter([*matching_ids, *(id_ for id_ in ids if id_.endswith("-Instruct")), *ids]), None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights that an engine can load."""

    path: str
    """A Hugging Face id, or a local folder."""
    precision: str | None
    """Precision of the stored weights: bf16 for 16-bit weights, None if unknown."""


def stored_checkpoint(name: object, *, precision: str) -> Checkpoint | None:
    """Return the checkpoint in this precision. If there is none, return the result of `checkpoint`;
    None if unknown.
    """
    if (path := checkpoint(name)) is None:
        return None
    if is_own_file(name) or not library.has_entry("models", str(name)):
        return Checkpoint(path=path, precision=None)
    published = library.entry("models", str(name))
    tail = path.rpartition("/")[2]
    in_precision = (
        each
        for each in published.checkpoints.get(precision, ())
        if re.fullmatch(rf"{re.escape(tail)}(-.*)?", each.rpartition("/")[2])
    )
    chosen = (
        path
        if "/" in str(name) and _checkpoint_precision(published, path) not in (None, "bf16")
        else next(in_precision, path)
    )
    return Checkpoint(path=chosen, precision=_checkpoint_precision(published, chosen))


def _checkpoint_precision(published: library.Entry, checkpoint_id: str) -> str | None:
    """Return the precision of an entry's checkpoint, or of its base model's; None if unknown."""
    by_id = dict.fromkeys((alias.casefold() for alias in published.aliases), "bf16")
    by_id |= {id_.casefold(): kind for kind, ids in published.checkpoints.items() for id_ in ids}
    return (
        by_id.get(checkpoint_id.casefold())
        or library.stored_precision(checkpoint_id)
        or by_id.get(library.base_model(checkpoint_id))
    )


def published_precision(name: str | Mapping[str, Any] | ModelSpec) -> str:
    """Return the precision of a model's published weights, or bf16 if unknown.

    For a catalogue model, use the precision of its checkpoint. For a config.json, read the
    quantization_config.

    Raises:
        UnsupportedError: The quantization_config is unknown.
    """
    if isinstance(name, ModelSpec):
        return "bf16"
    if isinstance(name, Mapping):
        return weight_precision(name) if is_config(name) else "bf16"
    if is_own_file(name):
        fields = library.sole_entry(_config_path(name), field="model").fields
        return weight_precision(fields) if is_config(fields) else "bf16"
    if not library.has_entry("models", name):
        return "bf16"
    if (named_precision := library.stored_precision(name)) is not None:
        return named_precision
    stored = stored_checkpoint(name, precision="bf16")
    return "bf16" if stored is None or stored.precision is None else stored.precision


def keeps_attention_wide(name: str | Mapping[str, Any] | ModelSpec, *, precision: str) -> bool:
    """Return True if the model's checkpoint in this precision stores attention in 16 bits.

    The source is the catalogue entry, or the quantization_config of a config.json.
    """
    if isinstance(name, ModelSpec):
        return False
    if isinstance(name, Mapping):
        return is_config(name) and attention_is_wide(name) and weight_precision(name) == precision
    if is_own_file(name):
        fields = library.sole_entry(_config_path(name), field="model").fields
        return keeps_attention_wide(fields, precision=precision)
    is_listed = library.has_entry("models", name)
    return is_listed and precision in library.entry("models", name).wide_attention


def is_own_file(name: object) -> bool:
    """Return True if a model with this name is read from a user's file."""
    return isinstance(name, OwnFile) and (is_file_name(name) or _contains_config(Path(name)))


@functools.lru_cache(maxsize=1024)
def is_file_name(name: str) -> bool:
    """Return True if the name has a YAML or JSON suffix."""
    return "." in name and Path(name).suffix in documents.SUFFIXES


def model_from_mapping(mapping: Mapping[str, Any], *, origin: Path | None = None) -> ModelSpec:
    """Return a model from ModelSpec's fields, or from the content of a config.json.

    Parameter counts, which printed models contain, are ignored, because they are computed from the
    other fields.

    Args:
        origin: File that contains the mapping, for error messages.

    Raises:
        InputError: A key is unknown; the error names the nearest known key.
    """
    if is_config(mapping):
        return check_model(read_config(mapping))
    fields = {key: value for key, value in mapping.items() if key not in COUNTS}
    return check_model(records.build(ModelSpec, fields, field="model", origin=origin))


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """Return `num_parameters` and `num_active_parameters`. The latter counts only the experts that
    process a token.
    """
    return {name: round(count(spec)) for name, count in COUNTS.items()}


@functools.lru_cache(maxsize=1024)
def _model_from_entry(entry: library.Entry) -> ModelSpec:
    return model_from_mapping({"name": entry.name, **entry.fields}, origin=entry.path)


def _model_from_file(path: Path) -> ModelSpec:
    entry = library.sole_entry(path, field="model")
    # config.json has no name, so the folder's is used.
    name = path.resolve().parent.name if path.name == "config.json" else entry.name
    if is_config(entry.fields) and (count := _stored_parameters(path.parent, entry.fields)):
        return model_from_mapping({"name": name, "num_parameters": count, **entry.fields})
    return model_from_mapping({"name": name, **entry.fields}, origin=path)


_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_INDEX = "model.safetensors.index.json"


def _stored_parameters(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Return the number of weights in a checkpoint, from its index file.

    Return None if there is no index, or if the weights are quantised.
    """
    width = _BYTES.get(str(config.get("torch_dtype", config.get("dtype"))))
    if width is None or config.get("quantization_config") or not (folder / _INDEX).is_file():
        return None
    size = documents.read(folder / _INDEX).get("metadata", {}).get("total_size")
    return size // width if isinstance(size, int) and size % width == 0 else None


def _config_path(name: str) -> Path:
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def _contains_config(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except OSError:  # The name is too long for a path.
        return False
