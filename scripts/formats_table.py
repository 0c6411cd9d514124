"""Generate the tables of docs/formats.md from the registered formats.

`python scripts/formats_table.py`
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hp_tool.catalog import documents
from hp_tool.formats.registry import formats

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "formats.md"
RELEASES = ROOT / "tests" / "formats" / "releases.yaml"


def releases() -> dict[str, list[dict[str, Any]]]:
    """Return the releases against which each format is checked."""
    return documents.read(RELEASES)


def tables() -> dict[str, str]:
    """Return Markdown tables of readable formats, writable formats, and their releases."""
    read = [
        f"| `{tool_format.name}` | {tool_format.reads} |"
        for tool_format in formats()
        if tool_format.read is not None
    ]
    written = [
        f"| `{tool_format.name}` | {tool_format.writes} | {tool_format.checked} |"
        for tool_format in formats()
        if tool_format.write is not None
    ]
    checked = [
        f"| `{name}` | {', '.join(dict.fromkeys(row['release'] for row in rows))} |"
        for name, rows in releases().items()
    ]
    return {
        "read": "\n".join(("| format | from |", "|---|---|", *read)),
        "written": "\n".join(("| format | what | checked against |", "|---|---|---|", *written)),
        "releases": "\n".join(("| format | releases |", "|---|---|", *checked)),
    }


def with_tables(page: str) -> str:
    """Return the page with each table after its mark."""
    for name, table in tables().items():
        page = re.sub(
            rf"(<!-- formats {name}.*? -->\n\n)(\|.*\n)*",
            lambda mark, table=table: f"{mark[1]}{table}\n",
            page,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
