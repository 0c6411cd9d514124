"""Generate the tables of fields in docs/queries.md from the declarations.

`python scripts/fields_table.py`
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from hp_tool.questions.form_fields import SECTIONS, Field, form_sections

PAGE = Path(__file__).resolve().parents[1] / "docs" / "queries.md"
MARK = "<!-- fields, written by python scripts/fields_table.py -->\n"


def tables() -> str:
    """Return a Markdown table for each section of fields, without repeated fields."""
    known: dict[str, dict[str, Field]] = {title: {} for title in SECTIONS if title != SECTIONS[-2]}
    for section in (*form_sections("training"), *form_sections("inference")):
        if section.title != SECTIONS[-2]:  # fields of a baseline, which are those of `parallel`
            known.setdefault(section.title, {}).update(
                {field.name: field for field in section.fields}
            )
    return "\n\n".join(_table(title, fields.values()) for title, fields in known.items())


def with_tables(page: str) -> str:
    """Return the page with the tables after its mark."""
    return f"{page[: page.index(MARK)]}{MARK}\n{tables()}\n"


def _table(title: str, fields: Iterable[Field]) -> str:
    rows = [
        f"| `{field.name}` | {field.label} | {field.takes} | {field.left_out} | "
        f"{_first(field.help)} |"
        for field in fields
    ]
    return "\n".join(
        (
            f"**{title}**",
            "",
            "| field | label | values | left out | meaning |",
            "|---|---|---|---|---|",
            *rows,
        )
    )


def _first(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return re.split(r"(?<=[.])\s(?=[A-Z])", line)[0]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
