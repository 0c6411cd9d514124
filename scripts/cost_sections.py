"""Read the sections of the cost model's pages: the modules listed under `Modules:`, and the links
to functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "cost-model.md", DOCS / "serving-cost-model.md")
FUNCTION = re.compile(r"\]\((\.\./hp_tool/\S+?\.py)#(\w+)\)")
"""Link to a function in the source. On the repository's host it opens the file; on the site it
opens the function's reference entry.
"""


def cost_sections() -> dict[str, list[Path]]:
    """Return the modules by section, in page order; a folder stands for all its modules."""
    sections: dict[str, list[Path]] = {}
    for page in PAGES:
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            paragraphs = re.findall(r"^Modules?: .*?(?:\n\n|\Z)", section, re.DOTALL | re.MULTILINE)
            named = [
                (DOCS / target).resolve()
                for target in re.findall(r"\]\((\S+?)\)", "".join(paragraphs))
            ]
            modules = [
                module
                for path in named
                for module in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
            ]
            if modules:
                sections[section.partition("\n")[0]] = modules
    return sections


def linked_functions() -> Iterator[tuple[Path, str]]:
    """Return (module, function) for every link to a function on the cost model's pages."""
    for page in PAGES:
        for target, name in FUNCTION.findall(page.read_text(encoding="utf-8")):
            yield (DOCS / target).resolve(), name
