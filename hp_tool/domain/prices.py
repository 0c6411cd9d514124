"""Rental prices of machines, and CO2 emissions of electricity grids."""

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.fields import NonNegative, Strict

Market = Literal["on_demand", "reserved", "spot"]
PRICED = "priced"
"""Name that stands for every machine in the price list, in place of a cluster or GPU name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Strict):
    """A machine for rent, as listed on one page on one day. Prices are in US dollars per
    GPU-hour.
    """

    name: str
    provider: str
    node_type: str | None = None
    """The catalogue's server or cloud instance; None: a server and network that are usual for the
    GPU.
    """
    gpu: str | None = None
    """Catalogue name of the GPU; None: that of node_type."""
    region: str | None = None
    grid: str | None = None
    """Catalogue name of the electricity grid; None: the page states no location."""
    on_demand: NonNegative | None = None
    reserved: NonNegative | None = None
    """Lowest price for a longer commitment."""
    spot: NonNegative | None = None
    interruptions_per_node_day: NonNegative | None = None
    """How often the provider reclaims a spot node, in interruptions per node and day, if
    published.
    """
    date: str
    """Date of the page, YYYY-MM-DD."""
    source: str
    """URL of the page."""
    line: str
    """Line of the page with the price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Strict):
    """The electricity grid of a region."""

    name: str
    kg_per_kwh: NonNegative
    """kg of CO2 equivalent per kWh, averaged over a year."""
    line: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Cost of a row in a ranking of machines; in other rankings, no field is set."""

    cluster: str | None = None
    """Name of the row's machine; `set` has its description."""
    price: float | None = None
    """US dollars per GPU-hour."""
    price_date: str | None = None
    """Date of the price; None: the query's or the catalogue's own price."""
    network_bandwidth_bytes_per_second: float | None = None
    """Network bandwidth between nodes, per GPU and direction; None if the row uses a single NVLink
    domain, or in other rankings.
    """
    network_assumed: bool | None = None
    """Whether this network is assumed to be that of usual servers with this GPU, because neither
    the query nor the price list specifies it. None in other rankings.
    """
    cost: float | None = None
    """US dollars. Training: the whole training, including failures. Serving: one hour of all
    devices.
    """
    cost_interval: tuple[float, float] | None = None
    """90% interval, from the interval of the step time."""
    days_interval: tuple[float, float] | None = None
    """90% interval of calendar days."""
    deadline_probability: float | None = None
    """Probability that the training ends within constraints.max_days."""
    energy: float | None = None
    """Joules of the whole training, without interruptions."""
    co2_kg: float | None = None
    """kg of CO2 equivalent of that energy; None if the grid is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRanked:
    """A machine without a row in a ranking of machines, and the reason."""

    cluster: str
    code: str
    message: str
