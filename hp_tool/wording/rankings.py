"""Columns of rankings and lists, for the terminal, notebooks, pages and CSV files. Their headings
and units come from the figures.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hp_tool.wording import figures
from hp_tool.wording.figures import ColumnUnit, Figure, value_at

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""First characters of texts that spreadsheets evaluate as formulas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a list: its figure, and how each interface shows it."""

    figure: Figure
    """The column's figure: headings, unit, and path in a ranked row or an estimate. The terminal
    prints only columns whose figure has a `head`.
    """
    of_row: bool = True
    """True: the figure is read from the ranked row; False: from the row's estimate."""
    page_label: str = ""
    """Column head on a page; empty: the figure's label."""
    page_path: str = ""
    """Path of the value in a page's row; empty: `name`."""
    page_interval: str = ""
    """Path of the value's 90% interval in a page's row; empty: no interval."""
    shown: Literal["page", "file", "terminal"] = "page"
    """`page`: on pages and in CSV files; `file`: only in CSV files; `terminal`: only on the
    terminal.
    """
    optional: bool = False
    """Whether pages omit the column if no row has a value."""
    drop: int = 0
    """Priority for hiding the column in a narrow terminal, highest first; 0: never hidden."""
    interval_drop: int | None = None
    """`drop` of the interval's column; None: the interval is not shown on the terminal."""
    mark: tuple[str, str, str] | None = None
    """(path of a value in a row or an estimate, mark, legend text or empty). If the value is true,
    the cell gets the mark.
    """

    @property
    def name(self) -> str:
        """Column head in a CSV file. Values in CSV files are in SI units and bytes."""
        return self.figure.name

    @property
    def unit(self) -> ColumnUnit:
        """Unit in which pages write the value."""
        return self.figure.unit

    @property
    def label(self) -> str:
        """Column head on a page."""
        return self.page_label or self.figure.label

    @property
    def is_numeric(self) -> bool:
        """Whether the values are numbers, which pages align right."""
        return self.unit not in ("text", "heading", "moment")

    def source(self, row: object) -> object:
        """Return the object that contains the figure: the ranked row, or an estimate."""
        return row if self.of_row else getattr(row, "preferred_estimate", row)

    def value(self, row: object) -> Any:
        """Return the value in a page's row, or None."""
        return value_at(row, self.page_path or self.name)

    def interval(self, row: object) -> Sequence[float] | None:
        """Return both ends of the value's interval in a page's row, or None."""
        ends: Sequence[float] | None = (
            value_at(row, self.page_interval) if self.page_interval else None
        )
        return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table on a page: its columns and rows."""

    columns: tuple[Column, ...]
    rows: Sequence[Any]

    @property
    def shown(self) -> list[Column]:
        """Columns that pages show."""
        return [
            column
            for column in self.columns
            if column.shown == "page"
            and not (column.optional and all(column.value(row) is None for row in self.rows))
        ]

    def csv(self) -> str:
        """Return all columns as comma-separated values (RFC 4180). An interval becomes two
        columns.
        """
        columns = [column for column in self.columns if column.shown != "terminal"]
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(
            head
            for column in columns
            for head in (
                column.name,
                *((f"{column.name}_low", f"{column.name}_high") if column.page_interval else ()),
            )
        )
        for row in self.rows:
            writer.writerow(_csv_cells(columns, row))
        return file.getvalue()


def page_values(columns: Iterable[Column], row: object) -> dict[str, Any]:
    """Return the values of a ranked row for a page, with their intervals."""
    values: dict[str, Any] = {}
    for column in columns:
        figure, source = column.figure, column.source(row)
        if column.shown != "terminal":
            values[column.page_path or column.name] = figure.value(source)
        if column.page_interval:
            values[column.page_interval] = figure.stored_interval(source)
    return values


def _csv_cells(columns: Iterable[Column], row: object) -> list[object]:
    cells: list[object] = []
    for column in columns:
        value = column.value(row)
        text = isinstance(value, str) and value.startswith(FORMULA_SIGNS)
        cells.append(f"'{value}" if text else value)
        if column.page_interval:
            cells += column.interval(row) or (None, None)
    return cells


def _estimate_column(figure: Figure, page_label: str = "", **more: Any) -> Column:
    """Return the column of a figure that belongs to estimates."""
    return Column(figure=figure, page_label=page_label, of_row=False, **more)


def _plain_column(
    name: str,
    label: str,
    unit: ColumnUnit,
    page_path: str = "",
    *,
    head: str = "",
    per: str = "",
    path: str = "",
    interval: str = "",
    note: str = "",
    **more: Any,
) -> Column:
    """Return the column of a figure that does not belong to estimates."""
    figure = Figure(
        name=name,
        label=label,
        head=head,
        unit=unit,
        per=per,
        path=path,
        interval=interval,
        note=note,
    )
    return Column(figure=figure, page_path=page_path, **more)


RANK = _plain_column("rank", "Rank", "count", head="rank")
CONFIGURATION = _plain_column("configuration", "Configuration", "heading", "arithmetic")
DETAILS = _plain_column("details", "Details", "text", shown="file")
GROUP = _plain_column("group", "Group", "count", note="Layouts of a group are tied", optional=True)
STEP = _estimate_column(
    figures.STEP,
    "Step",
    page_interval="step_s_interval",
    interval_drop=1,
    mark=("familiarity.unmeasured", "*", ""),
)
RISK = _plain_column(
    "out_of_memory_probability",
    "OOM risk",
    "risk",
    head="OOM risk",
    note="chance of running out of memory",
    drop=9,
)
TRAINING_FIGURES = (
    STEP,
    _estimate_column(figures.TOKENS, drop=4),
    _estimate_column(figures.MFU, drop=7),
    _estimate_column(figures.MEMORY, page_path="memory_bytes", drop=2),
    _estimate_column(figures.FIT, drop=3),
    _estimate_column(figures.CALENDAR, shown="terminal", drop=6),
)
TRAINING = (RANK, GROUP, CONFIGURATION, DETAILS, *TRAINING_FIGURES, RISK)
"""Columns of a ranking of training layouts."""
TTFT = _estimate_column(figures.TTFT, "TTFT", page_interval="ttft_s_interval")
TPOT = _estimate_column(figures.TPOT, "TPOT", page_interval="tpot_s_interval")
REQUEST = _estimate_column(figures.REQUEST, shown="terminal", drop=6)
OUTPUT = _estimate_column(
    figures.OUTPUT,
    "Tokens/s per GPU",
    page_path="tokens_per_second_per_gpu",
    interval_drop=3,
)
CONCURRENCY = _estimate_column(figures.CONCURRENCY, shown="terminal", drop=5)
SERVING_FIGURES = (
    TTFT,
    TPOT,
    REQUEST,
    OUTPUT,
    CONCURRENCY,
    _estimate_column(figures.USERS, drop=8),
    *(
        _estimate_column(replace(price, note=""), shown="terminal", drop=9)
        for price in (figures.INPUT_PRICE, figures.OUTPUT_PRICE)
    ),
    _estimate_column(figures.SERVED_MEMORY, page_path="memory_bytes", drop=4),
)
SERVING = (RANK, GROUP, CONFIGURATION, DETAILS, *SERVING_FIGURES)
"""Columns of a ranking of serving layouts."""

_MACHINES = (
    _plain_column("rank", "Rank", "count", "configuration.rank", head="rank"),
    _plain_column("machine", "Machine", "heading", head="machine", path="cluster"),
    _plain_column(
        "configuration", "Configuration", "text", "configuration.arithmetic", shown="file"
    ),
    _plain_column("details", "Details", "text", "configuration.details", shown="file"),
    _plain_column(
        "num_gpus", "GPUs", "count", head="GPUs", path="preferred_estimate.provenance.num_gpus"
    ),
    _plain_column(
        "network_bandwidth_bytes_per_second",
        "Network",
        "bandwidth",
        head="network",
        note="between nodes, per GPU",
        shown="file",
        mark=(
            "network_assumed",
            " assumed",
            "assumed: usual network of this GPU, because the price list and the query contain "
            "no network",
        ),
    ),
    _plain_column(
        "price_per_gpu_hour",
        "$ per GPU-hour",
        "dollars",
        "price.per_gpu_hour",
        head="price",
        per="/GPU-h",
        path="price",
        drop=2,
    ),
)
MACHINES = {
    "training": (
        *_MACHINES,
        Column(
            figure=replace(figures.COST, head="cost", interval="cost_interval"),
            page_interval="cost_interval",
            optional=True,
            interval_drop=3,
        ),
        _plain_column(
            "days",
            "Days",
            "days",
            head="days",
            path="preferred_estimate.calendar_days",
            interval="days_interval",
            page_interval="days_interval",
            optional=True,
            interval_drop=4,
        ),
        _plain_column(
            "deadline_probability",
            "In time",
            "share",
            head="in time",
            note="chance of meeting the deadline",
            optional=True,
            drop=1,
        ),
        _plain_column(
            "energy_joules",
            "Energy",
            "joules",
            "energy",
            head="energy",
            path="energy",
            shown="file",
            drop=8,
        ),
        _plain_column("co2_kg", "CO2", "kilograms", head="CO2", optional=True, drop=7),
        _plain_column(
            "cost_per_million_tokens",
            "$ per million tokens",
            "dollars",
            "per_million_tokens",
            head="cost",
            per="/M tokens",
            page_interval="per_million_interval",
            optional=True,
        ),
    ),
    "inference": (
        *_MACHINES,
        _plain_column(
            "cost_per_hour", "$ per hour", "dollars", "cost", head="cost", per="/h", path="cost"
        ),
        *(
            Column(
                figure=replace(column.figure, head=""),
                page_label=column.page_label,
                page_path=f"configuration.{column.name}",
                page_interval=f"configuration.{column.page_interval}",
            )
            for column in (TTFT, TPOT)
        ),
        _plain_column(
            "cost_per_million_output_tokens",
            "$ per million output tokens",
            "dollars",
            "per_million_tokens",
            page_interval="per_million_interval",
        ),
    ),
}
"""Columns of a ranking of machines, by kind of query."""


def runs_columns(*, seconds: str, rate: str, further: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns for the runs of a search.

    Args:
        seconds: Label of the step or request time.
        rate: Label of the throughput.
        further: Labels of additional columns in the CSV file, by name.
    """
    return (
        _plain_column("run", "Run", "count", "place"),
        CONFIGURATION,
        DETAILS,
        *(_plain_column(name, label, "text", shown="file") for name, label in further.items()),
        _plain_column("state", "State", "text"),
        _plain_column("cause", "Cause", "text", shown="file"),
        _plain_column("chosen_because", "Chosen because", "text", "why", shown="file"),
        _plain_column(
            "predicted_s", f"{seconds}, cost model", "seconds", "predicted_step_s", shown="file"
        ),
        _plain_column("expected_s", f"{seconds}, expected", "seconds", "calibrated_step_s"),
        _plain_column("measured_s", f"{seconds}, measured", "seconds", "measured_step_s"),
        _plain_column("reduced", "Reduced", "text", shown="file"),
        _plain_column("num_runs", "Runs", "count", shown="file"),
        _plain_column("tokens_per_second_per_gpu", rate, "rate"),
        _plain_column("peak_memory_bytes", "Peak memory", "bytes"),
    )


SEARCHES = (
    _plain_column("search", "Search", "heading", "subject"),
    _plain_column("href", "Page", "text", shown="file"),
    _plain_column("name", "Name", "text", "label.name", shown="file"),
    _plain_column("state", "State", "text"),
    _plain_column("owner", "Owner", "text", optional=True),
    _plain_column("best", "Best", "text"),
    _plain_column("best_step_s", "Step or request", "seconds"),
    _plain_column("best_known", "Known", "text", "known", shown="file"),
    _plain_column("profile_runs", "Runs", "count"),
    _plain_column("budget_runs", "Maximum runs", "count", shown="file"),
    _plain_column("gpu_seconds", "Spent", "seconds"),
    _plain_column("saved_gpu_seconds", "Saved", "seconds"),
    _plain_column("created_at", "Created", "moment"),
)
"""Columns of the list of searches."""
