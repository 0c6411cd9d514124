"""What machines cost to rent, by provider, and what grids emit; one's own files replace built-in entries of the same name."""

import functools

from hp_tool.catalog import library, records
from hp_tool.domain.prices import Grid, Offer


def offers() -> tuple[Offer, ...]:
    """All machines with a price, by name."""
    return tuple(_offer(entry) for entry in library.entries("prices"))


def grid(name: str) -> Grid:
    """The grid of a place; NotFoundError names the nearest ones."""
    return _grid(library.entry("grids", name))


@functools.lru_cache(maxsize=1024)
def _offer(entry: library.Entry) -> Offer:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    return records.build(Offer, fields, field="price", origin=entry.path)


@functools.lru_cache(maxsize=1024)
def _grid(entry: library.Entry) -> Grid:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    return records.build(Grid, fields, field="grid", origin=entry.path)
