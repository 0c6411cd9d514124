"""Answers as an agent reads them: few figures, each with its interval and what it rests on, and
lists of bounded length.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from hp_tool.domain.prices import Priced
from hp_tool.wording import figures as render

Answer = Mapping[str, Any]
Basis = Literal["measured", "fitted", "extrapolated"]
WITH_STEP = ("days", "effective_days", "gpu_hours", "cost")
"""Figures in proportion to the step time."""
TRAINING = (
    *(
        each
        for each in render.TRAINING
        if each.name in ("step_s", "memory_total_bytes", "tokens_per_second_per_gpu", "mfu")
    ),
    *(
        render.Figure(name=name, label=name, unit="days", scale=(render.STEP, 1))
        for name in WITH_STEP
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
"""What serving bears: requests in flight as asked or found, people behind them, the most there is
room for, the most within the targets.
"""
IDLE = {
    **dict.fromkeys(
        ("virtual_pipeline_parallel_size", "context_parallel_size", "expert_parallel_size"), 1
    ),
    "expert_tensor_parallel_size": 1,
    "attention_data_parallel_size": 1,
    "data_parallel_shard_size": 0,
    "redundant_experts": 0,
}
"""Values of `parallel` that say nothing, and are what is assumed where they are left out."""
PLACES = (
    "rank",
    "group",
    "out_of_memory_probability",
    "set",
    *(each.name for each in fields(Priced)),
)
"""What a row says beside its estimate: where it stands, and over several machines what each
costs.
"""
MAX_ROWS = 20
MAX_ITEMS = 40
MAX_TEXT = 300


def figure(value: float, interval: Sequence[float] | None, basis: Basis) -> dict[str, Any]:
    """{value, interval, basis}, with four significant digits."""
    bounds = None if interval is None else [_rounded(each) for each in interval]
    return {"value": _rounded(value), "interval": bounds, "basis": basis}


def predicted(answer: Answer) -> Answer:
    """The estimate of an answer or row, corrected by what was measured where it can be."""
    estimate: Answer = answer.get("calibrated_estimate") or answer["estimate"]
    return estimate


def basis_of(estimate: Answer) -> tuple[Basis, list[str]]:
    """Whether the constants behind an estimate were fitted on runs like it, and if not, what no
    measurement covers.
    """
    provenance = estimate.get("provenance") or {}
    if "calibration" in provenance and "calibration_unused" not in provenance:
        return "fitted", []
    reasons = [
        f"{what} on {provenance.get('gpu')}: none measured"
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
    """An estimate of a training or of serving: configuration, figures, and where memory and time
    go.
    """
    basis, because = basis_of(answer)
    intervals, memory = answer.get("intervals") or {}, answer.get("memory") or {}
    time = answer.get("time") or {}
    parts = time.get("parts_s") or answer.get("parts_s") or {}
    return _without_empty(
        {
            "feasible": answer["feasible"],
            "reasons": bounded(each["message"] for each in answer.get("reasons", ())),
            "parallel": parallel(answer.get("parallel") or {}),
            "replicas": answer.get("replicas"),
            "load": {name: answer[name] for name in LOAD if answer.get(name) is not None},
            "fit": answer.get("fit"),
            "out_of_memory_probability": answer.get("out_of_memory_probability"),
            "figures": _training(answer, basis) if "time" in answer else _serving(answer, basis),
            "confidence": intervals.get("confidence"),
            "narrowest": answer.get("narrowest"),
            "with_recipe": answer.get("with_recipe"),
            "extrapolated_because": because,
            "memory_capacity_bytes": _rounded(memory["capacity_bytes"])
            if "capacity_bytes" in memory
            else None,
            "memory_parts_bytes": _parts(memory, suffix="_bytes"),
            "time_parts_s": {name: _rounded(seconds) for name, seconds in parts.items() if seconds},
            "assumed": (answer.get("provenance") or {}).get("assumed"),
            "recompute": (answer.get("provenance") or {}).get("recompute"),
        }
    )


def recommendation(row: Answer) -> dict[str, Any]:
    """One row of a ranking; a measured one has what its run measured."""
    whole = estimate(predicted(row))
    keep = (
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
        name: whole[name]
        for name in keep
        if name in whole and (name != "feasible" or not whole[name])
    }
    places = {name: row[name] for name in PLACES if row.get(name) is not None}
    return _without_empty(
        {**places, **chosen, "measured": measurement(row.get("measurement") or {})}
    )


def measurement(row: Answer) -> dict[str, Any]:
    """What a run measured; the step of a reduced run is what it implies for the whole
    configuration.
    """
    if not row:
        return {}
    figures = {
        name: figure(row[name], None, "measured")
        for name in ("step_s", "tokens_per_second_per_gpu", "peak_memory_bytes")
        if row.get(name) is not None
    }
    if "step_s" in figures and (spread := row.get("step_s_spread")) is not None:
        figures["step_s"]["interval"] = [
            _rounded(row["step_s"] - spread / 2),
            _rounded(row["step_s"] + spread / 2),
        ]
    if (implied := row.get("extrapolated_step_s")) is not None:
        figures["whole_step_s"] = figure(
            implied, row.get("extrapolated_step_s_interval"), "extrapolated"
        )
    figures |= {
        name: figure(value, None, "measured")
        for name, value in (row.get("load") or {}).items()
        if _number(value)
    }
    return _without_empty(
        {"status": row.get("status"), "figures": figures, "cause": row.get("cause")}
    )


def run(trial: Answer) -> dict[str, Any]:
    """A profile run: what was predicted before it, and what it measured."""
    before = trial["predicted"]
    step_s = before.get("calibrated_step_s", before.get("step_s"))
    return _without_empty(
        {
            "number": trial["number"],
            "state": trial["state"],
            "parallel": parallel(trial["parallel"]),
            "predicted_step_s": step_s
            and figure(step_s, before.get("calibrated_step_s_interval"), "fitted"),
            "measured": measurement(trial["measurement"] or {}),
            "cause": trial["cause"],
        }
    )


def choice(row: Answer) -> dict[str, Any]:
    """A value by a published rule; what other rules give stands beside it."""
    values = [*(row.get("alternatives") or {}).values(), row["value"]]
    spread = [min(values), max(values)] if len(values) > 1 and all(map(_number, values)) else None
    basis: Basis = "extrapolated" if row["extrapolated"] else "fitted"
    value = (
        figure(row["value"], spread, basis)
        if _number(row["value"])
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
    """A configuration as valid input, without what says nothing."""
    return {
        name: value
        for name, value in config.items()
        if value is not None and IDLE.get(name, ...) != value
    }


def bounded(items: Iterable[Any], *, most: int = MAX_ITEMS) -> list[Any]:
    """The first items, texts cut to a readable length; the last one says how many were left out."""
    rows = [
        each if not isinstance(each, str) or len(each) <= MAX_TEXT else each[:MAX_TEXT] + " ..."
        for each in items
    ]
    return rows if len(rows) <= most else [*rows[:most], f"... and {len(rows) - most} more"]


def sizing(answer: Answer) -> dict[str, Any]:
    """A training that fits a budget: model, tokens and hyperparameters by published rules, and the
    days it takes.
    """
    row = answer.get("recommendation")
    estimate = predicted(row) if row else {}
    ratios = (
        [each / estimate["time"]["step_s"] for each in estimate["intervals"]["step_s"]]
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
    days = {name: answer[name] for name in WITH_STEP if answer.get(name) is not None}
    return _without_empty(
        {
            **{name: answer[name] for name in names if answer.get(name) is not None},
            "reasons": [each["message"] for each in answer["reasons"]],
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
            "law": choice(answer["law"]),
            "loss": choice(answer["loss"]),
            "shape": [choice(each) for each in answer["shape"]],
            "hyperparameters": [choice(each) for each in answer["hyperparameters"]],
            "recommendation": recommendation(row) if row else None,
            "query": answer.get("query"),
        }
    )


def _training(answer: Answer, basis: Basis) -> dict[str, Any]:
    return _figures(TRAINING, answer, basis)


def _serving(answer: Answer, basis: Basis) -> dict[str, Any]:
    if not answer.get("intervals"):
        return {}
    figures = _figures(SERVING, answer, basis)
    ttft, tpot = (each.between(answer) for each in (render.TTFT, render.TPOT))
    if (
        (latency := render.REQUEST.value(answer)) is not None
        and answer.get("tpot_s")
        and ttft
        and tpot
    ):
        after = (latency - answer["ttft_s"]) / answer["tpot_s"]
        figures["request_latency_s"] = figure(
            latency, [first + after * each for first, each in zip(ttft, tpot, strict=True)], basis
        )
    return figures


def _figures(known: Iterable[render.Figure], answer: Answer, basis: Basis) -> dict[str, Any]:
    values = ((each, each.value(answer)) for each in known)
    return {
        each.name: figure(value, each.between(answer), basis)
        for each, value in values
        if value is not None
    }


def _parts(memory: Answer, *, suffix: str) -> dict[str, float]:
    """The parts that sum to the total, without the sums themselves."""
    sums = (
        "total",
        "capacity",
        "allocated",
        "reserved",
        "layer_activations",
        "host",
        "kv_cache_capacity",
    )
    names = {name: name.removesuffix(suffix) for name in memory if name.endswith(suffix)}
    return {
        short: _rounded(memory[name])
        for name, short in names.items()
        if short not in sums and memory[name]
    }


def _rounded(value: float) -> float:
    """Four significant digits, and every digit of a count."""
    if isinstance(value, int):
        return value
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 2**63 else short


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [], {}, "")}


def explanation(answer: Answer) -> dict[str, Any]:
    """What recorded steps say, of traces or of a log's timers."""
    changes = [
        {
            "change": each["change"],
            "seconds": _rounded(each["seconds"]),
            "seconds_interval": [_rounded(end) for end in each["seconds_interval"]],
            "flags": each["flags"],
        }
        for each in answer.get("suggestions", ())[:MAX_ROWS]
    ]
    return _without_empty(
        {
            "step_s": _rounded(answer["step_s"]),
            "steps": answer["steps"],
            "critical_rank": answer.get("critical_rank"),
            "findings": bounded(each["text"] for each in answer["findings"]),
            **{
                key: {part["name"]: _rounded(part[key]) for part in answer["parts"] if part[key]}
                for key in ("measured_s", "predicted_s")
            },
            "changes": changes,
            "query": answer.get("query"),
        }
    )


def watched(job: Answer) -> dict[str, Any]:
    """A watched job with its verdict."""
    verdict = job["verdict"]
    paces = {
        name: {
            "step_s": _rounded(pace["step_s"]),
            "interval": [_rounded(end) for end in pace["interval"]],
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
                {"kind": each["kind"], "text": each["text"]}
                for each in verdict["causes"][:MAX_ROWS]
            ],
        }
    )
