"""Page /find: find pages, models, machines and searches by words in their names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query

from hp_tool.domain.ports import Store
from service.api import catalog
from service.api.dependencies import StoreDep
from service.dashboard.formats import subject
from service.dashboard.guide import guide_sections
from service.dashboard.page import SECTIONS, Page, address, page_at

MAX_PER_KIND = 5
"""Maximum number of results per kind."""
NUM_RECENT = 100
"""Number of newest searches that are also found by model, cluster and ID. Older searches are found
only by their labels.
"""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One search result."""

    kind: str
    name: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindPage(Page):
    """Search results, at most `MAX_PER_KIND` of each kind."""

    words: str
    found: tuple[Found, ...]


@page_at(router, "/find", template="find.html", section="Find")
def find_context(
    store: StoreDep, q: Annotated[str, Query(max_length=200, description="Words of a name")] = ""
) -> FindPage:
    """Return pages, models, machines and searches whose names contain all words."""
    words = q.casefold().split()
    counts: dict[str, int] = {}
    found = []
    exact = " ".join(words)
    named = [each for each in _pages_named(store, words) if _contains(each.name, words)]
    named.sort(key=lambda each: each.name.casefold() != exact)
    for each in (*named[:MAX_PER_KIND], *_searches(store, words), *named[MAX_PER_KIND:]):
        counts[each.kind] = counts.get(each.kind, 0) + 1
        if counts[each.kind] <= MAX_PER_KIND:
            found.append(each)
    return FindPage(
        title="Find", json_href=address("/find.json", {"q": q}), words=q, found=tuple(found)
    )


def _contains(text: str, words: list[str]) -> bool:
    return all(word in text.casefold() for word in words)


def _pages_named(store: Store, words: list[str]) -> Iterator[Found]:
    """Yield pages; for a non-empty query, also models, GPUs, clusters and pages of the guide."""
    yield from (Found(kind="page", name=name, href=href) for _, name, href, _ in SECTIONS)
    machines = "/explorer?cluster.node_type=priced"
    yield Found(kind="page", name="Machines and prices", href=machines)
    for kind, items in (
        ("model", catalog.models(store).items),
        ("GPU", catalog.gpus().items),
        ("cluster", catalog.clusters(store).items),
    ):
        for item in items if words else ():
            yield Found(kind=kind, name=item.name, href=f"/{kind.lower()}s/{item.name}")
    for section in guide_sections():
        for entry in section.entries if words else ():
            yield Found(kind="guide", name=entry.title, href=f"/guide/{entry.name}")


def _searches(store: Store, words: list[str]) -> Iterator[Found]:
    """Yield searches with the words in their labels, then recent ones with the words elsewhere."""
    labelled = store.list_searches(words=" ".join(words), limit=MAX_PER_KIND).items if words else ()
    recent = (
        record
        for record in store.list_searches(limit=NUM_RECENT).items
        if _contains(f"{record.label.name} {subject(record.query)} {record.id}", words)
    )
    for record in {each.id: each for each in (*labelled, *recent)}.values():
        name = record.label.name or subject(record.query)
        yield Found(kind="search", name=name, href=f"/searches/{record.id}")
