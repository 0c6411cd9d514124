"""Models: a name, a file or a mapping into a ModelSpec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_tool.catalog import documents, huggingface, library, records
from hp_tool.domain.model import ModelSpec
from hp_tool.errors import InputError


def model(name: str, *, allow_files: bool = True) -> ModelSpec:
    """A model by catalogue name or alias (a Hugging Face id), or from a file.

    A file is a config.json (or the folder that holds one), or a YAML or JSON file of ModelSpec's fields. A service
    that takes names from strangers passes allow_files=False. NotFoundError names the nearest names.
    """
    path = Path(name)
    if path.suffix in documents.SUFFIXES or (path / "config.json").is_file():
        if not allow_files:
            raise InputError(f"model {name!r} is a file; send its content as a mapping instead", field="model")
        path = path / "config.json" if path.is_dir() else path
        entries = list(library.file_entries(path))
        if len(entries) != 1:
            raise InputError(
                f"{path} holds {len(entries)} entries; a model file has its fields at the top level", field="model"
            )
        # config.json says nothing of a name: its folder's is the nearest thing.
        return _spec(entries[0], name=path.resolve().parent.name if path.name == "config.json" else entries[0].name)
    entry = library.entry("models", name)
    return _spec(entry, name=entry.name)


def model_from_mapping(mapping: Mapping[str, Any]) -> ModelSpec:
    """A model from ModelSpec's fields, or from a Hugging Face config.json's content (told by model_type or architectures).

    An unknown key of the first form is an InputError that names the nearest known one.
    """
    return _from_mapping(mapping, origin=None)


def models() -> list[str]:
    """Catalogue names of all models, sorted."""
    return [entry.name for entry in library.entries("models")]


def _spec(entry: library.Entry, *, name: str) -> ModelSpec:
    return _from_mapping({"name": name, **entry.fields}, origin=entry.path)


def _from_mapping(mapping: Mapping[str, Any], *, origin: Path | None) -> ModelSpec:
    if huggingface.is_config(mapping):
        spec = huggingface.read_config(mapping)
    else:
        spec = records.build(ModelSpec, mapping, field="model", origin=origin)
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if getattr(spec, name) < 1:
            raise InputError(f"{name} {getattr(spec, name)} must be positive", field=f"model.{name}")
    return spec
