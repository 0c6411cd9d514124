"""What machines cost to rent, and what the grid at a place emits."""

from dataclasses import dataclass
from typing import Literal

from hp_tool.domain.fields import NonNegative, Strict

Market = Literal["on_demand", "reserved", "spot"]
PRICED = "priced"
"""In place of a cluster's or a GPU's name: every machine of the price list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Strict):
    """A machine that can be rented, as one page states it on one day. Prices are US dollars of a
    GPU-hour.
    """

    name: str
    provider: str
    node_type: str | None = None
    """The server or cloud instance of the catalogue; None: the GPU's usual server and network are
    assumed.
    """
    gpu: str | None = None
    """Catalogue name of its devices; None: those of node_type."""
    region: str | None = None
    grid: str | None = None
    """Catalogue name of the grid that feeds it; None: the page does not say where it stands."""
    on_demand: NonNegative | None = None
    reserved: NonNegative | None = None
    """The lowest that is promised for a longer term."""
    spot: NonNegative | None = None
    interruptions_per_node_day: NonNegative | None = None
    """How often the provider takes a spot node back, if published."""
    date: str
    """Day on which the page said so, YYYY-MM-DD."""
    source: str
    """The page's address."""
    line: str
    """The line of it that states the price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Strict):
    """The electricity of a place."""

    name: str
    kg_per_kwh: NonNegative
    """kg of CO2 equivalent, a year's average."""
    line: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What a row of a ranking over several machines costs; of other rankings nothing is set."""

    cluster: str | None = None
    """Name of the machine that the row runs on; `set` has its description."""
    price: float | None = None
    """US dollars of a GPU-hour."""
    price_date: str | None = None
    """Day of which the price is; None: the query's or the catalogue's own."""
    network_bandwidth_bytes_per_second: float | None = None
    """Between nodes, per GPU and direction; None if the row uses one NVLink domain, or in other
    rankings.
    """
    network_assumed: bool | None = None
    """Neither the query nor the price list states that network: it is the usual one of servers with
    this GPU. None in other rankings.
    """
    cost: float | None = None
    """US dollars: of the whole training, failures included; of serving, of an hour of all its
    devices.
    """
    cost_interval: tuple[float, float] | None = None
    """90%, by the interval of the step time."""
    days_interval: tuple[float, float] | None = None
    """90%, of calendar days."""
    deadline_probability: float | None = None
    """Chance that the training ends within constraints.max_days."""
    energy: float | None = None
    """Joules of the whole training, uninterrupted."""
    co2_kg: float | None = None
    """kg of CO2 equivalent of that energy; None where the grid is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRanked:
    """A machine, or a number of them, that a ranking over several has no row of."""

    cluster: str
    code: str
    message: str
