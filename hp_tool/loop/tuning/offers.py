"""What a worker can run, and whether any live one can run a query: asked before a search is
stored.
"""

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
"""This host's devices are looked for anew: a driver may come up after its worker."""


def offers() -> tuple[Offer, ...]:
    """What a worker in this process can run: this host's devices, and the clusters whose options it
    has.
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
            ):  # no options for it here, or options that are wrong: `hp-tool doctor` says so
                continue
            yield Offer(launcher=name, gpu=hardware.gpu, num_gpus=hardware.num_gpus)

    return tuple(dict.fromkeys(each()))


@lru_cache(maxsize=1)
def _host(profiler: bool, *, at: int) -> tuple[Offer, ...]:
    """Its GPUs, and its processor, on which a query about cpu runs. Asking the driver takes a
    while: once per LOOKED_S.
    """
    each = (launchers.create(LOCAL, cpu_only=cpu_only).hardware() for cpu_only in (False, True))
    return tuple(
        Offer(launcher=LOCAL, gpu=one.gpu, num_gpus=one.num_gpus, profiler=profiler) for one in each
    )


def _launchers() -> Iterator[tuple[str, Callable[[], Launcher]]]:
    """Those that reach a cluster by their own file of options, and those of the catalogue's
    clusters.
    """
    for name in launchers.names():
        if name != LOCAL:
            yield name, partial(launchers.create, name)
    for cluster in catalog.names("clusters"):
        try:
            runs = cluster_runs(cluster)
        except HpToolError:  # an entry that cannot be read hides no other
            continue
        if runs is not None and runs.launcher != LOCAL:
            yield runs.launcher, partial(cluster_launcher, cluster)


def check_offered(query: Query, workers: Sequence[WorkerRecord]) -> None:
    """Raise InputError `launcher_mismatch` where workers are alive and none can run the query.

    Without a worker nothing is refused: the right one may be started later.
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
            f"no live worker can run this: it asks for {cluster.gpu.name} by launcher {launcher}, "
            "and they have "
            f"{offers_in_words(workers)}. Start `hp-tool worker` where such devices are, name a "
            "launcher or cluster that they "
            "have, or ask for predictions alone (`hp-tool recommend`)",
            field="search.launcher",
            code="launcher_mismatch",
        )
    most = max(offer.num_gpus for offer in matching)
    if most < cluster.num_gpus:  # smaller runs may stand for the whole: the search's own rules know
        hardware = Hardware(gpu=cluster.gpu.name, num_gpus=most)
        build_search(query=query, query_json={}, hardware=hardware)


def offers_in_words(workers: Sequence[WorkerRecord]) -> str:
    """`8 x h100-sxm-80gb by local, 64 x cpu by slurm`; of all workers, each once."""
    each = dict.fromkeys(offer for worker in workers for offer in worker.offers)
    return (
        ", ".join(f"{offer.num_gpus} x {offer.gpu} by {offer.launcher}" for offer in each) or "none"
    )
