"""Page /find: pages, models, machines and searches by words of their names."""

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

MOST = 8
"""Maximum results of one kind."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One result."""

    kind: str
    name: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindPage(Page):
    """What was found, at most `MOST` of each kind."""

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
    for each in _all(store, q.strip()):
        if each.kind != "search" and not all(word in each.name.casefold() for word in words):
            continue
        counts[each.kind] = counts.get(each.kind, 0) + 1
        if counts[each.kind] <= MOST:
            found.append(each)
    return FindPage(
        title="Find", json_href=address("/find.json", {"q": q}), words=q, found=tuple(found)
    )


def _all(store: Store, words: str) -> Iterator[Found]:
    """Yield everything that has a name; searches only those with the words."""
    yield from (Found(kind="page", name=name, href=href) for _, name, href, _ in SECTIONS)
    machines = "/explorer?cluster.node_type=priced"
    yield Found(kind="page", name="Machines and prices", href=machines)
    for record in store.list_searches(words=words or None, limit=MOST).items:
        name = record.label.name or subject(record.query)
        yield Found(kind="search", name=name, href=f"/searches/{record.id}")
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
