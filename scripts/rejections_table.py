"""Generate the table of codes in docs/why-not.md.

`python scripts/rejections_table.py`
"""

from __future__ import annotations

import re
from pathlib import Path

from hp_tool.wording.rejections import RULES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "why-not.md"


def with_table(page: str) -> str:
    """Return the page with a row for each code below the table's header."""
    rows = "".join(f"| `{code}` | {words} |\n" for code, words in RULES.items())
    return re.sub(r"(\|---\|---\|\n)(\| `.*\n)+", lambda table: f"{table[1]}{rows}", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
