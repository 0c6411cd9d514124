"""Checks that the options of several launchers share. Options are an operator's; nothing in them comes from a query."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hp_tool import documents
from hp_tool.errors import InputError

T = TypeVar("T")
_WORD = re.compile(r"[\w.,:@%+/-]{1,256}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
DEVICES = 1 << 20


def parse(adapter: TypeAdapter[T], fields: Mapping[str, Any], *, launcher: str, origin: str) -> T:
    """Options from a mapping, strictly: an unknown key or a wrong type is an InputError that names `origin`."""
    try:
        return adapter.validate_json(json.dumps(dict(fields)), strict=True)
    except (ValidationError, TypeError, ValueError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        name = ".".join(map(str, first["loc"]))
        raise InputError(f"{origin}: {name or 'the file'}: {first['msg']}", field=f"{launcher}.{name}") from None


def load(adapter: TypeAdapter[T], *, launcher: str, words: str) -> T:
    """Options from the file that HP_<LAUNCHER>_CONFIG names, else <launcher>.yaml in the user's configuration folder.

    Raises InputError where there is none, which names what stands in one (`words`), or one with a mistake in it.
    """
    path = config_path(launcher)
    if not path.is_file():
        raise InputError(
            f"no {launcher.capitalize()} cluster is described: {path} does not exist; write {words} there, name another file "
            f"by {_variable(launcher)}, or register the cluster and name it in the query",
            field="search.launcher",
        )
    return parse(adapter, documents.read(path), launcher=launcher, origin=str(path))


def config_path(launcher: str) -> Path:
    """Where a launcher's options are looked for; there need be no file."""
    from platformdirs import user_config_path

    named = os.environ.get(_variable(launcher))
    return Path(named) if named else user_config_path("hp-tool") / f"{launcher}.yaml"


def _variable(launcher: str) -> str:
    return f"HP_{launcher.upper()}_CONFIG"


def check(good: object, field: str, expectation: str) -> None:
    """Raises InputError for the field (`slurm.partition`) unless `good`."""
    if not good:
        raise InputError(f"{field.partition('.')[2]} {expectation}", field=field)


def check_words(values: Iterable[str], field: str) -> None:
    """Characters that mean nothing to a shell."""
    check(all(map(_WORD.fullmatch, values)), field, "must be words of letters, digits and _ . , : @ % + / -")


def check_environment(environment: Mapping[str, str], field: str) -> None:
    check(all(map(_VARIABLE.fullmatch, environment)), field, "must have names of letters, digits and _")
    check("\0" not in "".join(environment.values()), field, "must have no NUL in its values")


def check_devices(count: int, field: str) -> None:
    check(1 <= count <= DEVICES, field, f"must be from 1 to {DEVICES}")


def check_seconds(value: float | None, field: str, *, least: float = 0.0) -> None:
    check(value is None or least <= value <= 1e7, field, f"must be from {least:g} to 1e7 seconds")
