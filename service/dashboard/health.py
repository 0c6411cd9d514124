"""Detect problems of a search's cluster from its runs: slowdowns, and slow or failed nodes."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_tool.domain.measurement import DeviceState
from hp_tool.domain.ports import Store
from hp_tool.domain.records import RunRecord
from hp_tool.loop.search.charges import failed_hosts
from hp_tool.loop.tuning.preflight import EVENT
from service.dashboard import formats

NUM_RECENT_RUNS = 20
"""Number of newest runs to use."""
MIN_RUNS = 3
"""Minimum number of runs from which a drift is reported."""
MIN_CLOCK_RATIO = 0.9
"""Fraction of the peers' median clock below which a GPU is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node, a GPU or a link, and the reason to check it."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Signs that a cluster has changed."""

    drift_fraction: float | None = None
    """Median of measured / expected - 1 over the newest runs; None until predictions are calibrated
    by runs.
    """
    runs: int = 0
    """Number of runs in the median."""
    slow_nodes: tuple[SlowNode, ...] = ()


def cluster_health(store: Store, *, search_ids: Iterable[str]) -> Health:
    """Return the cluster's health from the newest runs of the searches visible to the caller."""
    ratios: list[float] = []
    nodes: dict[str, str] = {}
    for search_id in search_ids:
        newest = store.list_runs(
            search_id=search_id, limit=NUM_RECENT_RUNS, oldest_first=False
        ).items
        ratios += [ratio for run in newest if (ratio := _relative_excess(run)) is not None]
        events = store.events(search_id=search_id)
        slow = (
            each
            for event in events
            if event.kind == EVENT
            for each in event.payload.get("slow", ())
        )
        nodes |= {
            each["name"]: f"{each['slowdown']:.2f} times as slow as its peers before the first run"
            for each in slow
        }
        nodes |= dict.fromkeys(failed_hosts(newest), "at least two runs failed on this node")
        nodes |= _lagging_hosts(newest)
    return Health(
        drift_fraction=statistics.median(ratios) if len(ratios) >= MIN_RUNS else None,
        runs=len(ratios),
        slow_nodes=tuple(SlowNode(name=name, why=why) for name, why in nodes.items()),
    )


def _relative_excess(run: RunRecord) -> float | None:
    expected_s, measured_s = (
        run.predicted.get("calibrated_step_s"),
        run.measurement and run.measurement.objective_s,
    )
    # Nothing had been measured when the first run was chosen.
    return measured_s / expected_s - 1.0 if expected_s and measured_s and run.number else None


def _lagging_hosts(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return hosts with GPUs that throttle, have errors, or are slower than others in a run."""
    lagging: dict[str, str] = {}
    for run in runs:
        devices: Sequence[DeviceState] = run.measurement.devices if run.measurement else ()
        clocks = [device.sm_clock_hz for device in devices if device.sm_clock_hz]
        median_hz = statistics.median(clocks) if clocks else 0.0
        for device in devices:
            if device.uncorrected_ecc_errors:
                lagging[device.host] = f"{device.uncorrected_ecc_errors} uncorrected memory errors"
            elif device.sm_clock_hz and device.sm_clock_hz < MIN_CLOCK_RATIO * median_hz:
                slower = formats.share(1.0 - device.sm_clock_hz / median_hz)
                lagging[device.host] = f"a GPU clock is {slower} below that of the other GPUs" + (
                    f", throttled by {device.throttled_by}" if device.throttled_by else ""
                )
    return lagging
