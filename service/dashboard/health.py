"""What a search's runs say of its cluster: whether runs take longer than expected, and which nodes
lag or failed.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hp_tool.domain.measurement import DeviceState
from hp_tool.domain.ports import Store
from hp_tool.domain.records import RunRecord
from hp_tool.loop.search.charges import failed_hosts
from hp_tool.loop.tuning.preflight import EVENT
from service.dashboard import formats

RECENT = 20
"""Newest runs of a search that are looked at."""
FEWEST = 3
"""Runs that tell of a drift."""
LAGGING = 0.9
"""Share of its peers' median clock below which a GPU's is worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node, a GPU or a link, and why to look at it."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Signs of a cluster that is not what it was."""

    drift_fraction: float | None = None
    """Median of measured / expected - 1 of the newest runs; None before some runs were expected by
    measurements.
    """
    runs: int = 0
    """How many it is the median of."""
    slow_nodes: tuple[SlowNode, ...] = ()


def health(store: Store, *, search_ids: Iterable[str]) -> Health:
    """What the newest runs of these searches say, as far as the caller sees them."""
    ratios: list[float] = []
    nodes: dict[str, str] = {}
    for search_id in search_ids:
        newest = store.list_runs(search_id=search_id, limit=RECENT, oldest_first=False).items
        ratios += [ratio for run in newest if (ratio := _over_expected(run)) is not None]
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
        nodes |= dict.fromkeys(failed_hosts(newest), "two runs or more failed on it")
        nodes |= _lagging(newest)
    return Health(
        drift_fraction=statistics.median(ratios) if len(ratios) >= FEWEST else None,
        runs=len(ratios),
        slow_nodes=tuple(SlowNode(name=name, why=why) for name, why in nodes.items()),
    )


def _over_expected(run: RunRecord) -> float | None:
    expected_s, measured_s = (
        run.predicted.get("calibrated_step_s"),
        run.measurement and run.measurement.objective_s,
    )
    # Nothing had been measured when the first run was chosen.
    return measured_s / expected_s - 1.0 if expected_s and measured_s and run.number else None


def _lagging(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Hosts of GPUs whose driver told that they throttle, err or run slower than the others of the
    same run.
    """
    lagging: dict[str, str] = {}
    for run in runs:
        devices: Sequence[DeviceState] = run.measurement.devices if run.measurement else ()
        clocks = [device.sm_clock_hz for device in devices if device.sm_clock_hz]
        usual_hz = statistics.median(clocks) if clocks else 0.0
        for device in devices:
            if device.uncorrected_ecc_errors:
                lagging[device.host] = f"{device.uncorrected_ecc_errors} uncorrected memory errors"
            elif device.sm_clock_hz and device.sm_clock_hz < LAGGING * usual_hz:
                slower = formats.share(1.0 - device.sm_clock_hz / usual_hz)
                lagging[device.host] = f"a GPU's clock is {slower} below the others'" + (
                    f", held down by {device.throttled_by}" if device.throttled_by else ""
                )
    return lagging
