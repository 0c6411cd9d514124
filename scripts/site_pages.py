"""Generate pages of the documentation site from code (an mkdocs hook).

The pages are commands, routes, Python, every formula of the cost model, README, CONTRIBUTING,
CHANGELOG, the notebooks, and openapi.json. Links from docs/ to such files lead to these pages;
other links out of docs/ are removed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_sections import cost_sections
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files in the root of the repository, and their pages."""
PACKAGES = {
    "cost": "Formulas",
    "space": "Space",
    "calibration": "Calibration",
    "sizing": "Sizing",
    "domain": "Types",
}
"""Packages of hp_tool in which each module has a page."""
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
"""A Markdown link or image."""


def modules(package: str) -> list[Path]:
    """Return the package's modules with documentation, sorted by name."""
    files = sorted((ROOT / "hp_tool" / package).rglob("*.py"))
    return [
        path for path in files if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]


def page_of(module: Path) -> str:
    """Return the page of a module: `cost/memory.md` for `hp_tool/cost/memory.py`. The page of a
    package is its index.
    """
    path = module.relative_to(ROOT / "hp_tool").with_suffix(".md")
    return str(path.with_name("index.md") if path.stem == "__init__" else path)


def _dotted(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a section for each package to the navigation. Modules of the cost model are listed under
    the headings of its pages.
    """
    nav: list[Any] = config.nav or []
    for package, title in PACKAGES.items():
        documented = modules(package)
        sections = [
            {heading: [page_of(module) for module in named if module in documented]}
            for heading, named in (cost_sections().items() if package == "cost" else ())
        ]
        nav.append({title: sections or [page_of(module) for module in documented]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from service.describe import api_description

    api = api_description()
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in TOP.items()}
    pages |= {"reference/commands.md": commands(), "reference/http.md": routes(json.loads(api))}
    pages |= {"reference/python.md": python(), "openapi.json": api}
    pages |= {
        f"notebooks/{path.stem}.md": notebook(path)
        for path in sorted((ROOT / "examples").glob("*.ipynb"))
    }
    for package in PACKAGES:
        for module in modules(package):
            dotted = _dotted(module)
            members = "\n    options:\n      members: false" if module.stem == "__init__" else ""
            pages[page_of(module)] = (
                f"# {dotted.removeprefix('hp_tool.')}\n\n::: {dotted}{members}\n"
            )
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt links: files in the root have another address on the site, and links to code lead to
    its page, if any.
    """
    source = page.file.src_uri
    root = next(
        (ROOT / name for name, target in TOP.items() if target == source),
        Path(config.docs_dir) / source,
    )

    def mended(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = (root.parent / target).resolve()
        destination = _page_for(path, files)
        if destination is None:
            return text
        up = "../" * source.count("/")
        # A function, whose entry in the reference is its full name.
        if anchor and path.suffix == ".py":
            anchor = f"#{_dotted(path)}.{anchor[1:]}"
        return f"[{text}]({up}{destination}{anchor})"

    return LINK.sub(mended, markdown)


def _page_for(path: Path, files: Files) -> str | None:
    if path.is_relative_to(ROOT / "docs"):
        name = str(path.relative_to(ROOT / "docs"))
    elif path.is_relative_to(ROOT / "hp_tool"):
        name = page_of(path / "__init__.py" if path.is_dir() else path)
    else:
        name = TOP.get(path.name, "") if path.parent == ROOT else ""
    return name if files.get_file_from_path(name) else None


def notebook(path: Path) -> str:
    """Return the cells of a notebook and their output as a page."""

    def shown(cell: Mapping[str, Any]) -> str:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            return source
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        return f"```python\n{source}\n```" + (
            f"\n\n```text\n{printed.rstrip()}\n```" if printed else ""
        )

    cells = [shown(cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    return "\n\n".join([*cells, f"This page is the notebook `examples/{path.name}`."]) + "\n"


def commands() -> str:
    """Return the page of all commands, with arguments and options."""
    import typer
    from typer.cli import get_docs_for_click

    from hp_tool.cli.main import build

    command = typer.main.get_command(build())
    docs = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="hp-tool", title="Commands"
    )
    # QUERY in angle or square brackets is neither HTML nor a link
    return re.sub(r"<(?=[A-Z])", "&lt;", docs)


def routes(api_description: Mapping[str, Any]) -> str:
    """Return the page of all routes, with parameters and answers. `description` is the content of
    /openapi.json.
    """
    lines = [
        "# HTTP",
        "",
        api_description["info"]["description"],
        "",
        "`GET /openapi.json` has the schemas; [as a file](../openapi.json).",
        "",
    ]
    for path, methods in api_description["paths"].items():
        for method, route in methods.items():
            lines += [
                f"## {method.upper()} {path}",
                "",
                route.get("description", route.get("summary", "")),
                "",
            ]
            rows = [
                (p["name"], p["in"], (p.get("description") or "").replace("|", "\\|"))
                for p in route.get("parameters", ())
            ]
            if rows:
                lines += [
                    "| parameter | in | |",
                    "|---|---|---|",
                    *(f"| `{a}` | {b} | {c} |" for a, b, c in rows),
                    "",
                ]
            answers = ", ".join(
                f"{code} {answer.get('description', '')}"
                for code, answer in route["responses"].items()
            )
            lines += [f"Answers: {answers}", ""]
    return "\n".join(lines)


def python() -> str:
    """Return the page of the functions of `import hp_tool`, with their results."""
    return (
        "# Python\n\n"
        + "\n\n".join(f"::: hp_tool.{name}" for name in ("api", "questions.answers", "errors"))
        + "\n"
    )
