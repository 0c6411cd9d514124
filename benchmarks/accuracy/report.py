"""The accuracy report: every section that the folder of measured figures allows, as a structure and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accuracy import activations, days, grid, heldout
from benchmarks.accuracy.data import read
from benchmarks.accuracy.fit_frameworks import leave_one_out
from benchmarks.accuracy.korthikanti import GPU, Comparison, table4, table5
from benchmarks.accuracy.sections import Role, Section
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency

LEFT_OUT = "ops/ (A100), Table 4 and the other models' rows of Table 5; priors for the rest"


def sections(folder: Path) -> list[Section]:
    """Table 5 leaving one model out is the headline; what the shipped constants say stands beside, labelled."""
    profile = efficiency(gpu=gpu(GPU), framework="megatron-core")
    shipped = profile.framework.fitted_on
    rows5 = read(folder, "korthikanti2022_table5.csv")
    rows4 = read(folder, "korthikanti2022_table4.csv")
    bridge, b200, older = heldout.megatron_bridge(folder), heldout.b200(folder), heldout.megatron_2020(folder)
    candidates: list[tuple[str, Role, str, list[Any]]] = [
        ("Table 5, leaving one model out (s)", "headline", LEFT_OUT, leave_one_out(folder) if rows5 and rows4 else []),
        ("Table 5, shipped constants (s)", "in sample", shipped, table5(rows5, profile)),
        ("Table 4, one 22B layer (ms)", "in sample", shipped, table4(rows4, profile)),
        ("Figures 1 and 7, activation memory", "headline", "nothing: formulas alone", activations.figures(folder)),
        ("Megatron-LM 2020, step time (s)", "information", shipped, [run.step("2020") for run in older]),
        ("Megatron Bridge recipes, fp8, step time (s)", "information", shipped, [run.step("Bridge") for run in bridge]),
        ("Cut models on 8 B200, step time (s)", "information", shipped, [run.step("B200") for run in b200]),
        (
            "Cut models on 8 B200, allocated (GiB)",
            "information",
            "nothing: formulas alone",
            _once([run.memory("B200") for run in b200]),
        ),
    ]
    return [
        Section(title=title, role=role, fitted_on=fitted_on, comparisons=comparisons)
        for title, role, fitted_on, comparisons in candidates
        if comparisons
    ]


def _once(comparisons: list[Comparison]) -> list[Comparison]:
    """The number of micro-batches changes no memory: equal figures of one layout count once."""
    return list({(c.model, c.what.rpartition(",")[0], c.published): c for c in comparisons}.values())


def table4_differences(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """What each technique adds to one layer's milliseconds, forward and backward: small figures whose signs must be right."""
    found = []
    base = {c.what.split()[1]: c for c in comparisons if c.what.startswith("baseline_no_recompute")}
    for comparison in comparisons:
        experiment, direction = comparison.what.split()
        published = round(comparison.published - base[direction].published, 3)
        predicted = comparison.predicted - base[direction].predicted
        if published:
            same = published * predicted > 0
            found.append(
                {"what": f"{experiment} {direction}", "published": published, "predicted": predicted, "same_sign": same}
            )
    return found


def published_runs(folder: Path) -> dict[str, Any]:
    """Of runs that nothing was fitted on: those the model calls infeasible (the grid's are counted there), and the share
    whose step time lies within the interval stated with the prediction.
    """
    runs = [run for source in (heldout.megatron_2020, heldout.megatron_bridge, heldout.b200) for run in source(folder)]
    if not runs:
        return {"ran": 0, "refused": [], "within_interval_share": None}
    refused = [f"{run.name} {run.what}: {run.estimate.reasons[0].message}" for run in runs if not run.estimate.feasible]
    within = sum(run.is_within_interval for run in runs) / len(runs)
    return {"ran": len(runs), "refused": refused, "within_interval_share": within}


def evaluate(folder: Path | None) -> dict[str, Any]:
    """{days, sections, table4_differences, grid, published_runs}; without a folder only the days, which need no data."""
    if folder is None:
        return {"days": days.evaluate(), "sections": [], "table4_differences": [], "grid": None, "published_runs": None}
    found = sections(folder)
    layer = next((section.comparisons for section in found if section.title.startswith("Table 4")), [])
    return {
        "days": days.evaluate(),
        "sections": found,
        "table4_differences": table4_differences(layer),
        "grid": grid.evaluate(folder),
        "published_runs": published_runs(folder),
    }


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    return report | {"sections": [section.as_dict() for section in report["sections"]]}


def as_text(report: dict[str, Any]) -> str:
    blocks = [days.as_text(report["days"]), *(section.as_text() for section in report["sections"])]
    if report["table4_differences"]:
        lines = [
            f"  {row['what']:50} {row['published']:+7.2f} {row['predicted']:+7.2f} {'' if row['same_sign'] else ' WRONG SIGN'}"
            for row in report["table4_differences"]
        ]
        blocks.append(
            "\n".join(["Table 4, differences from no recomputation and no sequence parallelism (ms)  [in sample]", *lines])
        )
    if report["grid"] is not None:
        blocks.append(grid.as_text(report["grid"]))
    found = report["published_runs"]
    if found is not None and found["ran"]:
        lines = [
            f"Published runs that nothing was fitted on: {found['ran']}  [information]",
            f"step time within the stated 90 % interval: {found['within_interval_share']:.0%}",
            f"called infeasible: {len(found['refused'])}",
            *found["refused"],
        ]
        blocks.append("\n  ".join(lines))
    return "\n\n".join(blocks)
