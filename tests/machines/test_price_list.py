"""Every price says who stated it, where and when, and its line holds the number."""

from __future__ import annotations

import datetime
import re

import pytest

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.catalog.prices import grid, offers
from hp_tool.domain.hardware import ClusterQuery


def test_a_price_has_its_page_its_day_and_its_line(subtests: pytest.Subtests) -> None:
    for offer in offers():
        with subtests.test(offer=str(offer)):
            assert offer.source.startswith("https://")
            assert (
                datetime.date(2026, 1, 1)
                <= datetime.date.fromisoformat(offer.date)
                <= datetime.date(2026, 12, 31)
            )
            numbers = [float(number) for number in re.findall(r"\d+\.\d+|\d+", offer.line)]
            prices = [
                price
                for price in (offer.on_demand, offer.reserved, offer.spot)
                if price is not None
            ]
            assert prices and all(price in numbers for price in prices)
            one = ClusterQuery(node_type=offer.node_type, gpu=offer.gpu, num_gpus=1)
            assert catalog.cluster(one).gpu.memory_bytes > 0
            if offer.grid is not None:
                assert offer.region is not None and 0.0 < grid(offer.grid).kg_per_kwh < 1.0


def test_a_grid_has_its_line() -> None:
    for entry in library.entries("grids"):
        assert float(grid(entry.name).line.rsplit(",", 1)[1]) == pytest.approx(
            1e3 * grid(entry.name).kg_per_kwh
        )
        assert grid(entry.name).source


def test_where_a_catalogue_machine_has_a_price_too_it_is_the_same() -> None:
    for offer in offers():
        own = catalog.node_type(offer.node_type).price_per_gpu_hour if offer.node_type else None
        assert own is None or own == pytest.approx(offer.on_demand, rel=1e-3), offer.name
