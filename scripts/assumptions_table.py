"""Generate the tables of docs/assumptions.md from hp_tool/loop/assumptions.yaml.

`python scripts/assumptions_table.py`
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

from hp_tool.catalog import documents
from hp_tool.loop.assumptions import FILE, Assumptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "assumptions.md"
MARK = "<!-- assumptions, written by python scripts/assumptions_table.py -->\n"


def tables() -> str:
    """Return a Markdown section for each group of figures."""
    sections = []
    for name, kind in get_type_hints(Assumptions).items():
        rows = [
            f"| `{figure}` | {_value(entry['value'])} | {entry['unit']} | {entry['means']} | "
            f"{entry['evidence']} |"
            for figure, entry in documents.read(FILE)[name].items()
        ]
        head = (
            f"## {name}",
            "",
            inspect.getdoc(kind),
            "",
            "| figure | value | unit | means | chosen by |",
            "|---|---|---|---|---|",
        )
        sections.append("\n".join((*head, *rows)))
    return "\n\n".join(sections) + "\n"


def with_tables(page: str) -> str:
    """Return the page with the sections after its mark."""
    return page[: page.index(MARK)] + MARK + "\n" + tables()


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_value(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return f"{value:.10g}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
