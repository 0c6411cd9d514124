"""Figures of an estimate, such as the step time: name, label, unit, path and interval.

Pages, terminal tables, HTML and agents' answers share these definitions. A figure can be read from
an object or from its JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hp_tool.domain import latencies
from hp_tool.domain.latencies import LATENCIES
from hp_tool.wording.words import MEANINGS

Unit = Literal[
    "seconds",
    "bytes",
    "rate",
    "share",
    "change",
    "tflops",
    "days",
    "hours",
    "dollars",
    "joules",
    "kilograms",
    "count",
]
ColumnUnit = Unit | Literal["risk", "bandwidth", "moment", "text", "heading"]
"""Unit of a figure in lists. `heading` marks the column that names the row."""
LESS_IS_BETTER = frozenset({"seconds", "bytes", "days", "hours", "dollars", "joules", "kilograms"})
"""Units for which smaller values are better."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of an estimate, a fix or a measurement."""

    name: str
    """Name in JSON."""
    label: str
    """Label on a page."""
    head: str = ""
    """Head of a table column."""
    unit: ColumnUnit
    per: str = ""
    """Text after the unit in a column's head, such as `/h`."""
    path: str = ""
    """Dotted path of the value in an estimate; empty: `name`."""
    interval: str = ""
    """Dotted path of the interval in an estimate; empty: no interval."""
    scale: tuple["Figure", Literal[1, -1]] | None = None
    """Another figure with an interval, to which this figure is proportional (1) or inversely
    proportional (-1).
    """
    note: str = ""
    """Short explanation of the figure."""

    def value(self, source: object) -> float | None:
        """Return the figure's value in `source`; None if it has none."""
        value: float | None = value_at(source, self.path or self.name)
        return value

    def stored_interval(self, source: object) -> Interval | None:
        """Return this figure's interval in `source`, if it is stored there."""
        ends: Sequence[float] | None = value_at(source, self.interval) if self.interval else None
        return None if ends is None else (ends[0], ends[1])

    def interval_in(self, source: object) -> Interval | None:
        """Return this figure's interval in `source`: the stored one, else one derived from
        `scale`.
        """
        if self.scale is None:
            return self.stored_interval(source)
        base, power = self.scale
        value, base_value = self.value(source), base.value(source)
        ends = base.stored_interval(source)
        if value is None or not base_value or ends is None:
            return None
        low, high = sorted(value * (end / base_value) ** power for end in ends)
        return low, high


def value_at(source: Any, path: str) -> Any:
    """Return the value at a dotted path of an object or a mapping; None if a value on the path is
    None or a mapping lacks the key.

    Raises:
        AttributeError: An object lacks the attribute.
    """
    for name in path.split("."):
        if source is not None:
            source = source.get(name) if isinstance(source, Mapping) else getattr(source, name)
    return source


STEP = Figure(
    name="step_s",
    label="Step time",
    head="step",
    unit="seconds",
    path="time.step_s",
    interval="intervals.step_s",
)
MEMORY = Figure(
    name="memory_total_bytes",
    label="Memory",
    head="memory",
    unit="bytes",
    path="memory.total_bytes",
    interval="intervals.memory_total_bytes",
)
FIT = Figure(name="fit", label="Fit", head="fit", unit="text")
TOKENS = Figure(
    name="tokens_per_second_per_gpu",
    label="Tokens/s per GPU",
    head="tokens",
    unit="rate",
    scale=(STEP, -1),
    note="tokens/s/GPU",
)
MFU = Figure(
    name="mfu", label="MFU", head="MFU", unit="share", scale=(STEP, -1), note=MEANINGS["MFU"]
)
DAYS = Figure(name="days", label="Training", head="days", unit="days", scale=(STEP, 1))
"""Days of training without failures."""
CALENDAR = Figure(name="calendar_days", label="Training", head="days", unit="days", scale=(STEP, 1))
COST = Figure(name="cost", label="Cost", head="cost", unit="dollars", scale=(STEP, 1))
TRAINING = (
    STEP,
    MEMORY,
    TOKENS,
    MFU,
    Figure(
        name="mfu_causal",
        label="MFU, causal",
        unit="share",
        scale=(STEP, -1),
        note="with the causal half of attention",
    ),
    Figure(name="hfu", label="HFU", unit="share", scale=(STEP, -1), note="including recomputation"),
    Figure(
        name="model_tflops_per_gpu", label="Model TFLOP/s per GPU", unit="tflops", scale=(STEP, -1)
    ),
    CALENDAR,
    Figure(name="gpu_hours", label="GPU-hours", unit="hours", scale=(STEP, 1)),
    COST,
    Figure(name="energy", label="Energy", unit="joules"),
)
"""Figures of a training."""

TTFT, TPOT = (
    Figure(
        name=latency.key,
        label=latency.label,
        head=latency.head,
        unit="seconds",
        interval=f"intervals.{latency.key}",
        note=latency.noun,
    )
    for latency in (latencies.TTFT, latencies.TPOT)
)
REQUEST = Figure(
    name=latencies.REQUEST.key,
    label=latencies.REQUEST.label,
    head=latencies.REQUEST.head,
    unit="seconds",
)
OUTPUT = Figure(
    name="output_tokens_per_second_per_gpu",
    label="Output tokens/s per GPU",
    head="tokens",
    unit="rate",
    interval="intervals.output_tokens_per_second_per_gpu",
    note="output tokens/s/GPU",
)
USERS = Figure(
    name="users",
    label="Users",
    head="users",
    unit="count",
    note="people with one request at a time",
)
CONCURRENCY = Figure(name="concurrency", label="Requests in flight", head="in flight", unit="count")
SERVED_MEMORY = Figure(
    name="memory_total_bytes",
    label="Memory",
    head="memory",
    unit="bytes",
    path="memory.total_bytes",
)
REQUESTS = Figure(
    name="request_rate_per_second", label="Requests/s", unit="rate", scale=(OUTPUT, 1)
)
OUTPUT_PRICE = Figure(
    name="cost_per_million_output_tokens",
    label="Decoding alone, per million tokens",
    head="output",
    unit="dollars",
    per="/M",
    path="cost_per_million_tokens.output",
    scale=(OUTPUT, -1),
    note="without prefill",
)
INPUT_PRICE = Figure(
    name="cost_per_million_input_tokens",
    label="Cost per million input tokens",
    head="input",
    unit="dollars",
    per="/M",
    path="cost_per_million_tokens.input",
    scale=(OUTPUT, -1),
    note="of prefill",
)
PER_MILLION = Figure(
    name="cost_per_million_output_tokens",
    label="Cost per million output tokens",
    unit="dollars",
    scale=(OUTPUT, -1),
)
SERVING = (
    TTFT,
    TPOT,
    REQUEST,
    OUTPUT,
    REQUESTS,
    CONCURRENCY,
    USERS,
    SERVED_MEMORY,
    Figure(name="max_concurrency", label="Fit in KV cache and engine limit", unit="count"),
    PER_MILLION,
    OUTPUT_PRICE,
    INPUT_PRICE,
)
"""Figures of a serving configuration."""

AFTER_FIX = (
    Figure(name="memory_total_bytes", label="Memory", head="memory", unit="bytes"),
    Figure(name="step_s", label="Step", head="step", unit="seconds"),
    Figure(name="step_change_fraction", label="Step change", head="longer", unit="change"),
)
"""Figures of a fix, for a training run that does not fit."""
SERVED_AFTER_FIX = (
    AFTER_FIX[0],
    *(replace(figure, label=figure.head, interval="") for figure in (TTFT, TPOT)),
    Figure(
        name="output_tokens_per_second_per_gpu",
        label=OUTPUT.label,
        head="tokens",
        unit="rate",
        note=OUTPUT.note,
    ),
    Figure(
        name="throughput_change_fraction", label="Throughput change", head="more", unit="change"
    ),
)

MEASURED = (
    Figure(name="objective_s", label=STEP.label, unit="seconds"),
    Figure(name="tokens_per_second_per_gpu", label=TOKENS.label, unit="rate"),
)
"""Metrics of a measured training run, with the same labels as the predicted metrics."""
SERVED_MEASURED = (
    *(
        Figure(name=latency.key, label=latency.label, unit="seconds", path=f"load.{latency.key}")
        for latency in LATENCIES.values()
    ),
    Figure(name="tokens_per_second_per_gpu", label=OUTPUT.label, unit="rate"),
)
PEAK = Figure(name="peak_memory_bytes", label="Peak memory allocated", unit="bytes")
