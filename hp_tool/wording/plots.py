"""Plots of recommendations, machines and sensitivity (`recommend --plot`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hp_tool.catalog.hardware import machine_list_field
from hp_tool.domain.parts import label
from hp_tool.domain.query import Query
from hp_tool.domain.result import MemoryEstimate, Recommendation
from hp_tool.domain.sensitivity import Sensitivity
from hp_tool.domain.serving import ServingMemory, ServingRecommendation
from hp_tool.domain.units import GIB
from hp_tool.errors import InputError, MissingExtraError
from hp_tool.extras import require
from hp_tool.wording.columns import configuration_columns
from hp_tool.wording.words import serving_arithmetic

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SUFFIXES = (".html", ".png", ".svg", ".pdf")
ROW_PIXELS = 34
"""Height of one configuration in pixels."""
HEAD_PIXELS = 160
LEGENDS_PIXELS = 90
"""Height of the legends below the bars in pixels."""


def check_path(path: Path) -> None:
    """Check that `write_figure` can write this path, before the answer is computed.

    Raises:
        InputError: The suffix is unknown.
        MissingExtraError: A package for this format is missing.
    """
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} must end in one of {', '.join(SUFFIXES)}", field="--plot")
    if (
        path.suffix != ".html" or find_spec("plotly") is None
    ):  # Formats other than HTML need kaleido.
        require("plot", by="--plot")


def write_figure(figure: Figure, *, path: Path) -> None:
    """Write a figure in the format given by the path's suffix."""
    check_path(path)
    try:
        if path.suffix == ".html":
            figure.write_html(path, include_plotlyjs=True)
            return
        from kaleido.errors import ChromeNotFoundError

        try:
            figure.write_image(path, scale=2)
        except ChromeNotFoundError:
            raise MissingExtraError(
                f"{path.suffix} files require Chrome or Chromium; .html files do not"
            ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}", field="--plot"
        ) from None


def plot_title(query: Query) -> str:
    """Return a title with the model and the devices of a query."""
    model = (
        query.model
        if isinstance(query.model, str)
        else getattr(query.model, "name", None) or "custom model"
    )
    if machine_list_field(query.cluster) is not None:
        return f"{model} on several machines"
    if isinstance(query.cluster, str):
        return f"{model} on {query.cluster}"
    gpu = query.cluster.gpu if isinstance(query.cluster.gpu, str) else "GPUs"
    return f"{model} on {query.cluster.num_gpus} {gpu}"


def recommendations_figure(
    rows: Sequence[Recommendation] | Sequence[ServingRecommendation], *, title: str
) -> Figure:
    """Return stacked bars, best configuration on top: seconds by part, and GiB by part with a line
    at the capacity.

    For training, the seconds are the exposed seconds of one step, calibrated if possible. For
    serving, they are the latency of one request, in seconds.
    """
    from plotly.colors import qualitative
    from plotly.graph_objects import Bar
    from plotly.subplots import make_subplots

    if not rows:
        raise InputError("the answer has no configuration to plot", field="--plot")
    names = row_labels(rows)
    shown = [_row_parts(row) for row in rows]
    what = "step" if isinstance(rows[0], Recommendation) else "request"
    heads = (f"seconds of a {what}", "memory of the fullest device, GiB")
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, subplot_titles=heads, horizontal_spacing=0.03
    )
    for column, (unit, colours) in enumerate(
        (("s", qualitative.D3), ("GiB", qualitative.Set3)), start=1
    ):
        stacks = [seconds if column == 1 else sizes for seconds, sizes, _ in shown]
        used = [
            part
            for part in dict.fromkeys(p for stack in stacks for p in stack)
            if any(s.get(part) for s in stacks)
        ]
        for part, colour in zip(used, itertools.cycle(colours), strict=False):
            name, values = label(part), [stack.get(part, 0.0) for stack in stacks]
            bar = Bar(
                name=name,
                x=values,
                y=names,
                orientation="h",
                marker_color=colour,
                legend=("legend", "legend2")[column - 1],
                hovertemplate=f"%{{y}}<br>%{{x:.4g}} {unit}<extra>{name}</extra>",
            )
            figure.add_trace(bar, row=1, col=column)
    figure.add_vline(x=shown[0][2], line={"dash": "dash", "color": "crimson"}, row=1, col=2)
    figure.update_yaxes(autorange="reversed")  # Rank 1 on top.
    height = HEAD_PIXELS + LEGENDS_PIXELS + ROW_PIXELS * len(rows)
    below = {
        "orientation": "h",
        "traceorder": "normal",
        "x": 0.0,
        "yanchor": "top",
        "yref": "container",
    }
    figure.update_layout(
        barmode="stack",
        template="plotly_white",
        title=title,
        width=1300,
        height=height,
        margin={"b": LEGENDS_PIXELS + 30},
        legend=below | {"title_text": f"{what}:", "y": LEGENDS_PIXELS / height},
        legend2=below | {"title_text": "memory:", "y": 0.5 * LEGENDS_PIXELS / height},
    )
    return figure


def machines_figure(
    rows: Sequence[Recommendation], front: Sequence[Recommendation], *, title: str
) -> Figure:
    """Return a plot of days against dollars for the best row of each machine, with 90% intervals
    and the Pareto front as a line.
    """
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for name, shown, mode in (
        ("machines", rows, "markers"),
        ("Pareto front", front, "lines+markers"),
    ):
        known = [row for row in shown if row.cost is not None and row.days_interval is not None]
        days = [row.preferred_estimate.calendar_days or 0.0 for row in known]
        spread = [
            abs(end - day)
            for row, day in zip(known, days, strict=True)
            for end in row.days_interval or ()
        ]
        figure.add_trace(
            Scatter(
                name=name,
                x=[row.cost for row in known],
                y=days,
                mode=mode,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": spread[1::2],
                    "arrayminus": spread[::2],
                },
                text=[
                    f"{row.preferred_estimate.provenance['num_gpus']} x {row.cluster}"
                    for row in known
                ],
                hovertemplate="%{text}<br>$%{x:,.0f}, %{y:.3g} days<extra></extra>",
            )
        )
    figure.update_layout(
        template="plotly_white",
        title=title,
        width=1100,
        height=650,
        xaxis_title="US dollars",
        yaxis_title="days",
    )
    return figure


def sensitivity_figure(sensitivity: Sensitivity, *, title: str) -> Figure:
    """Return a plot of step time and GPU-seconds by number of GPUs, with bars for the effect of
    each change on the step time of rank 1.
    """
    from plotly.graph_objects import Bar, Scatter
    from plotly.subplots import make_subplots

    heads = ("by number of GPUs", "change of rank 1's step, %")
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=heads,
        specs=[[{"secondary_y": True}, {}]],
        horizontal_spacing=0.2,
    )
    gpus = [point.num_gpus for point in sensitivity.scaling]
    for name, values, second in (
        ("seconds of a step", [point.step_s for point in sensitivity.scaling], False),
        (
            "GPU-seconds of a step (cost)",
            [point.gpu_seconds_per_step for point in sensitivity.scaling],
            True,
        ),
    ):
        line = Scatter(
            name=name,
            x=gpus,
            y=values,
            mode="lines+markers",
            hovertemplate="%{x} GPUs<br>%{y:.4g}<extra></extra>",
        )
        figure.add_trace(line, row=1, col=1, secondary_y=second)
        figure.update_yaxes(title_text=name, rangemode="tozero", secondary_y=second, row=1, col=1)
    figure.update_xaxes(type="log", tickvals=gpus, title_text="GPUs", row=1, col=1)
    changes = [
        axis
        for axis in (*sensitivity.axes, *sensitivity.hardware)
        if axis.change_fraction is not None
    ]
    bars = Bar(
        x=[100.0 * (change.change_fraction or 0.0) for change in changes],
        y=[change.change.replace("_", " ") for change in changes],
        orientation="h",
        showlegend=False,
        hovertemplate="%{y}<br>%{x:+.1f}%<extra></extra>",
    )
    figure.add_trace(bars, row=1, col=2)
    figure.update_yaxes(autorange="reversed", row=1, col=2)
    figure.update_layout(
        template="plotly_white",
        title=title,
        width=1300,
        height=HEAD_PIXELS + ROW_PIXELS * max(len(changes), 8),
    )
    return figure


def _row_parts(
    row: Recommendation | ServingRecommendation,
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the seconds by part, the GiB by part, and the capacity in GiB."""
    memory: MemoryEstimate | ServingMemory | None
    if isinstance(row, ServingRecommendation):
        memory, seconds = row.estimate.memory, row.estimate.parts_s
    else:
        estimate = row.preferred_estimate
        memory, seconds = estimate.memory, estimate.time.parts_s if estimate.time else None
    assert memory is not None and seconds is not None  # Rows of a ranking have both.
    sizes = {part: size / GIB for part, size in memory.parts_bytes.items()}
    return seconds, sizes, memory.capacity_bytes / GIB


def row_labels(rows: Sequence[Recommendation] | Sequence[ServingRecommendation]) -> list[str]:
    """Return row labels such as `1: TP 4, PP 8, ...`: the rank, TP and PP, and the axes that differ
    between rows.
    """
    serving = [row for row in rows if isinstance(row, ServingRecommendation)]
    if serving:
        return [
            f"{r.rank}: {serving_arithmetic(r.parallel, replicas=r.estimate.replicas)}"
            for r in serving
        ]
    training = [row for row in rows if isinstance(row, Recommendation)]
    columns = configuration_columns([row.parallel for row in training])
    distinctive = [c for number, c in enumerate(columns) if number < 2 or len(set(c.cells)) > 1]
    words = [
        ", ".join(f"{c.head} {c.cells[index]}" for c in distinctive)
        for index in range(len(training))
    ]
    return [f"{row.rank}: {word}" for row, word in zip(training, words, strict=True)]
