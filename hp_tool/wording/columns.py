"""Columns of terminal tables: cells, headings with units, and explanations of abbreviations."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.domain.axes import Axis, axes_of_kind
from hp_tool.domain.fields import choice_fields
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.parts import label
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.units import GIB, JOULES_PER_MWH, format_decimal
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.wording import figures, rankings
from hp_tool.wording.figures import Figure, value_at

ABSENT = "-"
Write = Callable[[Iterable[Any]], tuple[str, ...]]
"""Function that formats values as the cells of a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    head: str
    unit: str = ""
    """Unit of the column's cells."""
    cells: tuple[str, ...]
    meaning: str = ""
    """Meaning of the abbreviation in the head; empty if the head is no abbreviation."""
    drop: int = 0
    """Priority for hiding the column in a narrow terminal, highest first; 0: never hidden."""
    left: bool = False
    """Whether cells are left-aligned, as for text."""

    @property
    def title(self) -> str:
        """Head and unit on one line: `step, s`."""
        return f"{self.head}, {self.unit}" if self.unit else self.head

    @property
    def is_constant(self) -> bool:
        """Whether the value is the same in all rows."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def versus_first(rows: Sequence[Recommendation]) -> list[Column]:
    """Return the column of expected step times relative to the first row; empty if stored results
    have no expected step times.
    """
    first = rows[0].expected_token_s if rows else None
    if first is None:
        return []
    changes = (
        None if (each := row.expected_token_s) is None else each / first - 1.0 for row in rows
    )
    unit, write = WRITERS_BY_UNIT["change"]
    meaning = "expected step time, with the risk of running out of memory"
    return [Column(head="vs. rank 1", meaning=meaning, unit=unit, cells=write(changes), drop=9)]


def _context_exchange(config: ParallelConfig) -> str:
    """Return `a2a`, or `a2a+p2p 8x4` with its level sizes; `-` for a ring, the default."""
    kind, levels = config.context_parallel_communication, config.hierarchical_context_parallel_sizes
    if kind in (None, "p2p") or config.context_parallel_size == 1:
        return ABSENT
    return f"{kind} {'x'.join(map(str, levels))}" if levels else str(kind)


def varied_columns(rows: Sequence[Recommendation]) -> list[Column]:
    """Return columns for the `training` values that differ between rows, and for the pipeline
    layout if stages have different numbers of layers.
    """
    has_unequal_stages = ("blocks_by_stage" in row.estimate.provenance for row in rows)
    layouts = tuple(
        row.parallel.pipeline_layout or ABSENT if each else ABSENT
        for row, each in zip(rows, has_unequal_stages, strict=True)
    )
    stages = Column(
        head="stages",
        meaning="layers (t) of each stage, as in --pipeline-model-parallel-layout",
        cells=layouts,
        drop=4,
    )
    assumed: list[Any] = [row.estimate.provenance.get("assumed") or {} for row in rows]
    columns = [
        (name, tuple(str(each.get(f"training.{name}", ABSENT)) for each in assumed))
        for name in choice_fields(TrainingWorkload)
    ]
    listed = [
        Column(head=name.replace("_", " "), cells=cells)
        for name, cells in columns
        if len(set(cells)) > 1
    ]
    return [*listed, *([stages] if set(layouts) - {ABSENT} else [])]


BATCH_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""Engine limits that tables of layouts omit."""


def configuration_columns(configs: Sequence[ParallelConfig]) -> list[Column]:
    """Return columns for the axes that at least one training configuration uses."""
    shown = [
        Column(
            head=axis.head,
            meaning=axis.meaning,
            cells=tuple(axis_cell(config, axis.key) for config in configs),
            drop=axis.drop,
        )
        for axis in axes_of_kind("training")
        if any(_uses_axis(config, axis) for config in configs)
    ]
    return [column for column in shown if set(column.cells) != {ABSENT}]


def _uses_axis(config: ParallelConfig, axis: Axis) -> bool:
    if axis.key == "data_parallel_shard_size":
        return bool(config.data_parallel_shard_size)
    if axis.key == "pipeline_parallel_size":
        return True  # Shown even if it is 1.
    return axis.idle is None or axis.value(config) != axis.idle


def axis_cell(config: ParallelConfig, key: str) -> str:
    """Return the table cell for an axis value."""
    if key == "context_parallel_communication":
        return _context_exchange(config)
    if key == "recompute":
        return recompute_name(config.recompute)
    if key == "data_parallel_shard_size":
        return str(config.data_parallel_shard_size or config.data_parallel_size)
    value = getattr(config, key)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ABSENT if value is None else str(value)


def num_gpus_cells(rows: Sequence[Recommendation | ServingRecommendation]) -> tuple[str, ...]:
    """Return the number of GPUs that the ranking chose for each row; `-` for rows where it chose
    none.
    """
    return tuple(str(row.set.get("cluster.num_gpus", ABSENT)) for row in rows)


def serving_columns(rows: Sequence[ServingRecommendation]) -> list[Column]:
    """Return columns for the axes that at least one serving configuration uses."""
    configs = [row.parallel for row in rows]
    shown = [
        Column(
            head=axis.head,
            meaning=axis.meaning,
            cells=tuple(str(getattr(config, axis.key)) for config in configs),
        )
        for axis in axes_of_kind("inference")
        if axis.key not in BATCH_LIMITS
        and (axis.idle is None or {axis.value(config) for config in configs} != {axis.idle})
    ]
    gpus = Column(head="GPUs", cells=num_gpus_cells(rows))
    replicas = Column(
        head="replicas", cells=tuple(str(row.estimate.replicas or ABSENT) for row in rows)
    )
    return [column for column in (gpus, *shown, replicas) if set(column.cells) != {ABSENT}]


def terminal_columns(
    columns: Iterable[rankings.Column],
    rows: Sequence[object],
    *,
    shared_unit: tuple[str, float] | None = None,
) -> list[Column]:
    """Return the columns that the terminal prints for ranked rows or estimates, each followed by
    its interval if there is one. Columns without any value are omitted.

    `shared_unit` is the unit of all durations and its length in seconds; None: each column uses the
    unit of its longest duration.
    """
    return [
        each
        for column in columns
        if column.figure.head
        for each in _columns_with_interval(
            column, list(map(column.source, rows)), shared_unit=shared_unit
        )
    ]


def _columns_with_interval(
    column: rankings.Column, sources: Sequence[object], *, shared_unit: tuple[str, float] | None
) -> Iterator[Column]:
    figure = column.figure
    values = figure_column(figure, sources, drop=column.drop, shared_unit=shared_unit)
    if set(values.cells) == {ABSENT}:
        return
    marks = [""] * len(sources)
    if column.mark is not None:
        path, mark, explained = column.mark
        marks = [mark if value_at(source, path) else "" for source in sources]
        if explained and any(marks):
            values = replace(values, meaning=f"{values.meaning}; {explained}")
    if column.interval_drop is None:
        yield replace(values, cells=tuple(map("".join, zip(values.cells, marks, strict=True))))
        return
    yield values
    intervals = [figure.stored_interval(source) for source in sources]
    _, write = _unit_and_writer(figure.unit, map(figure.value, sources), shared_unit=shared_unit)
    ends = iter(write([end for interval in intervals for end in interval or ()]))
    cells = tuple(
        ABSENT if interval is None else f"{next(ends)}-{next(ends)}{mark}"
        for interval, mark in zip(intervals, marks, strict=True)
    )
    if set(cells) != {ABSENT}:
        quantity = values.unit or values.head
        yield Column(
            head="interval", unit=f"90%, {quantity}", cells=cells, drop=column.interval_drop
        )


def figure_column(
    figure: Figure,
    sources: Iterable[object],
    *,
    head: str = "",
    drop: int = 0,
    shared_unit: tuple[str, float] | None = None,
) -> Column:
    """Return the column of one figure, with one cell per source.

    `head` replaces the figure's own head. For `shared_unit`, see `terminal_columns`.
    """
    values = [figure.value(source) for source in sources]
    name, write = _unit_and_writer(figure.unit, values, shared_unit=shared_unit)
    return Column(
        head=head or figure.head,
        unit=f"{name}{figure.per}",
        cells=write(values),
        meaning="" if head else figure.note,
        drop=drop,
        left=figure.unit in ("text", "heading"),
    )


def unmeasured_features(estimate: Estimate | InferenceEstimate) -> list[str]:
    """Return the features of a configuration that occur in no published run."""
    return [] if estimate.familiarity is None else list(estimate.familiarity.unmeasured)


def duration_column(
    head: str, seconds: Sequence[float | None], *, meaning: str = "", drop: int = 0
) -> Column:
    """Return a column of durations in the unit of the longest one."""
    unit, size = duration_unit(seconds)
    return Column(
        head=head, unit=unit, cells=scale_values(seconds, size), meaning=meaning, drop=drop
    )


def duration_unit(seconds: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit of the longest duration, and its length in seconds."""
    longest = max((each for each in seconds if each is not None), default=1.0)
    return next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if longest >= size), ("us", 1e-6)
    )


def scale_values(values: Sequence[float | None], size: float) -> tuple[str, ...]:
    """Return the values in a unit of `size`, all with the same number of decimals: as many as the
    smallest value needs for four digits, at most 2, or 3 below 10.
    """
    figures = [None if value is None else value / size for value in values]
    sizes = [abs(figure) for figure in figures if figure] or [1.0]
    places = min(max(3 - math.floor(math.log10(min(sizes))), 0), 3 if max(sizes) < 10.0 else 2)
    return tuple(ABSENT if figure is None else f"{figure:,.{places}f}" for figure in figures)


def _cell_writer(write: Callable[[Any], str]) -> Write:
    return lambda values: tuple(ABSENT if value is None else write(value) for value in values)


counts = _cell_writer("{:,.0f}".format)
"""Format whole numbers as cells."""
decimals = _cell_writer("{:,.1f}".format)
"""Format numbers with one decimal as cells."""
percents = _cell_writer(lambda fraction: f"{100.0 * fraction:,.1f}")
"""Format fractions as percentages without a percent sign."""
gibs = _cell_writer(lambda size: f"{size / GIB:,.1f}")
"""Format bytes as GiB."""


def _format_dollars(values: Iterable[float | None]) -> tuple[str, ...]:
    """Format US dollars. Cents are omitted if the largest amount is 1,000 or more; otherwise there
    are at least cents, and at least two digits of the smallest amount.
    """
    values = list(values)
    sizes = [abs(value) for value in values if value] or [1.0]
    places = 0 if max(sizes) >= 1e3 else max(1 - math.floor(math.log10(min(sizes))), 2)
    return _cell_writer(f"{{:,.{places}f}}".format)(values)


WRITERS_BY_UNIT: dict[figures.ColumnUnit, tuple[str, Write]] = {
    "bytes": ("GiB", gibs),
    "share": ("%", percents),
    "risk": ("%", percents),
    "change": ("%", _cell_writer(lambda fraction: f"{100.0 * fraction:+.1f}")),
    "rate": ("/s/GPU", counts),
    "bandwidth": ("GB/s", _cell_writer(lambda rate: format_decimal(rate / 1e9))),
    "count": ("", counts),
    "dollars": ("$", _format_dollars),
    "joules": ("MWh", _cell_writer(lambda energy: format_decimal(energy / JOULES_PER_MWH))),
    "kilograms": ("t", _cell_writer(lambda mass: format_decimal(mass / 1e3))),
    "days": ("", _cell_writer(format_decimal)),
    "text": ("", _cell_writer(str)),
    "heading": ("", _cell_writer(str)),
}
"""For each unit of a figure: the unit shown in the column's head, and the function that formats its
cells.
"""


def _unit_and_writer(
    unit: figures.ColumnUnit,
    values: Iterable[float | None],
    *,
    shared_unit: tuple[str, float] | None,
) -> tuple[str, Write]:
    """Return the unit for the head of a column, and the function that formats its cells."""
    if unit != "seconds":
        return WRITERS_BY_UNIT[unit]
    name, size = shared_unit or duration_unit(values)
    return name, lambda seconds: scale_values(list(seconds), size)


def parts_columns(parts: Mapping[str, float], figures: Column) -> list[Column]:
    """Return the columns of a table of parts: name, `figures`, and fraction of the total."""
    total = sum(parts.values()) or 1.0
    names = Column(head="part", cells=tuple(map(label, parts)), left=True)
    return [
        names,
        figures,
        Column(head="share", unit="%", cells=percents(value / total for value in parts.values())),
    ]
