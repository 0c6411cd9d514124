"""Sections of docs/cost-model.md and the modules of hp_tool/cost that each names under `Modules:`."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cost-model.md"


def cost_sections() -> dict[str, list[Path]]:
    """Modules by section, in the page's order; a folder stands for every module in it."""
    sections: dict[str, list[Path]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        paragraphs = re.findall(r"^Modules?: .*?(?:\n\n|\Z)", section, re.DOTALL | re.MULTILINE)
        named = [(PAGE.parent / target).resolve() for target in re.findall(r"\]\((\S+?)\)", "".join(paragraphs))]
        modules = [module for path in named for module in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        if modules:
            sections[section.partition("\n")[0]] = modules
    return sections
