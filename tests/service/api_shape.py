"""`python -m tests.service.api_shape`: write the digests of the API's paths and schemas, after a
change that is meant.

The description itself is generated (`python -m service.describe`); its digests are kept, so that a
change of its shape is seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hp_tool.domain.digests import json_digest
from service.describe import api_description

FILE = Path(__file__).with_name("api_shape.json")
RENEW = "python -m tests.service.api_shape"
WORDS = ("description", "summary", "title")


def shape(value: Any) -> Any:
    """Return a description without its words, which may be polished freely."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items() if name not in WORDS}
    return [shape(each) for each in value] if isinstance(value, list) else value


def digests(described: dict[str, Any]) -> dict[str, str]:
    """Return a digest of each path, of each schema and of each other entry of an OpenAPI
    description.
    """
    shapes = shape(described)
    entries = {f"path {path}": operations for path, operations in shapes.pop("paths").items()}
    components = shapes.pop("components")
    entries |= {
        f"{kind} {name}": each for kind, named in components.items() for name, each in named.items()
    }
    return {name: json_digest(entry)[:12] for name, entry in sorted((entries | shapes).items())}


def current() -> dict[str, str]:
    """Return the digests of the application's own description."""
    return digests(json.loads(api_description()))


if __name__ == "__main__":
    FILE.write_text(json.dumps(current(), indent=1) + "\n", encoding="utf-8")
