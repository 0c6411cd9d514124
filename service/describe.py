"""Write the OpenAPI description, as in /openapi.json, to a file or to standard output.

`python -m service.describe [FILE]`
"""

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings


def api_description() -> str:
    """Return the description as text with sorted keys, so that versions can be diffed."""
    # The application needs a store, although its description reads nothing.
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_store(f"sqlite:///{folder}/empty.sqlite3")) as store,
    ):
        return (
            json.dumps(create_app(Settings(), store=store).openapi(), indent=1, sort_keys=True)
            + "\n"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(api_description(), encoding="utf-8")
    else:
        sys.stdout.write(api_description())
