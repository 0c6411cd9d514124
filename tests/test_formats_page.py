"""docs/formats.md lists the formats that are registered."""

from __future__ import annotations

from scripts.formats_table import PAGE, with_tables


def test_the_page_has_the_tables_of_the_registered_formats() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python scripts/formats_table.py"
    assert page.count("<!-- formats ") == 2
