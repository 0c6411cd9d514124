"""The accuracy report: every section that the folder of measured figures allows, as a structure and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.accuracy import (
    activations,
    coverage,
    days,
    feasible,
    fit_internevo,
    fsdp_report,
    grid,
    heldout,
    moe_runs,
    strong_scaling,
)
from benchmarks.accuracy.data import Row, read
from benchmarks.accuracy.fit_frameworks import (
    adapters_unseen,
    amd_left_out,
    b200_leave_one_out,
    gb200_left_out,
    leave_one_out,
    modern_leave_one_out,
    moe_left_out,
    today_runs,
)
from benchmarks.accuracy.korthikanti import GPU, Comparison, table4, table5
from benchmarks.accuracy.sections import Role, Section
from hp_tool.catalog import gpu
from hp_tool.catalog.efficiency import efficiency
from hp_tool.domain.efficiency import EfficiencyProfile, FrameworkEfficiency

LEFT_OUT = "ops/, Table 4 and the other models' rows of Table 5; priors for the rest"
NOTHING = "nothing: formulas alone"
RECIPES_LEFT_OUT = "ops/, Tables 4 and 5, and the other models' recipes; priors for the rest"

LAYOUTS_LEFT_OUT = "ops/, Tables 4 and 5, H100 recipes, and the other layouts' rows"
NO_RECIPES = "ops/, Tables 4 and 5, dense runs on H100 and B200, models cut to fit 8 B200"
AMD = "dense runs on H100 and B200, and the other card's rows"


def sections(folder: Path) -> list[Section]:
    """Every figure beside its prediction: by constants that did not see it where that is possible, and by the shipped ones."""
    old = efficiency(gpu=gpu(GPU), framework="megatron-core")
    modern = efficiency(gpu=gpu("h100-sxm-80gb"), framework="megatron-core").framework
    rows4, rows5 = read(folder, "korthikanti2022_table4.csv"), read(folder, "korthikanti2022_table5.csv")
    found = [
        *_paper(folder, rows4, rows5, old),
        _section("Megatron-LM 2020 (s)", "held out", old.framework, _steps(heldout.megatron_2020(folder))),
        *_recipes(folder, modern, with_fits=bool(rows4 and rows5)),
    ]
    cut = heldout.b200(folder)
    dense = [run for run in cut if run.name.startswith("llama")]
    sparse = [run for run in cut if not run.name.startswith("llama")]
    left_out = b200_leave_one_out(folder) if rows4 and rows5 and dense else []
    found += [
        _section(
            "Dense models cut to fit 8 B200, leaving one layout out (s)",
            "held out",
            modern,
            left_out,
            fitted_on=LAYOUTS_LEFT_OUT,
        ),
        _section("Dense models cut to fit 8 B200, shipped constants (s)", "in sample", modern, _steps(dense)),
        _section("Mixtures of experts cut to fit 8 B200 (s)", "in sample", modern, _steps(sparse)),
    ]
    for name, runs in (("Dense models", dense), ("Mixtures of experts", sparse)):
        allocated = _once([run.memory("B200") for run in runs])
        title = f"{name} cut to fit 8 B200, allocated (GiB)"
        found.append(_section(title, "held out", modern, allocated, log_sd=modern.memory_log_sd, fitted_on=NOTHING))
    found += fsdp_report.sections(folder)
    found += fit_internevo.sections(folder)
    return [section for section in found if section.comparisons]


def _paper(folder: Path, rows4: list[Row], rows5: list[Row], profile: EfficiencyProfile) -> list[Section]:
    """arXiv 2205.05198: step times leaving one model out, the same in sample, one layer, and activation memory."""
    constants = profile.framework
    left_out = leave_one_out(folder) if rows4 and rows5 else []
    return [
        _section("Table 5, leaving one model out (s)", "headline", constants, left_out, fitted_on=LEFT_OUT),
        _section("Table 5, shipped constants (s)", "in sample", constants, table5(rows5, profile)),
        _section("Table 4, one 22B layer (ms)", "in sample", constants, table4(rows4, profile)),
        Section(
            title="Figures 1 and 7, activation memory", role="headline", fitted_on=NOTHING,
            comparisons=activations.figures(folder),
        ),
    ]  # fmt: skip


def _recipes(folder: Path, modern: FrameworkEfficiency, *, with_fits: bool) -> list[Section]:
    """Today's Megatron Core: recipes and audited runs on H100 and B200, on GB200, with adapters, on AMD, with experts."""
    left_out = modern_leave_one_out(folder) if with_fits else []
    sparse = moe_left_out(folder) if with_fits else []
    recent = {case.what for case in moe_runs.newest(moe_runs.moe_cases(folder))}
    today, earlier = ([c for c in sparse if (c.what in recent) == wanted] for wanted in (True, False))
    shipped = [run.compare(modern) for run in today_runs(folder) if run.problem.model.num_experts is None]
    scaling = strong_scaling.ratios(folder)
    return [
        _section("Dense runs on H100, leaving one model out (s)", "held out", modern, left_out, fitted_on=RECIPES_LEFT_OUT),
        _section("Dense runs on H100 and B200, shipped constants (s)", "in sample", modern, shipped),
        _section("Dense recipes on GB200 (s)", "headline", modern, gb200_left_out(folder)),
        _section("LoRA of MLPerf (s)", "held out", modern, adapters_unseen(folder)),
        *(
            _section(f"Strong scaling of MLPerf's {what}, GPU time against the fewest GPUs", role, modern, rows)
            for what, role, rows in (
                ("pre-training", "in sample", [row for row in scaling if "lora" not in row.model]),
                ("LoRA", "held out", [row for row in scaling if "lora" in row.model]),
            )
        ),
        _section("LoRA of MLPerf on AMD, leaving one card out (s)", "held out", modern, amd_left_out(folder), fitted_on=AMD),
        _section(
            "Mixtures of experts, recipes of today's software (s)",
            "held out",
            modern,
            today,
            fitted_on=NO_RECIPES,
            log_sd=modern.expert_time_log_sd,
        ),
        _section(
            "Mixtures of experts, recipes of earlier releases (s)",
            "held out",
            modern,
            earlier,
            fitted_on=NO_RECIPES,
            log_sd=modern.earlier_expert_time_log_sd,
        ),
    ]


def _steps(runs: list[heldout.Run]) -> list[Comparison]:
    return [run.step("run") for run in runs if run.estimate.time is not None]


def _section(
    title: str,
    role: Role,
    constants: FrameworkEfficiency,
    comparisons: list[Comparison],
    *,
    fitted_on: str | None = None,
    log_sd: float | None = None,
) -> Section:
    """`fitted_on` and `log_sd` (of step times) are the constants' own unless given."""
    return Section(
        title=title,
        role=role,
        fitted_on=fitted_on or constants.fitted_on,
        comparisons=comparisons,
        stated_log_sd=log_sd or constants.time_log_sd,
    )


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


def evaluate(folder: Path | None) -> dict[str, Any]:
    """{days, sections, table4_differences, grid, refused_runs}; without a folder only the days, which need no data."""
    if folder is None:
        return {"days": days.evaluate(), "sections": [], "table4_differences": [], "grid": None, "refused_runs": None}
    found = sections(folder)
    layer = next((section.comparisons for section in found if section.title.startswith("Table 4")), [])
    return {
        "days": days.evaluate(),
        "sections": found,
        "table4_differences": table4_differences(layer),
        "grid": grid.evaluate(folder),
        "refused_runs": feasible.evaluate(folder),
        "left_out": fsdp_report.left_out(folder),
    }


def as_dict(report: dict[str, Any]) -> dict[str, Any]:
    held_out = coverage.coverage(report["sections"])
    return report | {"sections": [section.as_dict() for section in report["sections"]], "coverage": held_out}


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
    if held_out := coverage.coverage(report["sections"]):
        blocks.append(coverage.as_text(held_out))
    if report["grid"] is not None:
        blocks.append(grid.as_text(report["grid"]))
    found = report["refused_runs"]
    if found is not None:
        blocks.append(feasible.as_text(found))
    if report.get("left_out"):
        lines = [f"{count:3} rows: {why}" for why, count in report["left_out"].items()]
        blocks.append("\n  ".join(["Published rows that no query can state", *lines]))
    return "\n\n".join(blocks)
