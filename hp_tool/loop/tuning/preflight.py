"""A check of the nodes before a search's first run.

It times single operations on all nodes at once. The search avoids nodes that are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.ports import Launcher, Store
from hp_tool.domain.records import JsonObject, Lease
from hp_tool.domain.requests import BenchmarkRequest
from hp_tool.errors import RefusedError
from hp_tool.loop.calibration.microbenchmarks import ELEMENT_BYTES, find_outliers, plan_operations
from hp_tool.loop.learning.machine import hosts_of_ranks

EVENT = "preflight"
_TIME_LIMIT_S = 900.0
_POLL_S, _LOOK_S = 0.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Result and cost of the check."""

    hosts: tuple[str, ...] = ()
    """Nodes that are slow or have a slow device. Jobs of the search avoid them."""
    gpu_seconds: float = 0.0
    """GPU-seconds of the check. They are charged to the first run."""


def preflight(
    *,
    store: Store,
    lease: Lease,
    launcher: Launcher,
    cluster: ClusterSpec,
    should_release: Callable[[], bool],
    on_event: Callable[[str, JsonObject], None],
) -> Preflight:
    """Check as many devices as one job may use, once per search.

    Later coordinators read the result. If the check fails, the search continues without it. It is
    skipped if the search is about to stop. A successor finds the job by its name.

    Raises:
        RefusedError: The site rejects such a job.
    """
    known = next(
        (each.payload for each in store.events(search_id=lease.search_id) if each.kind == EVENT),
        None,
    )
    runs = store.runs(search_id=lease.search_id)
    if known is not None or runs:
        known = {"avoided": (), "gpu_seconds": 0.0, **(known or {})}
        charged = any(run.state.ended for run in runs)
        return Preflight(
            hosts=tuple(known["avoided"]), gpu_seconds=0.0 if charged else known["gpu_seconds"]
        )
    cluster = replace(cluster, num_gpus=min(cluster.num_gpus, launcher.hardware().num_gpus))
    usual = ("fp32",) if cluster.gpu.kind == "cpu" else ELEMENT_BYTES
    precision = next(name for name in usual if name in cluster.gpu.peak_flops_per_second)
    request = BenchmarkRequest(
        run_id=EVENT,
        operations=plan_operations(cluster, precisions=[precision]),
        num_gpus=cluster.num_gpus,
        gpu=cluster.gpu.name,
        timeout_s=_TIME_LIMIT_S,
    )
    plan = replace(
        launcher.plan(request, job_name=f"{lease.search_id}.{EVENT}"), search=lease.search_id
    )
    handle, looked_at = launcher.submit(plan), time.monotonic()
    while launcher.poll([handle])[handle].is_open:
        if should_release():
            return Preflight()
        if time.monotonic() - looked_at > _LOOK_S:
            looked_at = time.monotonic()
            if store.get_search(search_id=lease.search_id).requested is not None:
                launcher.cancel(plan.job_name)
                return Preflight()
        time.sleep(_POLL_S)
    measured = launcher.fetch(handle)
    if measured.refused:
        raise RefusedError(f"the cluster rejected the job: {measured.cause}")
    hosts = hosts_of_ranks(measured, cluster)
    slow = find_outliers(measured.operations, hosts=hosts) if measured.status == "ok" else ()
    names = [each.name for each in slow if each.kind != "link"]
    avoided = tuple(
        host for host in dict.fromkeys(hosts) if any(_is_of(host, name) for name in names)
    )
    gpu_seconds = cluster.num_gpus * (measured.wall_s or 0.0)
    payload: JsonObject = {
        "status": measured.status,
        "cause": measured.cause,
        "gpu_seconds": gpu_seconds,
    }
    payload |= {"slow": [asdict(each) for each in slow], "avoided": list(avoided)}
    store.append_event(lease=lease, kind=EVENT, payload=payload)
    on_event(EVENT, payload)
    return Preflight(hosts=avoided, gpu_seconds=gpu_seconds)


def _is_of(host: str, name: str) -> bool:
    return name == host or name.startswith(f"{host} rank ")
