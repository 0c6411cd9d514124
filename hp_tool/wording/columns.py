"""Columns of answers for people: a unit once in the head, letters explained once, and what a narrow
screen may leave out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.domain.axes import Axis, of_kind
from hp_tool.domain.knobs import CHOICES
from hp_tool.domain.parallel import ParallelConfig, recompute_name
from hp_tool.domain.parts import label
from hp_tool.domain.result import Estimate, Fix, Recommendation
from hp_tool.domain.serving import InferenceEstimate, ServingRecommendation
from hp_tool.domain.units import GIB, decimal
from hp_tool.wording import figures
from hp_tool.wording.figures import Figure

ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    head: str
    unit: str = ""
    """Of all its cells."""
    cells: tuple[str, ...]
    meaning: str = ""
    """What the letters of the head stand for; empty if they are words."""
    drop: int = 0
    """0: always shown; of the others the highest is left out first where the screen is narrow."""
    left: bool = False
    """Aligned left, as text is."""

    @property
    def title(self) -> str:
        """`step, s`: head and unit on one line."""
        return f"{self.head}, {self.unit}" if self.unit else self.head

    @property
    def constant(self) -> bool:
        """Whether several rows agree."""
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def fit_column(rows: Iterable[Estimate | Fix], *, drop: int = 1) -> Column:
    """Whether each fits, in a word; a dash in results stored without it."""
    return Column(head="fit", cells=tuple(row.fit or ABSENT for row in rows), left=True, drop=drop)


def choice_columns(rows: Sequence[Recommendation]) -> list[Column]:
    """What decides between rows: expected steps against the first row's, and chances of running out
    of memory.
    """
    first = rows[0].expected_token_s if rows else None
    if first is None:  # of results stored earlier
        return []
    wins = [
        None if row.expected_token_s is None else row.expected_token_s / first - 1.0 for row in rows
    ]
    risks = [row.out_of_memory_probability for row in rows]
    return [
        Column(
            head="vs. rank 1",
            unit="%",
            cells=tuple(ABSENT if one is None else f"{100.0 * one:+.1f}" for one in wins),
            drop=9,
        ),
        Column(
            head="OOM risk",
            unit="%",
            cells=tuple(ABSENT if one is None else f"{100.0 * one:.1f}" for one in risks),
            drop=9,
        ),
    ]


def _exchange(config: ParallelConfig) -> str:
    """`a2a`, or `a2a+p2p 8x4` with its levels; a dash where it is the default, a ring."""
    kind, levels = config.context_parallel_communication, config.hierarchical_context_parallel_sizes
    if kind in (None, "p2p") or config.context_parallel_size == 1:
        return ABSENT
    return f"{kind} {'x'.join(map(str, levels))}" if levels else str(kind)


def listed_columns(rows: Sequence[Recommendation]) -> list[Column]:
    """The values of `training` that the query lists, as each row has them, where the rows differ;
    and stages of layers that are unlike, where these do not hold equally many.
    """
    unlike = ("blocks_by_stage" in row.estimate.provenance for row in rows)
    layouts = tuple(
        row.parallel.pipeline_layout or ABSENT if each else ABSENT
        for row, each in zip(rows, unlike, strict=True)
    )
    stages = Column(
        head="stages",
        meaning="layers (t) of each, as --pipeline-model-parallel-layout",
        cells=layouts,
        drop=4,
    )
    assumed: list[Any] = [row.estimate.provenance.get("assumed") or {} for row in rows]
    columns = [
        (name, tuple(str(each.get(f"training.{name}", ABSENT)) for each in assumed))
        for name in CHOICES
    ]
    listed = [
        Column(head=name.replace("_", " "), cells=cells)
        for name, cells in columns
        if len(set(cells)) > 1
    ]
    return [*listed, *([stages] if set(layouts) - {ABSENT} else [])]


LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""Limits of an engine, which tables of layouts leave out."""


def configuration_columns(configs: Sequence[ParallelConfig]) -> list[Column]:
    """The columns that tell training configurations apart; those that no configuration uses are
    left out.
    """
    shown = [
        Column(
            head=axis.head,
            meaning=axis.meaning,
            cells=tuple(axis_cell(config, axis.key) for config in configs),
            drop=axis.drop,
        )
        for axis in of_kind("training")
        if any(_uses(config, axis) for config in configs)
    ]
    return [column for column in shown if set(column.cells) != {ABSENT}]


def _uses(config: ParallelConfig, axis: Axis) -> bool:
    if axis.key == "data_parallel_shard_size":
        return bool(config.data_parallel_shard_size)
    if axis.key == "pipeline_parallel_size":
        return True  # stated even if it is 1
    return axis.idle is None or axis.value(config) != axis.idle


def axis_cell(config: ParallelConfig, key: str) -> str:
    """Return the value of an axis in a table."""
    if key == "context_parallel_communication":
        return _exchange(config)
    if key == "recompute":
        return recompute_name(config.recompute)
    if key == "data_parallel_shard_size":
        return str(config.data_parallel_shard_size or config.data_parallel_size)
    value = getattr(config, key)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ABSENT if value is None else str(value)


def num_gpus_cells(rows: Sequence[Recommendation | ServingRecommendation]) -> tuple[str, ...]:
    """Return the number of GPUs of each row, if its ranking chose the number."""
    return tuple(str(row.set.get("cluster.num_gpus", ABSENT)) for row in rows)


def serving_columns(rows: Sequence[ServingRecommendation]) -> list[Column]:
    """The columns that tell serving configurations apart; those that no configuration uses are left
    out.
    """
    configs = [row.parallel for row in rows]
    shown = [
        Column(
            head=axis.head,
            meaning=axis.meaning,
            cells=tuple(str(getattr(config, axis.key)) for config in configs),
        )
        for axis in of_kind("inference")
        if axis.key not in LIMITS
        and (axis.idle is None or {axis.value(config) for config in configs} != {axis.idle})
    ]
    gpus = Column(head="GPUs", cells=num_gpus_cells(rows))
    replicas = Column(
        head="replicas", cells=tuple(str(row.estimate.replicas or ABSENT) for row in rows)
    )
    return [column for column in (gpus, *shown, replicas) if set(column.cells) != {ABSENT}]


def training_figures(estimates: Sequence[Estimate]) -> list[Column]:
    """Step time with its interval, throughput, MFU, memory and days of estimates that have them."""
    assert all(e.time is not None and e.memory is not None for e in estimates)
    unit, size = duration_unit(map(figures.STEP.value, estimates))
    return [
        figure_column(figures.STEP, estimates),
        interval_column(estimates, unit=unit, size=size),
        figure_column(figures.TOKENS, estimates, drop=4),
        figure_column(figures.MFU, estimates, drop=7),
        figure_column(figures.MEMORY, estimates, drop=2),
        *([fit_column(estimates, drop=3)] if any(e.fit for e in estimates) else []),
        *(
            [figure_column(figures.CALENDAR, estimates, drop=6)]
            if any(e.calendar_days is not None for e in estimates)
            else []
        ),
    ]


def figure_column(
    figure: Figure, sources: Iterable[object], *, head: str = "", drop: int = 0
) -> Column:
    """One figure of each; durations in the unit of the longest. `head`: in place of the figure's
    own.
    """
    values, meaning = [figure.value(source) for source in sources], "" if head else figure.note
    if figure.unit == "seconds":
        return duration_column(head or figure.head, values, meaning=meaning, drop=drop)
    unit, write = WRITTEN[figure.unit]
    return Column(
        head=head or figure.head, unit=unit, cells=write(values), meaning=meaning, drop=drop
    )


def interval_column(estimates: Sequence[Estimate | None], *, unit: str, size: float) -> Column:
    """The interval of the step time in a unit of `size` seconds; * marks one that is wider because
    nobody measured its kind.
    """
    intervals = [e.intervals if e is not None else None for e in estimates]
    ends = iter(scaled([end for i in intervals if i is not None for end in i.step_s], size))
    marks = ["*" if e is not None and unmeasured(e) else "" for e in estimates]
    confidence = next((i.confidence for i in intervals if i is not None), 0.9)
    cells = tuple(
        ABSENT if i is None else f"{next(ends)}-{next(ends)}{mark}"
        for i, mark in zip(intervals, marks, strict=True)
    )
    return Column(head="interval", unit=f"{confidence:.0%}, {unit}", cells=cells, drop=1)


def unmeasured(estimate: Estimate | InferenceEstimate) -> list[str]:
    """What of a configuration no published run covers."""
    return [] if estimate.familiarity is None else list(estimate.familiarity.unmeasured)


def serving_figures(estimates: Sequence[InferenceEstimate]) -> list[Column]:
    """Latencies, throughput, requests that run at once, and memory."""
    ranges = map(figures.OUTPUT.own_interval, estimates)
    between = [ABSENT if ends is None else "-".join(counts(ends)) for ends in ranges]
    prices = [
        figure_column(price, estimates, drop=9)
        for price in (figures.INPUT_PRICE, figures.OUTPUT_PRICE)
    ]
    return [
        figure_column(figures.TTFT, estimates),
        figure_column(figures.TPOT, estimates),
        figure_column(figures.REQUEST, estimates, drop=6),
        figure_column(figures.OUTPUT, estimates),
        Column(
            head="interval",
            unit="90%",
            meaning=f"of {figures.OUTPUT.note}",
            cells=tuple(between),
            drop=3,
        ),
        figure_column(figures.FLYING, estimates, drop=5),
        figure_column(figures.USERS, estimates, drop=8),
        *(
            replace(price, unit="$/M", meaning="")
            for price in prices
            if set(price.cells) != {ABSENT}
        ),
        figure_column(figures.SERVED_MEMORY, estimates, drop=4),
    ]


def duration_column(
    head: str, seconds: Sequence[float | None], *, meaning: str = "", drop: int = 0
) -> Column:
    """Durations in the unit of the longest."""
    unit, size = duration_unit(seconds)
    return Column(head=head, unit=unit, cells=scaled(seconds, size), meaning=meaning, drop=drop)


def duration_unit(seconds: Iterable[float | None]) -> tuple[str, float]:
    """The unit that durations of one column share, and its seconds: that of the longest."""
    longest = max((each for each in seconds if each is not None), default=1.0)
    return next(
        ((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if longest >= size), ("us", 1e-6)
    )


def scaled(values: Sequence[float | None], size: float) -> tuple[str, ...]:
    """Values in a unit of `size`, all with as many decimals as give the smallest four digits: at
    most 2, or 3 below 10.
    """
    figures = [None if value is None else value / size for value in values]
    sizes = [abs(figure) for figure in figures if figure] or [1.0]
    places = min(max(3 - math.floor(math.log10(min(sizes))), 0), 3 if max(sizes) < 10.0 else 2)
    return tuple(ABSENT if figure is None else f"{figure:,.{places}f}" for figure in figures)


def counts(values: Iterable[float | None]) -> tuple[str, ...]:
    """Whole numbers."""
    return tuple(ABSENT if value is None else f"{value:,.0f}" for value in values)


def decimals(values: Iterable[float | None]) -> tuple[str, ...]:
    """Numbers with one decimal."""
    return tuple(ABSENT if value is None else f"{value:,.1f}" for value in values)


def percents(fractions: Iterable[float | None]) -> tuple[str, ...]:
    """Shares in per cent."""
    return decimals(None if each is None else 100.0 * each for each in fractions)


def gibs(sizes: Iterable[float | None]) -> tuple[str, ...]:
    """Bytes in GiB."""
    return decimals(None if size is None else size / GIB for size in sizes)


def _written(text: str) -> Callable[[Iterable[float | None]], tuple[str, ...]]:
    return lambda values: tuple(ABSENT if value is None else text.format(value) for value in values)


WRITTEN: dict[str, tuple[str, Callable[[Iterable[float | None]], tuple[str, ...]]]] = {
    "bytes": ("GiB", gibs),
    "share": ("%", percents),
    "change": (
        "%",
        lambda values: _written("{:+.1f}")(
            None if each is None else 100.0 * each for each in values
        ),
    ),
    "rate": ("/s/GPU", counts),
    "count": ("", counts),
    "dollars": ("$", _written("{:,.2f}")),
    "days": ("", lambda values: tuple(ABSENT if day is None else decimal(day) for day in values)),
}
"""Unit in the head of a column, and how its cells are written, by a figure's unit."""


def parts_columns(parts: Mapping[str, float], figures: Column) -> list[Column]:
    """Parts of a whole by name, their figures and their shares."""
    total = sum(parts.values()) or 1.0
    names = Column(head="part", cells=tuple(map(label, parts)), left=True)
    return [
        names,
        figures,
        Column(head="share", unit="%", cells=percents(value / total for value in parts.values())),
    ]
