"""Models: a name, a file or a mapping into a ModelSpec."""

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_tool import documents
from hp_tool.catalog import library, records
from hp_tool.catalog.huggingface.read import is_config, read_config
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.fields import checked
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError

COUNTS = {"num_parameters": total_parameters, "num_active_parameters": active_parameters}
"""What follows from a model's fields and is printed with them."""


def model(name: str) -> ModelSpec:
    """A model by catalogue name or alias (a Hugging Face id), or from one's own file.

    A file is a config.json (or the folder that holds one), or a YAML or JSON file of ModelSpec's fields; it is read where
    the name is an OwnFile alone. NotFoundError names the nearest names.
    """
    if is_own_file(name):
        path = Path(name)
        return _from_file(path / "config.json" if path.is_dir() else path)
    if is_file_name(name):
        raise InputError(
            f"model {name[:200]!r} names a file, which is not read from here; give its content as a mapping instead",
            field="model",
        )
    return _from_entry(library.entry("models", name))


def checkpoint(name: object) -> str | None:
    """The Hugging Face id, or own folder, of a model by name; an instructed one before its base. None: nobody knows it."""
    if not isinstance(name, str):
        return None
    if is_own_file(name):
        return str(Path(name).parent if name.endswith(".json") else Path(name))
    entry = library.entry("models", name)
    ids = [alias for alias in entry.aliases if "/" in alias]
    every = [*ids, *itertools.chain(*entry.checkpoints.values())]
    named = [each for each in every if name.casefold() in (each.casefold(), each.rpartition("/")[2].casefold())]
    if "/" in name and not named:
        return name
    return next(iter([*named, *(each for each in ids if each.endswith("-Instruct")), *ids]), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights that an engine loads."""

    path: str
    """A Hugging Face id, or one's own folder."""
    precision: str | None
    """What they are stored in; None: nobody knows. Weights of 16 bits are bf16 here."""


def stored_checkpoint(name: object, *, precision: str) -> Checkpoint | None:
    """Return the model's weights in this precision, else those that `checkpoint` names. None: nobody knows any."""
    if (path := checkpoint(name)) is None:
        return None
    if is_own_file(name) or not library.knows("models", str(name)):
        return Checkpoint(path=path, precision=None)
    published = library.entry("models", str(name)).checkpoints
    stored = {each: kind for kind, ids in published.items() for each in ids}
    tail = path.rpartition("/")[2]
    narrow = (
        each for each in published.get(precision, ()) if re.fullmatch(rf"{re.escape(tail)}(-.*)?", each.rpartition("/")[2])
    )
    if path not in stored and path not in library.entry("models", str(name)).aliases:
        return Checkpoint(path=path, precision=None)
    chosen = path if "/" in str(name) and path in stored else next(narrow, path)
    return Checkpoint(path=chosen, precision=stored.get(chosen, "bf16"))


def stored_precision(name: str) -> str | None:
    """Return what the weights of a published checkpoint of fewer than 16 bits are stored in; None for any other name."""
    if not library.knows("models", name):
        return None
    published = library.entry("models", name).checkpoints
    return next((kind for kind, ids in published.items() if name.casefold() in map(str.casefold, ids)), None)


def is_own_file(name: object) -> bool:
    """Whether a model of this name is read from a file."""
    return isinstance(name, OwnFile) and (is_file_name(name) or _holds_config(Path(name)))


@functools.lru_cache(maxsize=1024)
def is_file_name(name: str) -> bool:
    """Whether a model of this name would be looked for in a file."""
    return "." in name and Path(name).suffix in documents.SUFFIXES


def model_from_mapping(mapping: Mapping[str, Any], *, origin: Path | None = None) -> ModelSpec:
    """A model from ModelSpec's fields, or from a Hugging Face config.json's content (told by model_type or architectures).

    An unknown key of the first form is an InputError that names the nearest known one. Counts of parameters, which a printed
    model has, follow from the other fields and are counted anew. `origin`: the file it stands in.
    """
    if is_config(mapping):
        return checked_model(read_config(mapping))
    fields = {key: value for key, value in mapping.items() if key not in COUNTS}
    return checked_model(records.build(ModelSpec, fields, field="model", origin=origin))


def parameter_counts(spec: ModelSpec) -> dict[str, int]:
    """`num_parameters` and `num_active_parameters`; the second without the experts that a token is not sent to."""
    return {name: round(count(spec)) for name, count in COUNTS.items()}


@functools.lru_cache(maxsize=1024)
def _from_entry(entry: library.Entry) -> ModelSpec:
    return model_from_mapping({"name": entry.name, **entry.fields}, origin=entry.path)


def _from_file(path: Path) -> ModelSpec:
    entry = library.sole_entry(path, field="model")
    # config.json says nothing of a name: its folder's is the nearest thing.
    name = path.resolve().parent.name if path.name == "config.json" else entry.name
    return model_from_mapping({"name": name, **entry.fields}, origin=path)


def _holds_config(path: Path) -> bool:
    try:
        return (path / "config.json").is_file()
    except OSError:  # too long for a path, so it is none
        return False


def checked_model(spec: ModelSpec) -> ModelSpec:
    """The spec itself. Raises InputError, which names the field, its value and the fix, if no transformer has this shape."""
    checked(spec, field="model")
    heads, experts, window_layers = spec.num_attention_heads, spec.num_experts, spec.sliding_window_layers
    if spec.head_dim is None and spec.kv_lora_rank is None and spec.hidden_size % heads:
        width = f"hidden_size {spec.hidden_size}"
        raise _wrong(
            "num_attention_heads", f"{width} is not a multiple of num_attention_heads {heads}; fix one, or give head_dim"
        )
    if heads % spec.kv_heads:
        raise _wrong("num_key_value_heads", f"num_key_value_heads {spec.kv_heads} does not divide num_attention_heads {heads}")
    if (experts is None) != (spec.num_experts_per_tok is None):
        raise _wrong("num_experts_per_tok", "num_experts and num_experts_per_tok belong together; give both")
    per_token = spec.num_experts_per_tok or 1
    if experts is not None and per_token > experts:
        raise _wrong("num_experts_per_tok", f"num_experts_per_tok {per_token} is more than num_experts {experts}")
    if window_layers is not None and (spec.sliding_window is None or window_layers > spec.num_hidden_layers):
        needed = f"sliding_window and at most num_hidden_layers {spec.num_hidden_layers}"
        raise _wrong("sliding_window_layers", f"sliding_window_layers {window_layers} needs {needed}")
    if spec.n_group is None and spec.topk_group is None:
        return spec
    groups = spec.n_group or 1
    if not experts or experts % groups:
        raise _wrong("n_group", f"n_group {groups} does not divide num_experts {experts or 0}")
    kept, each = spec.topk_group or groups, experts // groups
    if kept > groups or kept * each < per_token:
        raise _wrong("topk_group", f"{kept} of {groups} groups of {each} experts cannot give {per_token} experts a token")
    return spec


def _wrong(field: str, message: str) -> InputError:
    return InputError(message, field=f"model.{field}")
