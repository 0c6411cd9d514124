#!/usr/bin/env python3
"""Check that all files contain the version in `hp_tool/__init__.py`, and that a tag matches it.

`python scripts/release_check.py [TAG]` prints the differences, and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """Return `__version__` of hp_tool without importing the package."""
    for node in ast.parse((root / "hp_tool/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("hp_tool/__init__.py: no __version__")


def differences(tag: str | None, root: Path = ROOT) -> list[str]:
    """Return one line for each file, or for the tag, that contains another version."""
    expected = version(root)

    def text(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    server = json.loads(text("server.json"))
    (package,) = server["packages"]
    released = re.search(r"^date-released: (\S+)$", text("CITATION.cff"), re.MULTILINE)
    heading = f"## {expected} ({released[1] if released else 'no date'})"
    versions_by_place = {
        "CITATION.cff": re.findall(r"^version: (\S+)$", text("CITATION.cff"), re.MULTILINE),
        "server.json": [server["version"], package["version"]],
        "server.json, runtimeArguments": re.findall(r"==([\w.]+)", json.dumps(package)),
        "tag": [tag.removeprefix("v")] if tag is not None else [],
    }
    problems = [
        f"{place}: {other}, not {expected}"
        for place, versions in versions_by_place.items()
        for other in versions
        if other != expected
    ]
    if tag is not None and not tag.startswith("v"):
        problems.append(f"tag: {tag} does not start with v")
    if f"\n{heading}\n" not in text("CHANGELOG.md"):
        problems.append(f"CHANGELOG.md: no heading {heading!r} (the date is that of CITATION.cff)")
    names = {server["name"], *re.findall(r"mcp-name: (\S+)", text("README.md"))}
    if len(names) != 1 or "mcp-name: " not in text("README.md"):
        problems.append("README.md: its comment mcp-name is not the name of server.json")
    return problems


def main() -> None:
    """Print the differences and exit."""
    tag = sys.argv[1] if len(sys.argv) > 1 else None
    if problems := differences(tag):
        sys.exit("\n".join(problems))
    print(f"{version()}: all files agree")


if __name__ == "__main__":
    main()
