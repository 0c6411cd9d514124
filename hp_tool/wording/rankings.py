"""Columns of rankings and lists, each defined once, for pages and CSV files. Labels and units come
from the figures that the terminal and agents use.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hp_tool.wording import figures
from hp_tool.wording.figures import Figure, value_at

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet calculates a text that begins with one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a list: where a row has its value, and how people read it."""

    name: str
    """Head of the column in a CSV file; the value is in SI units and bytes."""
    label: str
    """Head of the column on a page."""
    unit: figures.Unit | Literal["risk", "moment", "text", "heading"]
    """How a page writes the value; `heading`: names the row."""
    path: str = ""
    """Where a row has the value; empty: under its name."""
    interval: str = ""
    """Where a row has the value's 90% interval; empty: it has none."""
    help: str = ""
    optional: bool = False
    """Left out on a page where no row has a value."""
    shown: bool = True
    """On pages; False: only in CSV files."""

    @property
    def number(self) -> bool:
        """Whether the values are numbers, which are aligned right."""
        return self.unit not in ("text", "heading", "moment")

    def value(self, row: object) -> Any:
        """Return the value of a row; None if it has none."""
        return value_at(row, self.path or self.name)

    def ends(self, row: object) -> Sequence[float] | None:
        """Return both ends of the value's interval."""
        ends: Sequence[float] | None = value_at(row, self.interval) if self.interval else None
        return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with the columns that list them."""

    columns: tuple[Column, ...]
    rows: Sequence[Any]

    @property
    def shown(self) -> list[Column]:
        """The columns that a page shows."""
        return [
            column
            for column in self.columns
            if column.shown
            and not (column.optional and all(column.value(row) is None for row in self.rows))
        ]

    def csv(self) -> str:
        """Return all columns as comma-separated values (RFC 4180), intervals as two columns."""
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(
            head
            for column in self.columns
            for head in (
                column.name,
                *((f"{column.name}_low", f"{column.name}_high") if column.interval else ()),
            )
        )
        for row in self.rows:
            writer.writerow(_cells(self.columns, row))
        return file.getvalue()


def _cells(columns: Iterable[Column], row: object) -> list[object]:
    cells: list[object] = []
    for column in columns:
        value = column.value(row)
        text = isinstance(value, str) and value.startswith(FORMULA_SIGNS)
        cells.append(f"'{value}" if text else value)
        if column.interval:
            cells += column.ends(row) or (None, None)
    return cells


def _of(figure: Figure, label: str = "", **more: Any) -> Column:
    return Column(
        name=figure.name,
        label=label or figure.label,
        unit=figure.unit,
        **{"help": figure.note} | more,
    )


RANK = Column(name="rank", label="Rank", unit="count")
CONFIGURATION = Column(
    name="configuration", label="Configuration", unit="heading", path="arithmetic"
)
DETAILS = Column(name="details", label="Details", unit="text", shown=False)
MEMORY = _of(figures.MEMORY, path="memory_bytes")
_START = (
    RANK,
    Column(
        name="group",
        label="Group",
        unit="count",
        help="Layouts of a group cannot be told apart",
        optional=True,
    ),
    CONFIGURATION,
    DETAILS,
)
TRAINING = (
    *_START,
    _of(figures.STEP, "Step", interval="step_s_interval"),
    Column(name="fit", label="Fit", unit="text"),
    Column(
        name="out_of_memory_probability",
        label="Risk",
        unit="risk",
        help="Chance of running out of memory",
    ),
    _of(figures.TOKENS, help=""),
    _of(figures.MFU, help=""),
    MEMORY,
)
"""Of a ranking of training layouts."""
_LATENCIES = (
    _of(figures.TTFT, "TTFT", interval="ttft_s_interval", help=""),
    _of(figures.TPOT, "TPOT", interval="tpot_s_interval", help=""),
)
SERVING = (
    *_START,
    _of(figures.USERS),
    *_LATENCIES,
    _of(figures.OUTPUT, "Tokens/s per GPU", path="tokens_per_second_per_gpu"),
    MEMORY,
)
"""Of a ranking of serving layouts."""


def _machines(*columns: Column) -> tuple[Column, ...]:
    return (
        Column(name="rank", label="Rank", unit="count", path="configuration.rank"),
        Column(name="machine", label="Machine", unit="heading"),
        Column(
            name="configuration",
            label="Configuration",
            unit="text",
            path="configuration.arithmetic",
            shown=False,
        ),
        Column(
            name="details",
            label="Details",
            unit="text",
            path="configuration.details",
            shown=False,
        ),
        Column(name="num_gpus", label="GPUs", unit="count"),
        *columns,
        Column(
            name="price_per_gpu_hour",
            label="$ per GPU-hour",
            unit="dollars",
            path="price.per_gpu_hour",
        ),
        Column(
            name="network_bandwidth_bytes_per_second",
            label="Network",
            unit="rate",
            shown=False,
        ),
    )


MACHINES = {
    "training": _machines(
        _of(figures.COST, interval="cost_interval", optional=True),
        Column(name="days", label="Days", unit="days", interval="days_interval", optional=True),
        Column(
            name="deadline_probability",
            label="In time",
            unit="share",
            help="Chance of ending within the deadline",
            optional=True,
        ),
        Column(name="co2_kg", label="CO2", unit="kilograms", optional=True),
        Column(name="energy_joules", label="Energy", unit="joules", path="energy", shown=False),
        Column(
            name="cost_per_million_tokens",
            label="$ per million tokens",
            unit="dollars",
            path="per_million_tokens",
            interval="per_million_interval",
            optional=True,
        ),
    ),
    "inference": _machines(
        *(
            Column(
                name=column.name,
                label=column.label,
                unit=column.unit,
                path=f"configuration.{column.name}",
                interval=f"configuration.{column.interval}",
            )
            for column in _LATENCIES
        ),
        Column(name="cost_per_hour", label="$ per hour", unit="dollars", path="cost"),
        Column(
            name="cost_per_million_output_tokens",
            label="$ per million output tokens",
            unit="dollars",
            path="per_million_tokens",
            interval="per_million_interval",
        ),
    ),
}
"""Of a ranking of machines, by the kind of the question."""


def runs_columns(*, seconds: str, rate: str) -> tuple[Column, ...]:
    """Return the columns of a search's runs, whose time and rate have these names."""
    return (
        Column(name="run", label="Run", unit="count", path="place"),
        CONFIGURATION,
        DETAILS,
        Column(name="state", label="State", unit="text"),
        Column(name="cause", label="Cause", unit="text", shown=False),
        Column(name="chosen_because", label="Chosen because", unit="text", path="why", shown=False),
        Column(
            name="predicted_s",
            label=f"{seconds}, cost model",
            unit="seconds",
            path="predicted_step_s",
            shown=False,
        ),
        Column(
            name="expected_s",
            label=f"{seconds}, expected",
            unit="seconds",
            path="calibrated_step_s",
        ),
        Column(
            name="measured_s",
            label=f"{seconds}, measured",
            unit="seconds",
            path="measured_step_s",
        ),
        Column(name="reduced", label="Reduced", unit="text", shown=False),
        Column(name="tokens_per_second_per_gpu", label=rate, unit="rate"),
        Column(name="peak_memory_bytes", label="Peak memory", unit="bytes"),
    )


SEARCHES = (
    Column(name="search", label="Search", unit="heading", path="subject"),
    Column(name="href", label="Page", unit="text", shown=False),
    Column(name="name", label="Name", unit="text", path="label.name", shown=False),
    Column(name="state", label="State", unit="text"),
    Column(name="owner", label="Owner", unit="text", optional=True),
    Column(name="best", label="Best", unit="text"),
    Column(name="best_step_s", label="Step or request", unit="seconds"),
    Column(name="best_known", label="Known", unit="text", path="known", shown=False),
    Column(name="profile_runs", label="Runs", unit="count"),
    Column(name="budget_runs", label="Maximum runs", unit="count", shown=False),
    Column(name="gpu_seconds", label="Spent", unit="seconds"),
    Column(name="saved_gpu_seconds", label="Saved", unit="seconds"),
    Column(name="created_at", label="Created", unit="moment"),
)
"""Of the list of searches."""
