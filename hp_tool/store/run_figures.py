"""Figures of a search's runs: cost, prediction and measurement, without logs and step lists."""

from dataclasses import fields
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from hp_tool.domain.measurement import Fidelity, Latencies
from hp_tool.domain.records import RunFigures
from hp_tool.domain.states import RunState
from hp_tool.store import tables
from hp_tool.store.columns import decode, decode_configuration

RUN, MEASURED = tables.runs, tables.measurements
LATENCIES = tuple(field.name for field in fields(Latencies))
CONVERTED_FIELDS = {
    "state",
    "parallel",
    "fidelity",
    "expected_step_s_interval",
    "objective_s",
    "latencies",
}
PLAIN_FIELDS = tuple(
    field.name for field in fields(RunFigures) if field.name not in CONVERTED_FIELDS
)
FIGURES = sa.select(
    RUN.c.id,
    RUN.c.number,
    RUN.c.state,
    sa.cast(RUN.c.parallel, sa.Text).label("parallel"),
    sa.cast(RUN.c.fidelity, sa.Text).label("fidelity"),
    RUN.c.gpu_seconds,
    RUN.c.finished_at,
    RUN.c.predicted["step_s"].as_float().label("predicted_step_s"),
    RUN.c.predicted["calibrated_step_s"].as_float().label("expected_step_s"),
    RUN.c.predicted[("calibrated_step_s_interval", 0)].as_float().label("low_s"),
    RUN.c.predicted[("calibrated_step_s_interval", 1)].as_float().label("high_s"),
    RUN.c.predicted["memory_allocated_bytes"].as_float().label("predicted_memory_bytes"),
    RUN.c.predicted["chosen_by"].as_string().label("chosen_by"),
    MEASURED.c.status,
    MEASURED.c.step_s,
    MEASURED.c.measurement["extrapolated_step_s"].as_float().label("extrapolated_step_s"),
    MEASURED.c.tokens_per_second_per_gpu,
    MEASURED.c.peak_memory_bytes,
    *(
        MEASURED.c.measurement[("load", name)].as_float().label(name)
        for name in (*LATENCIES, "penalised_latency_s")
    ),
    sa.func.coalesce(RUN.c.cause, MEASURED.c.measurement["cause"].as_string()).label("cause"),
).outerjoin_from(RUN, MEASURED, MEASURED.c.run_id == RUN.c.id)
"""Query for the figures only. Most of a run's JSON consists of logs and step lists."""


NAMES = tuple(FIGURES.selected_columns.keys())


def figures_of(connection: sa.Connection, search_id: str) -> list[RunFigures]:
    """Return the figures of a search's runs, ordered by run number."""
    rows = connection.execute(FIGURES.where(RUN.c.search_id == search_id).order_by(RUN.c.number))
    # Looking up columns by name in a row is slow.
    return [_run_figures(dict(zip(NAMES, row, strict=True))) for row in rows]


def _run_figures(row: dict[str, Any]) -> RunFigures:
    fidelity, low_s, high_s = _fidelity(row["fidelity"]), row["low_s"], row["high_s"]
    return RunFigures(
        **{name: row[name] for name in PLAIN_FIELDS},
        state=RunState(row["state"]),
        parallel=decode_configuration(row["parallel"]),
        fidelity=fidelity,
        expected_step_s_interval=None if low_s is None or high_s is None else (low_s, high_s),
        objective_s=row["penalised_latency_s"]
        or (row["step_s"] if fidelity.is_whole else row["extrapolated_step_s"]),
        latencies=None
        if row["ttft_s"] is None
        else Latencies(**{name: row[name] for name in LATENCIES}),
    )


@lru_cache(maxsize=256)
def _fidelity(text: str) -> Fidelity:
    return decode(Fidelity, text)
