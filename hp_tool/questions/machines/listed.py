"""List the machines that a query compares, and the numbers of devices to try on each."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hp_tool import catalog
from hp_tool.catalog.prices import grid, offers
from hp_tool.domain import bounds
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.prices import PRICED, Offer
from hp_tool.domain.query import Query
from hp_tool.errors import InputError

MAX_MACHINES = 4_096
"""Maximum number of machines in one comparison, where each number of devices counts as a
machine.
"""
MAX_GPUS = 4_096
"""Maximum number of devices to try if the query leaves the number open."""
PLACE_KEYS = ("node_type", "gpu", "num_gpus")
"""Keys of `cluster` that accept lists. Each combination of values is one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of a comparison."""

    cluster: ClusterQuery
    """The query's `cluster` for this machine. num_gpus is None if the query leaves it open."""
    priced: bool = False
    """Whether the machine is in the price list."""
    date: str | None = None
    """Date of the listed price; None if the query sets the price."""

    @property
    def name(self) -> str:
        """Name such as `8 x aws-p5.48xlarge`, or `aws-p5.48xlarge` if the number of devices is
        open.
        """
        cluster = self.cluster
        gpu = getattr(cluster.gpu, "name", cluster.gpu)
        name = cluster.name or cluster.node_type or gpu or "a machine"
        return f"{cluster.num_gpus} x {name}" if cluster.num_gpus else str(name)


def list_machines(query: Query) -> tuple[Machine, ...]:
    """Return the machines of a query, in the order of its list.

    `cluster: priced` stands for all machines of the price list that have a price on the query's
    market.

    Raises:
        InputError: The query has no machine or too many.
    """
    listed: list[Machine] = []
    clusters = query.cluster if isinstance(query.cluster, tuple) else (query.cluster,)
    bounds.check_values(len(clusters), field="cluster")
    for cluster in clusters:
        listed += itertools.islice(_cluster_machines(cluster), MAX_MACHINES + 1 - len(listed))
    if len(listed) > MAX_MACHINES:
        raise InputError(
            f"A comparison supports at most {MAX_MACHINES:,} machines; list fewer.",
            field="cluster",
        )
    if not listed:
        raise InputError(
            "No listed machine has a price for this market. Set another market.",
            field="cluster.market",
            code="no_price",
        )
    return tuple(
        {repr(machine): machine for machine in listed}.values()
    )  # Duplicate machines count once.


def _cluster_machines(cluster: str | ClusterQuery) -> Iterator[Machine]:
    if isinstance(cluster, str):
        cluster = ClusterQuery(node_type=cluster)
    lists = [
        value if isinstance(value := getattr(cluster, name), tuple) else (value,)
        for name in PLACE_KEYS
    ]
    for name, values in zip(PLACE_KEYS, lists, strict=True):
        bounds.check_values(len(values), field=f"cluster.{name}")
    for node_type, gpu, num_gpus in itertools.product(*lists):
        combination = replace(cluster, node_type=node_type, gpu=gpu, num_gpus=num_gpus)
        if PRICED in (node_type, gpu):
            yield from _priced_machines(combination, kind=None if gpu == PRICED else gpu)
        else:
            yield Machine(cluster=combination)


def _priced_machines(wanted: ClusterQuery, *, kind: str | None) -> Iterator[Machine]:
    """Yield the machines in the price list that match the query's GPU and node type, if set.

    Values in the query override those in the price list.
    """
    device = None if kind is None else catalog.gpu(kind, field="cluster.gpu").name
    node_name = wanted.node_type if wanted.node_type != PRICED else None
    node = (
        None if node_name is None else catalog.node_type(node_name, field="cluster.node_type").name
    )
    for offer in offers():
        price = getattr(offer, wanted.market or "on_demand")
        has = offer.gpu or catalog.node_type(offer.node_type or "").gpu
        if (
            price is None
            or device not in (None, catalog.gpu(has).name)
            or node not in (None, offer.node_type)
        ):
            continue
        listed_values: dict[str, Any] = {
            "name": offer.name,
            "price_per_gpu_hour": price,
            "market": None,
        }
        if offer.grid is not None:
            listed_values["grid_carbon_kg_per_kwh"] = grid(offer.grid).kg_per_kwh
        if wanted.market == "spot":
            listed_values["interruptions_per_node_day"] = _interruption_rate(wanted, offer)
        query_values = {
            name: value
            for name in listed_values
            if name != "market" and (value := getattr(wanted, name)) is not None
        }
        date = None if "price_per_gpu_hour" in query_values else offer.date
        cluster = replace(
            wanted, node_type=offer.node_type, gpu=offer.gpu, **listed_values | query_values
        )
        yield Machine(cluster=cluster, priced=True, date=date)


def _interruption_rate(wanted: ClusterQuery, offer: Offer) -> float:
    rate = (
        offer.interruptions_per_node_day
        if wanted.interruptions_per_node_day is None
        else wanted.interruptions_per_node_day
    )
    if rate is None:
        raise InputError(
            f"{offer.provider} does not publish how often it reclaims spot nodes; set "
            "interruptions_per_node_day",
            field="cluster.interruptions_per_node_day",
            code="missing_field",
        )
    return rate


def device_counts(query: Query, *, listed: bool) -> tuple[int, ...]:
    """Return the numbers of devices to try for a query with one machine.

    If the query does not set the number but has a deadline or budget, the numbers are 1, 2, 4, ...
    nodes, up to MAX_GPUS devices. Otherwise, it is one node for a machine of the price list.

    Raises:
        InputError: Neither the query nor the machine determines a number.
    """
    cluster = query.cluster
    assert isinstance(cluster, ClusterQuery)  # Set when the machines were listed.
    bounded = query.constraints.max_days is not None or query.constraints.max_cost is not None
    num_gpus = cluster.num_gpus or (
        catalog.node_type(cluster.node_type).num_gpus if cluster.node_type else None
    )
    if num_gpus is not None or not (bounded or listed):
        return (catalog.cluster(cluster).num_gpus,)
    node = (
        catalog.cluster(cluster if cluster.node_type else replace(cluster, num_gpus=1)).node_gpus
        or 1
    )
    if not bounded:
        return (node,)
    return tuple(node << power for power in range((MAX_GPUS // node).bit_length()))
