"""What the store keeps of measurements, and how they are asked for."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.measurement import Measurement, MeasurementStatus
from hp_tool.domain.records import SET, JsonObject, Paging
from hp_tool.domain.serving import RunConfig

MeasurementSource = Literal["profile", "reported", "file"]
MeasurementState = Literal["accepted", "held", "excluded", "deleted"]
"""accepted: it teaches; held: so far off that somebody should look first; excluded: someone said
that it should not teach; deleted: the same, and lists leave it out. Any may be accepted again.
"""
ODD = 3.0
"""Times its prediction, or this part of it, from which on a figure is warned about."""
COMPARED = {"step_s": "step_s", "peak_memory_bytes": "memory_allocated_bytes"}
"""Figures of a measurement beside their predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMeasurement:
    """A measurement on its way into the store: the numbers, and what they were measured on."""

    source: MeasurementSource
    """profile: a run of ours; reported: someone's training told us; file: imported."""
    cluster_key: str
    """What one calibration covers: the GPU and its surroundings, in the words of whoever
    calibrates.
    """
    gpu: str
    framework: str
    model: str
    """The model's name."""
    query: JsonObject
    """The query it answers, in enough detail to predict it again."""
    parallel: RunConfig
    measurement: Measurement
    predicted: JsonObject = field(default_factory=dict)
    """The prediction made before it ran."""
    problem_digest: str = ""
    """digests.problem_digest: measurements with the same one and the same digest may stand for each
    other.
    """
    state: MeasurementState = "accepted"
    trusted: bool = True
    """Whether it may teach everybody; else it teaches its owner alone."""
    owner: str | None = None

    @property
    def distances(self) -> dict[str, float]:
        """How many times above or below its prediction each figure lies. Nothing for our own runs,
        for reduced ones, and for CPUs, whose speed and memory are their host's.
        """
        if self.source == "profile" or self.gpu == "cpu" or not self.measurement.fidelity.is_whole:
            return {}
        pairs = {
            name: (getattr(self.measurement, name), self.predicted.get(of))
            for name, of in COMPARED.items()
        }
        return {name: round(max(x / y, y / x), 6) for name, (x, y) in pairs.items() if x and y}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about it: figures that lie far from what was predicted before it came."""
        unless_accepted = (
            "; it teaches nothing until it is accepted" if self.state == "held" else ""
        )
        return tuple(
            f"{name} {getattr(self.measurement, name):.4g} is {times:.1f} times off the predicted "
            f"{self.predicted[COMPARED[name]]:.4g}{unless_accepted}"
            for name, times in self.distances.items()
            if times >= ODD
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRefit:
    """A measurement whose state changed since the calibrations of its cluster and framework were
    fitted.
    """

    id: str
    cluster_key: str
    framework: str
    owner: str | None
    """Of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRecord(NewMeasurement):
    """A stored measurement."""

    id: str
    digest: str
    """digests.configuration_digest of parallel and measurement.fidelity."""
    search_id: str | None = None
    run_id: str | None = None
    created_at: datetime

    @property
    def set(self) -> ChosenValues:
        """Values of the query that its search chose beside `parallel`, by path."""
        return dict(self.predicted.get(SET, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A report among many that was not stored, and why."""

    line: int
    """Its place among them, from 1."""
    code: str
    message: str
    field: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of many reports, each stored or refused by itself."""

    stored: tuple[MeasurementRecord, ...]
    refused: tuple[Refused, ...]


class MeasurementQuery(Paging, total=False):
    """What the measurements of a list have in common; None as if left out."""

    cluster_key: str | None
    gpu: str | None
    framework: str | None
    model: str | None
    source: MeasurementSource | None
    status: MeasurementStatus | None
    state: MeasurementState | None
    """None: all but the deleted."""
    teaches: str | None
    """Those that may teach this owner; empty: everybody."""
    search_id: str | None
    problem_digest: str | None
    digest: str | None
    repeats: int | None
    """Of one configuration of one problem with one outcome only so many, the newest; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCluster:
    """A cluster and framework that measurements speak of."""

    cluster_key: str
    gpu: str
    framework: str
    measurements: int
    """Those that teach."""
