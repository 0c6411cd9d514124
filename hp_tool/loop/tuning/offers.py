"""Devices and clusters that workers offer, and the check that one of them can run a search."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

from hp_tool import catalog
from hp_tool.catalog.hardware import cluster_runs
from hp_tool.cluster import launchers
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.ports import Launcher
from hp_tool.domain.query import Query
from hp_tool.domain.records import Offer, WorkerRecord
from hp_tool.errors import HpToolError, InputError
from hp_tool.extras import missing
from hp_tool.loop.tuning.clusters import LOCAL, cluster_launcher, launcher_name
from hp_tool.loop.tuning.run import build_search

LOOKED_S = 300.0
"""Seconds for which this host's devices are cached. A driver may start after the worker does."""


def find_offers() -> tuple[Offer, ...]:
    """Return what a worker in this process can run.

    These are this host's devices, and clusters with launcher options.
    """
    profiler = not missing("profiler")

    def each() -> Iterator[Offer]:
        yield from _host(profiler, at=int(time.monotonic() // LOOKED_S))
        for name, create in _launchers():
            try:
                hardware = create().hardware()
            except (
                HpToolError,
                OSError,
            ):  # Options are missing or wrong on this host; `hp-tool doctor` reports them.
                continue
            yield Offer(launcher=name, gpu=hardware.gpu, num_gpus=hardware.num_gpus)

    return tuple(dict.fromkeys(each()))


@lru_cache(maxsize=1)
def _host(profiler: bool, *, at: int) -> tuple[Offer, ...]:
    """Return this host's GPUs and CPU.

    They are cached for LOOKED_S, because querying the driver is slow.
    """
    each = (launchers.create(LOCAL, cpu_only=cpu_only).hardware() for cpu_only in (False, True))
    return tuple(
        Offer(launcher=LOCAL, gpu=one.gpu, num_gpus=one.num_gpus, profiler=profiler) for one in each
    )


def _launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Yield launchers that have their own options file, and those of the catalogue's clusters."""
    for name in launchers.names():
        if name != LOCAL:
            yield name, partial(launchers.create, name)
    for cluster in catalog.names("clusters"):
        try:
            runs = cluster_runs(cluster)
        except HpToolError:  # An unreadable entry does not hide others.
            continue
        if runs is not None and runs.launcher != LOCAL:
            yield runs.launcher, partial(cluster_launcher, cluster)


def check_offered(query: Query, workers: Sequence[WorkerRecord]) -> None:
    """Check that a live worker can run the query. Without workers, accept every query.

    Raises:
        InputError: Workers are alive, but none can run the query (`launcher_mismatch`).
    """
    if not workers:
        return
    cluster, launcher = catalog.cluster(query.cluster), launcher_name(query)
    matching = [
        offer
        for worker in workers
        for offer in worker.offers
        if (offer.launcher, offer.gpu) == (launcher, cluster.gpu.name)
        and (offer.profiler or query.trainer is not None)
    ]
    if not matching:
        raise InputError(
            f"no live worker can run this search: it requires {cluster.gpu.name} with launcher "
            f"{launcher}, but the workers have {offers_in_words(workers)}. Start `hp-tool worker` "
            "on such devices, set a launcher or cluster that they have, or use "
            "`hp-tool recommend`",
            field="search.launcher",
            code="launcher_mismatch",
        )
    most = max(offer.num_gpus for offer in matching)
    # Reduced runs may represent the complete configuration, so the search decides.
    if most < cluster.num_gpus:
        hardware = Hardware(gpu=cluster.gpu.name, num_gpus=most)
        build_search(query=query, query_json={}, hardware=hardware)


def offers_in_words(workers: Sequence[WorkerRecord]) -> str:
    """Describe all workers' offers: `8 x h100-sxm-80gb via local, 64 x cpu via slurm`.

    Equal offers are listed once.
    """
    each = dict.fromkeys(offer for worker in workers for offer in worker.offers)
    return (
        ", ".join(f"{offer.num_gpus} x {offer.gpu} via {offer.launcher}" for offer in each)
        or "none"
    )
