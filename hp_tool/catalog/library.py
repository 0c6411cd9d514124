"""Finds an entry among the catalogue's files, one's own folders first, without parsing files that
cannot hold it.

A file holds one entry (its fields at the top, its name from `name` or the file's name), or many:

    source: where the figures come from          # for entries that name none of their own
    defaults: {normalization: rmsnorm}           # fields all entries share
    entries:
      llama-2-7b:
        aliases: [meta-llama/Llama-2-7b-hf]      # other names
        parameters: 6.74e9                       # published count, a check of the shape; models only
        checkpoints: {fp8: [nvidia/...-FP8]}     # ids of its weights in fewer bits, by precision; models only
        wide_attention: [fp8]                    # precisions whose checkpoints keep attention in 16 bits; models only
        num_hidden_layers: 32                    # the fields of the domain type
"""  # noqa: E501

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
from hp_tool.catalog.records import nearest
from hp_tool.errors import InputError, NotFoundError

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
    """One thing of the catalogue, as its file writes it; equal only to itself, so that it can key a
    cache.
    """

    name: str
    fields: dict[str, Any]
    """The domain type's fields, not yet checked; or a config.json's content."""
    aliases: tuple[str, ...] = ()
    parameters: float | None = None
    """Published parameter count of a model."""
    checkpoints: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Published ids of a model's weights in fewer than 16 bits, by precision."""
    wide_attention: tuple[str, ...] = ()
    """Precisions whose checkpoints keep attention in 16 bits."""
    source: str = ""
    path: Path
    """The file it stands in."""


def entry(kind: Kind, name: str, *, field: str | None = None) -> Entry:
    """The entry called `name` (or so by alias, in any case of letters).

    NotFoundError names the nearest ones, and `field` as the input at fault (model, gpu or cluster
    by default).
    """
    if (match := _called(kind, name)) is not None:
        return match
    known = entries(kind)
    hint = nearest(
        name, [known_name for each in known for known_name in (each.name, *each.aliases)]
    )
    if not hint and len(known) > 30:
        hint = f"; `hp-tool {kind}` lists the {len(known)} known ones"
    elif not hint:
        hint = f"; known: {', '.join(each.name for each in known)}"
    missing = "".join(
        f"; HP_CATALOG_DIR names {folder}, which is no folder" for folder in missing_folders()
    )
    raise NotFoundError(
        f"no {_SINGULAR[kind]} is called {name[:200]!r}{hint}{missing}",
        field=field or _SINGULAR[kind],
    )


def knows(kind: Kind, name: str) -> bool:
    """Whether some entry is called `name`, or so by alias."""
    return _called(kind, name) is not None


def _called(kind: Kind, name: str) -> Entry | None:
    """The entry of this name or alias; a model that was trained further (-Instruct, -0324),
    quantised, or published by someone else has the shape of its base.
    """
    match = _find(kind, name.casefold(), folders())
    if match is None and kind == "models":
        found = (_find(kind, each, folders()) for each in _published_names(name))
        return next(filter(None, found), None)
    return match


def base_model(name: str) -> str:
    """Return the name of the model that was trained further, in lower case: `llama-3.1-8b` of
    `Llama-3.1-8B-Instruct`.
    """
    return _FURTHER.sub("", name.casefold()) or name.casefold()


def entries(kind: Kind) -> list[Entry]:
    """All entries by name; one's own replace built-in ones of the same name."""
    by_name: dict[str, Entry] = {}
    for folder in folders():
        for path, _ in _texts(folder / kind):
            for candidate in _entries(path):
                by_name.setdefault(candidate.name, candidate)
    return [by_name[name] for name in sorted(by_name)]


def names(kind: Kind) -> list[str]:
    """The names of all entries, sorted."""
    return [each.name for each in entries(kind)]


def number_of_built_in_names() -> int:
    """Return how many names and aliases the catalogue that comes with hp-tool has, of all kinds."""
    folders = (_BUILT_IN / kind for kind in _SINGULAR)
    entries_of = (_entries(path) for folder in folders for path, _ in _texts(folder))
    return sum(1 + len(each.aliases) for several in entries_of for each in several)


def file_entries(path: Path) -> Iterator[Entry]:
    """The entries of one file; InputError where the file is not of the form above."""
    document = documents.read(path)
    source = document.get("source", "")
    if "entries" not in document:
        yield _entry(str(document.get("name", path.stem)), document, {}, source, path)
        return
    if unknown := sorted(document.keys() - {"source", "defaults", "entries"}):
        raise InputError(
            f"{path}: unknown key {unknown[0]!r} beside entries; a file has source, defaults and "
            "entries"
        )
    for name, fields in document["entries"].items():
        if not isinstance(fields, dict):
            raise InputError(f"{path}: entry {name!r} must be a mapping of fields")
        yield _entry(str(name), fields, document.get("defaults", {}), source, path)


def sole_entry(path: Path, *, field: str) -> Entry:
    """The entry of a file that may hold no other. InputError, which names `field` as the input at
    fault.
    """
    several = list(file_entries(path))
    if len(several) != 1:
        raise InputError(
            f"{path} holds {len(several)} entries; a file that is named has its fields at the top "
            "level",
            field=field,
        )
    return several[0]


def own_folders() -> tuple[Path, ...]:
    """One's own folders, first match wins; the first is where new entries are written."""
    return folders()[:-1]


def missing_folders() -> list[Path]:
    """Folders that HP_CATALOG_DIR names and that are not there."""
    return [
        folder
        for folder in _own_folders(os.environ.get("HP_CATALOG_DIR", ""))
        if not folder.is_dir()
    ]


def revision() -> str:
    """A digest of one's own files by name, size and age. Where it is another than before, what was
    read is forgotten, so that changed files are seen; the built-in data do not change while a
    process runs.
    """
    global _seen
    digest = hashlib.blake2b(digest_size=16)
    for folder in own_folders():
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
    """Forget what was read, so that changed files are seen by this process."""
    for forget in (
        _user_folder.cache_clear,
        _find.cache_clear,
        _texts.cache_clear,
        _entries.cache_clear,
        *_elsewhere,
    ):
        forget()


_elsewhere: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Have `forget` called too: for who keeps something that was read from one's own folders."""
    _elsewhere.append(forget)


_FURTHER = re.compile(
    r"-(?:instruct|chat|it|hf|base|thinking|reasoning|preview|exp|terminus)(?=-|$)|-v0\.[12]$|-\d{4}$"
)
"""What names of models end in after further training: a method, a date."""
_WEIGHTS = re.compile(
    r"[-.](?:(?:un)?quantized|bnb|4bit|8bit|(?:nv|mx)?fp[48]|awq|gptq|int[48]|w\d+a\d+(?:kv\d+)?|bf16|bfloat16|"
    r"dynamic|static|pertensor|block|marlin|g\d+|autoround|mixed|torchao|qat|unsloth)"
    r"(?:-v2)?(?=[-.]|$)"
)
"""What names of checkpoints say of their weights' format."""
_STORED = (
    (r"(?:mx)?fp8", "fp8"),
    (r"mxfp4", "mxfp4"),
    (r"nvfp4|fp4", "nvfp4"),
    (r"awq|gptq|int4|w4a16|4bit", "int4"),
    (r"int8|w8a8|8bit", "int8"),
)


def stored_precision(name: str) -> str | None:
    """Return the precision of a checkpoint's weights, where its name says it."""
    tail = name.rstrip("/").rpartition("/")[2].casefold()
    found = (
        kind for words, kind in _STORED if re.search(rf"(?<![a-z0-9])({words})(?![a-z0-9])", tail)
    )
    return next(found, None)


def _published_names(name: str) -> Iterator[str]:
    """Yield what the model of a published checkpoint may be called here: as its base, by another
    publisher, without the format of its weights.
    """
    yield base_model(name)
    tail = name.rstrip("/").rpartition("/")[2].casefold().removeprefix("meta-")
    for each in (tail, _without_format(tail)):
        yield from (each, base_model(each))


def _without_format(name: str) -> str:
    """Return a checkpoint's name without what it says of its weights' format."""
    return _WEIGHTS.sub("", name)


@functools.lru_cache(maxsize=4096)
def _find(kind: Kind, wanted: str, folders: tuple[Path, ...]) -> Entry | None:
    for folder in folders:
        for path, text in _texts(folder / kind):
            # A file that does not mention the name is not parsed: reading is a hundred times
            # cheaper.
            if wanted in text or wanted == path.stem.casefold():
                for candidate in _entries(path):
                    names = (
                        candidate.name,
                        *candidate.aliases,
                        *itertools.chain(*candidate.checkpoints.values()),
                    )
                    known = {each.casefold() for each in names}
                    tails = {_without_format(each.rpartition("/")[2]) for each in known}
                    if wanted in known or (kind == "models" and wanted in tails):
                        return candidate
    return None


def _entry(
    name: str, fields: dict[str, Any], defaults: dict[str, Any], source: str, path: Path
) -> Entry:
    merged = {**defaults, **fields}
    return Entry(
        name=name,
        aliases=tuple(merged.pop("aliases", ())),
        parameters=merged.pop("parameters", None),
        checkpoints={kind: tuple(ids) for kind, ids in merged.pop("checkpoints", {}).items()},
        wide_attention=tuple(merged.pop("wide_attention", ())),
        source=str(merged.pop("source", source)),
        fields={key: value for key, value in merged.items() if key != "name"},
        path=path,
    )


def folders() -> tuple[Path, ...]:
    """Where to look, first match wins: HP_CATALOG_DIR, the user's configuration folder, the
    built-in data.
    """
    return (*_own_folders(os.environ.get("HP_CATALOG_DIR", "")), _user_folder(), _BUILT_IN)


@functools.lru_cache(maxsize=8)
def _own_folders(value: str) -> tuple[Path, ...]:
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
