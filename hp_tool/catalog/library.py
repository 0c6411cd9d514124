"""Find an entry in the catalogue's files without parsing files that cannot contain it. The user's
folders are searched first.

A file contains one entry or many. A single entry has its fields at the top level, and its name is
`name` or the file's name. Many entries look like this:

    source: config.json of {id}              # for entries without a source; {id}: their first id
    defaults: {normalization: rmsnorm}       # fields that all entries share
    entries:
      llama-2-7b:
        aliases: [meta-llama/Llama-2-7b-hf]  # other names
        parameters: 6.74e9                   # models only: published count, to check the shape
        checkpoints: {fp8: [nvidia/...-FP8]} # models only: ids of weights by precision
        wide_attention: [fp8]                # models only: these store attention in 16 bits
        num_hidden_layers: 32                # the fields of the domain type
"""

import dataclasses
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hp_tool.catalog import documents
from hp_tool.catalog.huggingface.refused import refusal_of_checkpoint
from hp_tool.catalog.records import nearest
from hp_tool.errors import InputError, NotFoundError, UnsupportedError

Kind = Literal["models", "gpus", "clusters", "lengths", "recipes", "trainers", "prices", "grids"]

_BUILT_IN = Path(__file__).parent / "data"
_SINGULAR: dict[Kind, str] = {
    "models": "model",
    "gpus": "gpu",
    "clusters": "cluster",
    "lengths": "distribution of lengths",
    "recipes": "recipe",
    "trainers": "trainer",
    "prices": "price",
    "grids": "grid",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A catalogue entry as written in its file.

    Instances compare by identity, so that they can be cache keys.
    """

    name: str
    fields: dict[str, Any]
    """Fields of the domain type that are not yet validated, or the content of a config.json."""
    aliases: tuple[str, ...] = ()
    parameters: float | None = None
    """Published parameter count of a model."""
    checkpoints: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Hugging Face ids of a model's weights in fewer than 16 bits, by precision."""
    wide_attention: tuple[str, ...] = ()
    """Precisions whose checkpoints leave attention in 16 bits."""
    source: str = ""
    path: Path
    """File that contains the entry."""


def entry(kind: Kind, name: str, *, field: str | None = None) -> Entry:
    """Return the entry with this name or alias, ignoring case.

    Args:
        field: Query field for error messages; model, gpu or cluster by default.

    Raises:
        NotFoundError: The name is unknown; the error names the nearest known names.
        UnsupportedError: The name is that of a model whose layers are not modelled.
    """
    if (match := _matches_name(kind, name)) is not None:
        return match
    all_entries = entries(kind)
    if kind == "models" and (reason := refusal_of_checkpoint(name)):
        raise UnsupportedError(
            f"model {name[:200]!r} is not supported: {reason}", field=field or "model"
        )
    hint = nearest(
        name, [known_name for each in all_entries for known_name in (each.name, *each.aliases)]
    )
    if not hint and len(all_entries) > 30:
        hint = f"; `hp-tool {kind}` lists the {len(all_entries)} known ones"
    elif not hint:
        hint = f"; known: {', '.join(each.name for each in all_entries)}"
    missing = "".join(
        f"; HP_CATALOG_DIR names {folder}, which is not a folder" for folder in missing_folders()
    )
    raise NotFoundError(
        f"unknown {_SINGULAR[kind]} {name[:200]!r}{hint}{missing}",
        field=field or _SINGULAR[kind],
    )


def has_entry(kind: Kind, name: str) -> bool:
    """Return True if an entry has this name or alias."""
    return _matches_name(kind, name) is not None


def _matches_name(kind: Kind, name: str) -> Entry | None:
    """Return the entry with this name or alias.

    A fine-tuned (-Instruct, -0324), quantised or republished model has the same shape as its base
    model.
    """
    match = _find(kind, name.casefold(), folders())
    if match is None and kind == "models":
        candidates = (
            _find(kind, published_name, folders()) for published_name in _published_names(name)
        )
        return next(filter(None, candidates), None)
    return match


def base_model(name: str) -> str:
    """Return the base model's name in lower case: `llama-3.1-8b` for `Llama-3.1-8B-Instruct`."""
    return _FINE_TUNING_SUFFIX.sub("", name.casefold()) or name.casefold()


def entries(kind: Kind) -> list[Entry]:
    """Return all entries, sorted by name. A user's entry replaces a built-in entry with the same
    name.
    """
    by_name: dict[str, Entry] = {}
    for folder in folders():
        for path, _ in _texts(folder / kind):
            for candidate in _entries(path):
                by_name.setdefault(candidate.name, candidate)
    return [by_name[name] for name in sorted(by_name)]


def names(kind: Kind) -> list[str]:
    """Return the sorted names of all entries."""
    return [each.name for each in entries(kind)]


def number_of_built_in_names() -> int:
    """Return the number of names and aliases of all kinds in the built-in catalogue."""
    folders = (_BUILT_IN / kind for kind in _SINGULAR)
    entries_of = (_entries(path) for folder in folders for path, _ in _texts(folder))
    return sum(1 + len(each.aliases) for several in entries_of for each in several)


def file_entries(path: Path) -> Iterator[Entry]:
    """Return the entries of a file.

    Raises:
        InputError: The file does not have the format that this module describes.
    """
    document = documents.read(path)
    source = document.get("source", "")
    if "entries" not in document:
        yield _entry(str(document.get("name", path.stem)), document, {}, source, path)
        return
    if unknown := sorted(document.keys() - {"source", "defaults", "entries"}):
        raise InputError(
            f"{path}: unknown key {unknown[0]!r}; a file has source, defaults and entries"
        )
    for name, fields in document["entries"].items():
        if not isinstance(fields, dict):
            raise InputError(f"{path}: entry {name!r} must be a mapping of fields")
        yield _entry(str(name), fields, document.get("defaults", {}), source, path)


def sole_entry(path: Path, *, field: str) -> Entry:
    """Return the only entry of a file.

    Args:
        field: Query field for error messages.

    Raises:
        InputError: The file has several entries.
    """
    several = list(file_entries(path))
    if len(several) != 1:
        raise InputError(
            f"{path} contains {len(several)} entries; a file named in a query must have its "
            "fields at the top level",
            field=field,
        )
    return several[0]


def user_folders() -> tuple[Path, ...]:
    """Return the user's catalogue folders. The first one receives new entries and has priority."""
    return folders()[:-1]


def missing_folders() -> list[Path]:
    """Return the folders in HP_CATALOG_DIR that do not exist."""
    return [
        folder
        for folder in _split_folders(os.environ.get("HP_CATALOG_DIR", ""))
        if not folder.is_dir()
    ]


def revision() -> str:
    """Return a digest of the names, sizes and modification times of the user's files.

    When the digest changes, cached entries are dropped, so that changed files are read again.
    Built-in data do not change while a process runs.
    """
    global _seen
    digest = hashlib.blake2b(digest_size=16)
    for folder in user_folders():
        for path in sorted(folder.glob("*/*")):
            status = path.lstat()
            digest.update(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode())
    now = digest.hexdigest()
    if _seen not in (None, now):
        clear_cache()
    _seen = now
    return now


_seen: str | None = None


def clear_cache() -> None:
    """Drop cached entries, so that this process reads changed files."""
    for forget in (
        _user_folder.cache_clear,
        _find.cache_clear,
        _texts.cache_clear,
        _entries.cache_clear,
        *_clear_functions,
    ):
        forget()


_clear_functions: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Register a function that `clear_cache` calls to drop data from the user's folders."""
    _clear_functions.append(forget)


_FINE_TUNING_SUFFIX = re.compile(
    r"-(?:instruct|chat|it|hf|base|thinking|reasoning|preview|exp|terminus)(?=-|$)|-v0\.[12]$|-\d{4}$"
)
"""Suffixes of model names that indicate fine-tuning: a method or a date."""
_WEIGHT_FORMAT_SUFFIX = re.compile(
    r"[-.](?:(?:un)?quantized|bnb|4bit|8bit|(?:nv|mx)?fp[48]|awq|gptq|int[48]|w\d+a\d+(?:kv\d+)?|bf16|bfloat16|"
    r"dynamic|static|pertensor|block|marlin|g\d+|autoround|mixed|torchao|qat|unsloth)"
    r"(?:-v2)?(?=[-.]|$)"
)
"""Suffixes of checkpoint names that indicate the weight format."""
_PRECISION_PATTERNS = (
    (r"(?:mx)?fp8", "fp8"),
    (r"mxfp4", "mxfp4"),
    (r"nvfp4|fp4", "nvfp4"),
    (r"int8|w8a8|8bit", "int8"),
    (r"awq|gptq|int4|w4a16|4bit", "int4"),
)


def stored_precision(name: str) -> str | None:
    """Return the precision of a checkpoint's weights if its name contains it."""
    tail = name.rstrip("/").rpartition("/")[2].casefold()
    precisions = (
        kind
        for words, kind in _PRECISION_PATTERNS
        if re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", tail)
    )
    return next(precisions, None)


def _published_names(name: str) -> Iterator[str]:
    """Yield the possible catalogue names of a published checkpoint.

    These are the name of its base model, its name without the publisher, and its name without the
    weight format.
    """
    yield base_model(name)
    tail = name.rstrip("/").rpartition("/")[2].casefold().removeprefix("meta-")
    for each in (tail, _without_format(tail)):
        yield from (each, base_model(each))


def _without_format(name: str) -> str:
    return _WEIGHT_FORMAT_SUFFIX.sub("", name)


@functools.lru_cache(maxsize=4096)
def _find(kind: Kind, wanted: str, folders: tuple[Path, ...]) -> Entry | None:
    for folder in folders:
        for path, text in _texts(folder / kind):
            # A file that does not contain the name is not parsed: reading is a hundred times
            # faster.
            if wanted in text or wanted == path.stem.casefold():
                for candidate in _entries(path):
                    names = (
                        candidate.name,
                        *candidate.aliases,
                        *itertools.chain(*candidate.checkpoints.values()),
                    )
                    known = {name.casefold() for name in names}
                    tails = {_without_format(each.rpartition("/")[2]) for each in known}
                    if wanted in known or (kind == "models" and wanted in tails):
                        return candidate
    return None


def _entry(
    name: str, fields: dict[str, Any], defaults: dict[str, Any], source: str, path: Path
) -> Entry:
    merged = {**defaults, **fields}
    aliases = tuple(merged.pop("aliases", ()))
    checkpoints = {kind: tuple(ids) for kind, ids in merged.pop("checkpoints", {}).items()}
    first_id = next(itertools.chain(aliases, *checkpoints.values()), name)
    return Entry(
        name=name,
        aliases=aliases,
        parameters=merged.pop("parameters", None),
        checkpoints=checkpoints,
        wide_attention=tuple(merged.pop("wide_attention", ())),
        source=str(merged.pop("source", source)).replace("{id}", first_id),
        fields={key: value for key, value in merged.items() if key != "name"},
        path=path,
    )


def folders() -> tuple[Path, ...]:
    """Return the folders to search, in order: HP_CATALOG_DIR, the user's configuration folder, the
    built-in data.
    """
    return (*_split_folders(os.environ.get("HP_CATALOG_DIR", "")), _user_folder(), _BUILT_IN)


@functools.lru_cache(maxsize=8)
def _split_folders(value: str) -> tuple[Path, ...]:
    return tuple(Path(folder) for folder in value.split(os.pathsep) if folder)


@functools.cache
def _user_folder() -> Path:
    import platformdirs

    return platformdirs.user_config_path("hp_tool") / "catalog"


@functools.cache
def _texts(folder: Path) -> tuple[tuple[Path, str], ...]:
    if not folder.is_dir():
        return ()
    paths = sorted(path for path in folder.iterdir() if path.suffix in documents.SUFFIXES)
    return tuple((path, documents.read_text(path).casefold()) for path in paths)


@functools.cache
def _entries(path: Path) -> tuple[Entry, ...]:
    return tuple(file_entries(path))
