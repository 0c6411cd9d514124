"""Pages /guide: the documentation of this version."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from fastapi import APIRouter
from fastapi import Path as PathParameter
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from hp_tool.errors import NotFoundError
from service.dashboard.page import Page, page_at, template_filter

router = APIRouter(prefix="/guide", tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideEntry:
    """A page of the guide."""

    name: str
    """Name in its URL."""
    title: str
    """Its heading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSection:
    """A section of pages."""

    title: str
    entries: tuple[GuideEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidePage(Page):
    """A page of the documentation, with the names of all pages."""

    name: str
    text: str
    """Text in Markdown."""
    sections: tuple[GuideSection, ...]

    @property
    def html(self) -> Markup:
        """The text as HTML, with links within the guide."""
        return _as_html(self.text)


def guide_folder() -> Path:
    """Return the documentation folder, in the installed service or in a checkout."""
    installed = Path(__file__).parents[1] / "guide"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "docs"


@functools.cache
def guide_sections() -> tuple[GuideSection, ...]:
    """Return the pages by section in the site's order, without generated pages."""
    folder = guide_folder()
    site = next(
        path for path in (folder / "mkdocs.yml", folder.parent / "mkdocs.yml") if path.exists()
    )
    sections = []
    for section in yaml.safe_load(site.read_text(encoding="utf-8"))["nav"]:
        ((title, pages),) = section.items()
        if isinstance(pages, list):
            listed = [
                path
                for page in pages
                for file in page.values()
                if (path := folder / file).is_file()
            ]
            entries = tuple(GuideEntry(name=path.stem, title=_heading(path)) for path in listed)
            sections.append(GuideSection(title=title, entries=entries))
    return tuple(sections)


def _heading(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").strip()


@page_at(router, "", template="guide.html", section="Guide")
def guide_index_context() -> GuidePage:
    """List the pages of the documentation by section."""
    return GuidePage(
        title="Guide", json_href="/guide.json", name="", text="", sections=guide_sections()
    )


@page_at(router, "/{name}", template="guide.html", section="Guide")
def guide_context(
    name: Annotated[str, PathParameter(max_length=40, description="A page of the guide")],
) -> GuidePage:
    """Return a page of the documentation."""
    entry = next(
        (entry for section in guide_sections() for entry in section.entries if entry.name == name),
        None,
    )
    if entry is None:
        raise NotFoundError(f"The guide has no page {name!r}; see /guide.", field="name")
    text = (guide_folder() / f"{name}.md").read_text(encoding="utf-8")
    return GuidePage(
        title=entry.title,
        json_href=f"/guide/{name}.json",
        name=name,
        text=text,
        sections=guide_sections(),
    )


@functools.cache
def _as_html(text: str) -> Markup:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for token, content in zip(tokens, [*tokens[1:], Token("inline", "", 0)], strict=True):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(content.content))
        _redirect_links(token.children or ())
    html = parser.renderer.render(tokens, parser.options, {})
    if text.startswith("# Glossary"):
        html = re.sub(
            r"<strong>([\w -]+)</strong>",
            lambda term: f'<strong id="{_anchor(term[1])}">{term[1]}</strong>',
            html,
        )
    for tag, opening, end in (
        ("pre", "<pre tabindex=0>", "</pre>"),
        ("table", '<div class="scroll" tabindex=0><table>', "</table></div>"),
    ):
        html = html.replace(f"<{tag}>", opening).replace(
            f"</{tag}>", end
        )  # scrollable regions are reachable by keyboard noqa: S704
    return Markup(html)  # noqa: S704


@functools.cache
def glossary_anchors() -> frozenset[str]:
    """Return the anchors of the glossary terms."""
    text = (guide_folder() / "glossary.md").read_text(encoding="utf-8")
    return frozenset(map(_anchor, _TERM.findall(text)))


@template_filter
def ask_term(name: str) -> Markup:
    """Escape the name, and link the first glossary term in it."""
    words = name.replace(",", "").split()
    known = next((word for word in (name, *words) if _anchor(word) in glossary_anchors()), None)
    return (
        Markup.escape(name)
        if known is None
        else _ASKED.format(name=name, term=known, anchor=_anchor(known))
    )


_TERM = re.compile(r"\*\*([\w -]+)\*\*")
_ASKED = Markup(
    '{name}<a class="ask-term" href="/guide/glossary#{anchor}" aria-label="What is {term}?">?</a>'
)


def _redirect_links(tokens: Iterable[Token]) -> None:
    """Redirect links between pages to the guide, and remove links to files in the repository."""
    for token in tokens:
        if token.type == "image":
            token.attrSet("src", f"/guide/{token.attrGet('src')}")
        if token.type != "link_open":
            continue
        page, mark, anchor = str(token.attrGet("href")).partition("#")
        if page.endswith(".md") and (guide_folder() / page).is_file() and "/" not in page:
            token.attrSet("href", f"/guide/{page.removesuffix('.md')}{mark}{anchor}")
        elif page and "://" not in page:
            del token.attrs["href"]


def _anchor(heading: str) -> str:
    """Return a heading's anchor on the site: `### A heading, of words` -> `a-heading-of-words`."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
