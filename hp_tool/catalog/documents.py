"""Parse YAML and JSON files into plain mappings, with limits on size and nesting."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from hp_tool.errors import InputError

MAX_FILE_BYTES = 4 * 2**20
"""Maximum size of a file in bytes, far above any catalogue file or config.json. It limits memory
use if a path names the wrong file.
"""

MAX_DEPTH = 32
"""Maximum nesting depth of lists and mappings. Queries and catalogue files have fewer than ten
levels.
"""

SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.CSafeLoader):
    """libyaml's safe loader, extended to parse `312e12` as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_text(path: Path) -> str:
    """Return the text of a file of at most MAX_FILE_BYTES.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputError(
                f"{path} exceeds {MAX_FILE_BYTES} bytes, the maximum for a catalogue file "
                "or config.json"
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Raises:
        InputError: The file is not a mapping.
    """
    return parse(read_text(path), origin=path)


def parse(text: str, *, origin: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON document.

    Args:
        text: The document.
        origin: Name of the file, for error messages. Its suffix determines the format.
    """
    try:
        document = json.loads(text) if origin.suffix == ".json" else load_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        form = "JSON" if origin.suffix == ".json" else "YAML"
        raise InputError(f"{origin} is not valid {form}: {error}", code="syntax") from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise InputError(f"{origin} must contain a mapping of names to values", code="syntax")
    return document


def load_yaml(text: str | bytes) -> Any:
    """Return the value of one YAML document.

    Aliases are rejected, because a small text with aliases can expand to a large structure. Deep
    nesting is rejected, because libyaml is recursive: several thousand brackets crash the process.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.YAMLError(f"YAML aliases (*{event.anchor}) are not supported")
        depth += isinstance(event, yaml.events.CollectionStartEvent) - isinstance(
            event, yaml.events.CollectionEndEvent
        )
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"lists and mappings are nested deeper than {MAX_DEPTH} levels")
    return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
