"""`python -m service.describe [FILE]`: the API's description, as /openapi.json answers it, to a file or standard output."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from service.app import create_app
from service.settings import Settings


def description() -> str:
    """The description as text, with keys in a fixed order, so that two versions can be compared line by line."""
    with tempfile.TemporaryDirectory() as folder:
        from hp_tool.store import open_store

        store = open_store(
            f"sqlite:///{folder}/empty.sqlite3"
        )  # the application needs one, though its description reads nothing
        try:
            return json.dumps(create_app(Settings(), store=store).openapi(), indent=1, sort_keys=True) + "\n"
        finally:
            store.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(description(), encoding="utf-8")
    else:
        sys.stdout.write(description())
