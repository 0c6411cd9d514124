"""Stored measurements and queries for them."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from hp_tool.domain.fields import ChosenValues
from hp_tool.domain.measurement import Measurement, MeasurementStatus
from hp_tool.domain.records import SET, JsonObject, Paging
from hp_tool.domain.serving import RunConfig

MeasurementSource = Literal["profile", "reported", "file"]
MeasurementState = Literal["accepted", "held", "excluded", "deleted"]
"""accepted: calibrates predictions; held: so far from its prediction that someone should check it;
excluded: does not calibrate; deleted: also hidden in lists. A measurement can be accepted again
from any state.
"""
WARNING_RATIO = 3.0
"""Ratio between a measured and a predicted figure from which a warning is shown."""
COMPARED_FIGURES = {"step_s": "step_s", "peak_memory_bytes": "memory_allocated_bytes"}
"""Predicted figure with which each measured figure is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMeasurement:
    """A measurement to store, with the problem that was measured."""

    source: MeasurementSource
    """profile: a run of a search; reported: sent by a training run; file: imported."""
    cluster_key: str
    """Key of the GPU and cluster. One calibration uses the measurements of one key."""
    gpu: str
    framework: str
    model: str
    """Name of the model."""
    query: JsonObject
    """The query, complete enough to repeat its prediction."""
    parallel: RunConfig
    measurement: Measurement
    predicted: JsonObject = field(default_factory=dict)
    """Prediction made before the run."""
    problem_digest: str = ""
    """Result of digests.problem_digest. Measurements are interchangeable if this and `digest` are
    equal.
    """
    state: MeasurementState = "accepted"
    trusted: bool = True
    """Whether the measurement calibrates everybody's predictions. False: only its owner's."""
    owner: str | None = None

    @property
    def distances(self) -> dict[str, float]:
        """Ratio of each figure to its prediction or the inverse, whichever is at least 1.

        Empty for profile runs, reduced runs and CPUs, whose speed and memory depend on the host.
        """
        if self.source == "profile" or self.gpu == "cpu" or not self.measurement.fidelity.is_whole:
            return {}
        pairs = {
            name: (getattr(self.measurement, name), self.predicted.get(of))
            for name, of in COMPARED_FIGURES.items()
        }
        return {name: round(max(x / y, y / x), 6) for name, (x, y) in pairs.items() if x and y}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about figures that differ strongly from their predictions."""
        unless_accepted = (
            "; not used for calibration until it is accepted" if self.state == "held" else ""
        )
        return tuple(
            f"{name} {getattr(self.measurement, name):.4g} is {times:.1f} times off the predicted "
            f"{self.predicted[COMPARED_FIGURES[name]]:.4g}{unless_accepted}"
            for name, times in self.distances.items()
            if times >= WARNING_RATIO
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DueRefit:
    """A measurement whose state changed after its cluster's calibrations were fitted."""

    id: str
    cluster_key: str
    framework: str
    owner: str | None
    """Owner of the measurement."""


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
        """Query values other than `parallel` that its search chose, by path."""
        return dict(self.predicted.get(SET, {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A rejected report in a list of reports."""

    line: int
    """Position in the list, from 1."""
    code: str
    message: str
    field: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Result of importing a list of reports. Each report is stored or rejected independently."""

    stored: tuple[MeasurementRecord, ...]
    refused: tuple[Refused, ...]


class MeasurementQuery(Paging, total=False):
    """Filters for a list of measurements; None matches everything."""

    cluster_key: str | None
    gpu: str | None
    framework: str | None
    model: str | None
    source: MeasurementSource | None
    status: MeasurementStatus | None
    state: MeasurementState | None
    """None: all states except `deleted`."""
    teaches: str | None
    """Owner whose predictions the measurements may calibrate; "": everybody's."""
    search_id: str | None
    problem_digest: str | None
    digest: str | None
    repeats: int | None
    """Maximum number of measurements per problem, configuration and outcome, newest first; None:
    all.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCluster:
    """A cluster and framework that have measurements."""

    cluster_key: str
    gpu: str
    framework: str
    measurements: int
    """Number of accepted measurements."""
