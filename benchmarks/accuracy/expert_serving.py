"""Served mixtures beside predictions: `python -m benchmarks.accuracy.expert_serving [--data DIR]
[--json]`.

Constants of experts are fitted anew for every figure, without the load, the layout (a model's
tensor parallel size) or the model that they are quoted on; engines' constants come from dense
models. Pools apart and queued loads saw no constant of experts at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import fit_pools
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_experts import left_out, mixtures, predicted, prepared, with_scatter
from benchmarks.accuracy.inference import regret
from benchmarks.accuracy.serving_rows import PoolRun, pool_runs, queued_runs
from benchmarks.accuracy.serving_runs import Predicted, ServingRun, log_ratios
from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.efficiency import expert_efficiency, pool_efficiency
from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.engines import ExpertEfficiency

KEYS = {
    "load left out": lambda run: run.concurrency,
    "layout left out": lambda run: (run.model, run.config.tensor_parallel_size),
    "model left out": lambda run: run.model,
}


def evaluate(folder: Path) -> dict[str, Any]:
    """Return, by what was left out, errors of all runs and each series, intervals and the choice of
    a layout; pools apart.
    """
    runs = mixtures(folder)
    report: dict[str, Any] = {}
    for name, key in KEYS.items():
        parts = left_out(runs, key)
        pairs = [pair for _, members in parts.values() for pair in members]
        report[name] = {"all": figures(pairs)} | {
            series: figures(members) for series, members in _by_series(pairs).items()
        }
        report[name]["best layout"] = regret(pairs)
        if name == "model left out":
            report["intervals"] = _held(parts.values())
    report["offline"] = _offline(
        [run for run in queued_runs(folder) if catalogue_model(run.model).num_experts]
    )
    report["pools"] = _pool_figures(fit_pools.told(folder))
    report["pools of unknown size"] = sum(run.replicas is None for run in pool_runs(folder))
    return report


def figures(pairs: Sequence[Predicted]) -> dict[str, float]:
    """Errors of TPOT (mean) and TTFT (median), and both biases."""
    tpot, ttft = log_ratios(pairs, "tpot"), log_ratios(pairs, "ttft")
    return _errors(tpot, ttft)


def _errors(tpot: Any, ttft: Any) -> dict[str, float]:
    return {
        "runs": len(tpot),
        "tpot_error": float(np.abs(np.expm1(tpot)).mean()),
        "tpot_bias": float(tpot.mean()),
        "ttft_median_error": float(np.median(np.abs(np.expm1(ttft)))),
        "ttft_bias": float(ttft.mean()),
    }


def _by_series(pairs: Iterable[Predicted]) -> dict[str, list[Predicted]]:
    grouped: dict[str, list[Predicted]] = {}
    for pair in pairs:
        run = pair.run
        grouped.setdefault(
            f"{run.engine} {run.version or '?'}, {run.model} {run.precision}, {run.gpu}", []
        ).append(pair)
    return grouped


def _held(parts: Iterable[tuple[ExpertEfficiency, list[Predicted]]]) -> dict[str, float]:
    """Share of runs inside 90 % intervals whose width comes from the other models left out."""
    members = list(parts)
    inside: dict[str, list[bool]] = {"tpot": [], "ttft": []}
    for i, (constants, pairs) in enumerate(members):
        others = [each for j, (_, each) in enumerate(members) if j != i]
        profile = with_scatter(constants, others)
        for what, kept in inside.items():
            kept += (
                np.abs(log_ratios(pairs, what))
                <= NORMAL_QUANTILE * getattr(profile, f"{what}_log_sd")
            ).tolist()
    return {what: float(np.mean(kept)) for what, kept in inside.items()}


def _offline(runs: Sequence[ServingRun]) -> dict[str, Any]:
    """Errors of throughput with all requests queued at once, by the shipped constants, which saw
    none of these.
    """
    if not runs:
        return {}
    pairs = predicted(prepared(runs), expert_efficiency(engine=runs[0].engine))
    parts = {"all": pairs} | {f"{run.model} {run.gpu}": [] for run in runs}
    for pair in pairs:
        parts[f"{pair.run.model} {pair.run.gpu}"].append(pair)
    ratios = {name: log_ratios(members, "throughput") for name, members in parts.items()}
    rows = {
        name: {"runs": len(z), "error": float(np.abs(np.expm1(z)).mean()), "bias": float(z.mean())}
        for name, z in ratios.items()
    }
    return rows | {"best layout": regret(pairs)}


def _pool_figures(runs: Sequence[PoolRun]) -> dict[str, Any]:
    """Errors of pools apart whose numbers of replicas are told, each by hops between pools that saw
    neither its engine nor its lengths; and the share inside intervals.
    """
    pairs = [pair for members in fit_pools.left_out(runs).values() for pair in members]
    if not pairs:
        return {}
    tpot, ttft = (np.array([pair.log_ratio(what) for pair in pairs]) for what in ("tpot", "ttft"))
    profile = pool_efficiency()
    inside = {
        f"{what}_inside": float(
            np.mean(np.abs(logs) <= NORMAL_QUANTILE * getattr(profile, f"{what}_log_sd"))
        )
        for what, logs in (("tpot", tpot), ("ttft", ttft))
    }
    return _errors(tpot, ttft) | inside


def as_text(report: dict[str, Any]) -> str:
    lines = []
    for name in KEYS:
        lines.append(f"{name:70} runs   TPOT  bias | TTFT median  bias")
        rows = dict(report[name])
        best = rows.pop("best layout")
        lines += [_line(series, row) for series, row in rows.items()]
        chosen = f"{best['best_chosen']} of {best['groups']}"
        lines.append(
            f"  best TP by tokens/s/GPU chosen in {chosen} groups, worst loses {best['worst']:.1%}"
        )
    inside = report["intervals"]
    lines.append(
        f"90 % intervals of a model left out hold {inside['tpot']:.0%} of TPOT, "
        f"{inside['ttft']:.0%} of TTFT"
    )
    if rows := dict(report["offline"]):
        best = rows.pop("best layout")
        lines.append("All requests queued at once: output tokens a second")
        lines += [
            f"  {name:68} {row['runs']:4.0f} {row['error']:6.1%} {row['bias']:+.2f}"
            for name, row in rows.items()
        ]
        lines.append(
            f"  best TP chosen in {best['best_chosen']} of {best['groups']} groups, worst loses "
            f"{best['worst']:.1%}"
        )
    if report["pools"]:
        lines += [
            "Prefill and decoding apart",
            _line("DeepSeek-V3, engine and length left out", report["pools"]),
        ]
        lines.append(
            "  90 % intervals hold {tpot_inside:.0%} of TPOT, {ttft_inside:.0%} of TTFT".format(
                **report["pools"]
            )
        )
        lines.append(f"  (of {report['pools of unknown size']} more the replicas are not told)")
    return "\n".join(lines)


def _line(name: str, f: dict[str, float]) -> str:
    return (
        f"  {name:68} {f['runs']:4.0f} {f['tpot_error']:6.1%} {f['tpot_bias']:+.2f} | "
        f"{f['ttft_median_error']:11.1%} {f['ttft_bias']:+.2f}"
    )


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate, as_text=as_text)
