"""Short answers for agents: a few metrics with interval and basis, and lists of limited length."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from hp_tool.domain.axes import AXES
from hp_tool.domain.parts import MEMORY_KEYS, SERVING_MEMORY_KEYS
from hp_tool.domain.prices import Priced
from hp_tool.wording import figures as render

Answer = Mapping[str, Any]
Basis = Literal["measured", "fitted", "extrapolated"]
STEP_PROPORTIONAL = ("days", "effective_days", "gpu_hours", "cost")
"""Figures that scale with the step time."""
TRAINING = (
    render.STEP,
    render.MEMORY,
    render.TOKENS,
    render.MFU,
    *(
        render.Figure(name=name, label=name, unit="days", scale=(render.STEP, 1))
        for name in STEP_PROPORTIONAL
    ),
)
SERVING = (
    render.TTFT,
    render.TPOT,
    render.OUTPUT,
    render.REQUESTS,
    render.INPUT_PRICE,
    render.OUTPUT_PRICE,
)
LOAD = ("concurrency", "users", "max_concurrency", "highest_load")
"""Load fields of a serving estimate: requests in flight, users, capacity, and the highest load that
meets the targets.
"""
IDLE = {axis.key: axis.idle for axis in AXES if axis.idle is not None} | {
    "data_parallel_shard_size": 0
}
"""Values of `parallel` for axes that a layout does not use. They are omitted."""
ROW_FIELDS = (
    "rank",
    "group",
    "out_of_memory_probability",
    "set",
    *(field.name for field in fields(Priced)),
)
"""Fields of a row besides its estimate: its rank and group, and costs if machines are compared."""
MAX_ROWS = 20
MAX_ITEMS = 40
MAX_TEXT = 300


def figure(value: float, interval: Sequence[float] | None, basis: Basis) -> dict[str, Any]:
    """Return {value, interval, basis}, rounded to four significant digits."""
    bounds = None if interval is None else [_round(end) for end in interval]
    return {"value": _round(value), "interval": bounds, "basis": basis}


def calibrated_estimate(answer: Answer) -> Answer:
    """Return the estimate of an answer or row, calibrated if possible."""
    estimate: Answer = answer.get("calibrated_estimate") or answer["estimate"]
    return estimate


def basis_of(estimate: Answer) -> tuple[Basis, list[str]]:
    """Return the basis, and the features without measurements.

    The basis is `fitted` if the constants were fitted to similar runs, else `extrapolated`.
    """
    provenance = estimate.get("provenance") or {}
    if "calibration" in provenance and "calibration_unused" not in provenance:
        return "fitted", []
    reasons = [
        f"no measurements of {what} on {provenance.get('gpu')}"
        for key, what in (
            ("gpu_efficiency_measured", "kernels"),
            ("framework_efficiency_measured", "trainings under this framework"),
            ("engine_efficiency_measured", "this release of the engine"),
        )
        if provenance.get(key) is False
    ]
    familiarity = estimate.get("familiarity") or {}
    reasons += [f"{name}: in no measured run" for name in familiarity.get("unmeasured", ())]
    return ("extrapolated" if reasons else "fitted"), reasons


def estimate(answer: Answer) -> dict[str, Any]:
    """Summarize an estimate: its configuration, metrics, memory by part and time by part."""
    basis, extrapolated_because = basis_of(answer)
    intervals, memory = answer.get("intervals") or {}, answer.get("memory") or {}
    time = answer.get("time") or {}
    parts = time.get("parts_s") or answer.get("parts_s") or {}
    return _without_empty(
        {
            "feasible": answer["feasible"],
            "reasons": limit_items(reason["message"] for reason in answer.get("reasons", ())),
            "parallel": parallel(answer.get("parallel") or {}),
            "replicas": answer.get("replicas"),
            "load": {name: answer[name] for name in LOAD if answer.get(name) is not None},
            "fit": answer.get("fit"),
            "out_of_memory_probability": answer.get("out_of_memory_probability"),
            "figures": _figures(TRAINING, answer, basis)
            if "time" in answer
            else _serving(answer, basis),
            "confidence": intervals.get("confidence"),
            "narrowest": answer.get("narrowest"),
            "with_recipe": answer.get("with_recipe"),
            "extrapolated_because": extrapolated_because,
            "memory_capacity_bytes": _round(memory["capacity_bytes"])
            if "capacity_bytes" in memory
            else None,
            "memory_parts_bytes": _parts(memory),
            "time_parts_s": {name: _round(seconds) for name, seconds in parts.items() if seconds},
            "assumed": (answer.get("provenance") or {}).get("assumed"),
            "recompute": (answer.get("provenance") or {}).get("recompute"),
        }
    )


def recommendation(row: Answer) -> dict[str, Any]:
    """Summarize a row of a ranking, with its measurement, if any."""
    summary = estimate(calibrated_estimate(row))
    shown = (
        "feasible",
        "reasons",
        "parallel",
        "replicas",
        "load",
        "fit",
        "figures",
        "extrapolated_because",
    )
    chosen = {
        name: summary[name]
        for name in shown
        if name in summary and (name != "feasible" or not summary[name])
    }
    places = {name: row[name] for name in ROW_FIELDS if row.get(name) is not None}
    return _without_empty(
        {**places, **chosen, "measured": measurement(row.get("measurement") or {})}
    )


def measurement(row: Answer) -> dict[str, Any]:
    """Summarize a measurement; for a reduced run, with the extrapolated step time."""
    if not row:
        return {}
    figures = {
        name: figure(row[name], None, "measured")
        for name in ("step_s", "tokens_per_second_per_gpu", "peak_memory_bytes")
        if row.get(name) is not None
    }
    if "step_s" in figures and (spread := row.get("step_s_spread")) is not None:
        figures["step_s"]["interval"] = [
            _round(row["step_s"] - spread / 2),
            _round(row["step_s"] + spread / 2),
        ]
    if (implied := row.get("extrapolated_step_s")) is not None:
        figures["whole_step_s"] = figure(
            implied, row.get("extrapolated_step_s_interval"), "extrapolated"
        )
    figures |= {
        name: figure(value, None, "measured")
        for name, value in (row.get("load") or {}).items()
        if _is_number(value)
    }
    return _without_empty(
        {"status": row.get("status"), "figures": figures, "cause": row.get("cause")}
    )


def run(trial: Answer) -> dict[str, Any]:
    """Summarize a profile run: its prediction and its measurement."""
    prediction = trial["predicted"]
    step_s = prediction.get("calibrated_step_s", prediction.get("step_s"))
    return _without_empty(
        {
            "number": trial["number"],
            "state": trial["state"],
            "parallel": parallel(trial["parallel"]),
            "predicted_step_s": step_s
            and figure(step_s, prediction.get("calibrated_step_s_interval"), "fitted"),
            "measured": measurement(trial["measurement"] or {}),
            "cause": trial["cause"],
        }
    )


def rule_value(row: Answer) -> dict[str, Any]:
    """Summarize a value from a published rule, with the range of values from other rules."""
    values = [*(row.get("alternatives") or {}).values(), row["value"]]
    spread = (
        [min(values), max(values)] if len(values) > 1 and all(map(_is_number, values)) else None
    )
    basis: Basis = "extrapolated" if row["extrapolated"] else "fitted"
    value = (
        figure(row["value"], spread, basis)
        if _is_number(row["value"])
        else {"value": row["value"], "basis": basis}
    )
    return {
        "name": row["name"],
        "unit": row["unit"],
        **value,
        "rule": row["rule"],
        "source": row["source"],
    }


def parallel(config: Answer) -> dict[str, Any]:
    """Return a configuration as valid input, without unused axes."""
    return {
        name: value
        for name, value in config.items()
        if value is not None and IDLE.get(name, ...) != value
    }


def limit_items(items: Iterable[Any], *, max_items: int = MAX_ITEMS) -> list[Any]:
    """Return the first items, with long texts truncated, and the number of omitted items."""
    rows = [
        item if not isinstance(item, str) or len(item) <= MAX_TEXT else item[:MAX_TEXT] + " ..."
        for item in items
    ]
    return (
        rows
        if len(rows) <= max_items
        else [*rows[:max_items], f"... and {len(rows) - max_items} more"]
    )


def sizing(answer: Answer) -> dict[str, Any]:
    """Summarize a sizing: model, tokens, hyperparameters and days."""
    row = answer.get("recommendation")
    estimate = calibrated_estimate(row) if row else {}
    ratios = (
        [end / estimate["time"]["step_s"] for end in estimate["intervals"]["step_s"]]
        if estimate
        else None
    )
    names = (
        "feasible",
        "parameters",
        "active_parameters",
        "tokens",
        "tokens_per_parameter",
        "flops",
        "num_gpus",
    )
    days = {name: answer[name] for name in STEP_PROPORTIONAL if answer.get(name) is not None}
    return _without_empty(
        {
            **{name: answer[name] for name in names if answer.get(name) is not None},
            "reasons": [reason["message"] for reason in answer["reasons"]],
            "model": {
                name: value
                for name, value in answer["model"].items()
                if value not in (None, False, 0)
            },
            "figures": {
                name: figure(
                    value, ratios and [value * ratio for ratio in ratios], basis_of(estimate)[0]
                )
                for name, value in days.items()
            },
            "law": rule_value(answer["law"]),
            "loss": rule_value(answer["loss"]),
            "shape": [rule_value(item) for item in answer["shape"]],
            "hyperparameters": [rule_value(item) for item in answer["hyperparameters"]],
            "recommendation": recommendation(row) if row else None,
            "query": answer.get("query"),
        }
    )


def _serving(answer: Answer, basis: Basis) -> dict[str, Any]:
    if not answer.get("intervals"):
        return {}
    figures = _figures(SERVING, answer, basis)
    ttft, tpot = (shown.interval_in(answer) for shown in (render.TTFT, render.TPOT))
    if (
        (latency := render.REQUEST.value(answer)) is not None
        and answer.get("tpot_s")
        and ttft
        and tpot
    ):
        after = (latency - answer["ttft_s"]) / answer["tpot_s"]
        figures["request_latency_s"] = figure(
            latency, [first + after * per for first, per in zip(ttft, tpot, strict=True)], basis
        )
    return figures


def _figures(shown: Iterable[render.Figure], answer: Answer, basis: Basis) -> dict[str, Any]:
    values = ((item, item.value(answer)) for item in shown)
    return {
        item.name: figure(value, item.interval_in(answer), basis)
        for item, value in values
        if value is not None
    }


def _parts(memory: Answer) -> dict[str, float]:
    sizes = {name: memory.get(f"{name}_bytes") for name in (*MEMORY_KEYS, *SERVING_MEMORY_KEYS)}
    return {name: _round(size) for name, size in sizes.items() if size}


def _round(value: float) -> float:
    if isinstance(value, int):
        return value
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 2**63 else short


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [], {}, "")}


def explanation(answer: Answer) -> dict[str, Any]:
    """Summarize an explanation of traces or of a log."""
    changes = [
        {
            "change": suggestion["change"],
            "seconds": _round(suggestion["seconds"]),
            "seconds_interval": [_round(end) for end in suggestion["seconds_interval"]],
            "flags": suggestion["flags"],
        }
        for suggestion in answer.get("suggestions", ())[:MAX_ROWS]
    ]
    return _without_empty(
        {
            "step_s": _round(answer["step_s"]),
            "steps": answer["steps"],
            "critical_rank": answer.get("critical_rank"),
            "findings": limit_items(finding["text"] for finding in answer["findings"]),
            **{
                key: {part["name"]: _round(part[key]) for part in answer["parts"] if part[key]}
                for key in ("measured_s", "predicted_s")
            },
            "changes": changes,
            "query": answer.get("query"),
        }
    )


def watched(job: Answer) -> dict[str, Any]:
    """Summarize a watched job and its verdict."""
    verdict = job["verdict"]
    paces = {
        name: {
            "step_s": _round(pace["step_s"]),
            "interval": [_round(end) for end in pace["interval"]],
        }
        for name in ("now", "was", "expected")
        if (pace := verdict[name]) is not None
    }
    return _without_empty(
        {
            "id": job["id"],
            "name": job["name"],
            "status": verdict["status"],
            "text": [line.strip() for line in verdict["text"]],
            **paces,
            **{
                name: verdict[name]
                for name in ("slowdown", "lag", "loss_per_day", "steps", "ranks", "dropped")
            },
            "causes": [
                {"kind": cause["kind"], "text": cause["text"]}
                for cause in verdict["causes"][:MAX_ROWS]
            ],
        }
    )
