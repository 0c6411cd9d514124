"""Rental prices of machines and emissions of power grids. User files replace built-in entries."""

import functools

from hp_tool.catalog import hardware, library, records
from hp_tool.domain.prices import Grid, Offer


def offers() -> tuple[Offer, ...]:
    """Return all priced machines, sorted by name."""
    return tuple(_offer(entry) for entry in library.entries("prices"))


def lowest_offers() -> dict[str, Offer]:
    """Return, by GPU name, the offer with the lowest on-demand price."""
    lowest: dict[str, tuple[float, Offer]] = {}
    for offer in offers():
        name = hardware.gpu(offer.gpu or hardware.node_type(offer.node_type or "").gpu).name
        if offer.on_demand is not None and (
            name not in lowest or offer.on_demand < lowest[name][0]
        ):
            lowest[name] = offer.on_demand, offer
    return {name: offer for name, (_, offer) in lowest.items()}


def grid(name: str) -> Grid:
    """Return the power grid of a region.

    Raises:
        NotFoundError: The name is unknown; the error names the nearest known names.
    """
    return _grid(library.entry("grids", name))


@functools.lru_cache(maxsize=1024)
def _offer(entry: library.Entry) -> Offer:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    return records.build(Offer, fields, field="price", origin=entry.path)


@functools.lru_cache(maxsize=1024)
def _grid(entry: library.Entry) -> Grid:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    return records.build(Grid, fields, field="grid", origin=entry.path)
