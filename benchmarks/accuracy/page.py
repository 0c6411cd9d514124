"""Generate the tables of docs/accuracy.md, docs/accuracy-details.md and README from the ledger:
`python -m benchmarks.accuracy.page`.

Replaces the text between `<!-- result: NAME -->` and `<!-- end -->`, and draws the pictures. The
text around these blocks is written by hand.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.accuracy import ledger
from benchmarks.accuracy.scatter import scatter

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/accuracy.md", ROOT / "docs/accuracy-details.md")
PICTURES = ROOT / "docs/pictures"
BLOCK = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 128
HELD_OUT = {
    "model": "its model",
    "GPU": "its GPU or die",
    "setting": "its layout, nodes or load",
    "all": "all similar rows",
    "future": "its month and later",
    "framework": "its framework",
    "seen": "nothing",
}
"""What the fits held out, in the order of the page."""
HEADINGS = {
    "model": "Unseen model",
    "GPU": "Unseen GPU",
    "setting": "Unseen layout, number of nodes or load",
    "all": "No similar rows fitted",
    "future": "Next benchmark round, next release",
    "framework": "Constants of another framework",
    "seen": "Fitted rows, and published layouts that this repository contains",
}
SKETCHES: dict[str, tuple[str, Callable[[str, dict[str, Any]], bool]]] = {
    "accuracy-training": (
        "Seconds of a training step, s",
        lambda title, g: g["unit"] == "s" and not _kind(title),
    ),
    "accuracy-nanotron": (
        "nanotron's grid, constants of the other model, s",
        lambda title, g: title == "nanotron's grid",
    ),
    "accuracy-memory": ("Memory of the fullest GPU, GiB", lambda title, g: g["unit"] == "GiB"),
    "accuracy-serving": (
        "Serving: time per output token, s",
        lambda title, g: title == "Serving: time per output token",
    ),
}
"""Pictures: title, and condition on the group. The ledger has no points for fitted rows and for
constants of other frameworks.
"""


def _kind(title: str) -> bool:
    return title.startswith(("Serving", "nanotron")) or "current recipe" in title


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


OVERVIEW = {
    "Dense pre-training on H100 in fp8": "step, dense model, Megatron Core on H100",
    "Dense pre-training on an unseen GPU die": "step, dense model, GPU without measured runs",
    "MoE models, releases from 26.02.01 on": "step, MoE model, full settings",
    "Minimal query: MoE models": "step, MoE model, minimal query",
    "MPT under FSDP": "step, dense model, PyTorch FSDP",
    "Trainers, step time": "step, dense model, fine-tuning trainers",
    "LoRA of MLPerf": "step, LoRA, Megatron Core",
    "MPT under FSDP, constants of Megatron Core": "step, framework without fitted constants",
    "Ratio of two runs: Megatron Core": "ratio of two steps of one model, Megatron Core",
    "Trainers, peak memory": "peak memory, dense model, fine-tuning trainers",
    "Serving: time per output token": "serving: time per output token",
    "Serving: tokens/s per GPU": "serving: tokens per second per GPU",
    "Serving: time to first token, below the cache's limit": "serving: time to first token",
    "Engines, unseen model or GPU: time per output token": (
        "serving: time per output token, unseen model or GPU"
    ),
    "Engines, constants of another release: time to first token": (
        "serving: time to first token, release without constants"
    ),
    "Engines with default settings, unseen model: time per output token": (
        "serving: time per output token, engine not tuned"
    ),
}
"""Groups of the first table in docs/accuracy.md: title and row label."""
HEADLINES = (
    "Dense pre-training on H100 in fp8",
    "Dense pre-training on an unseen GPU die",
    "Minimal query: MoE models",
    "Serving: time per output token",
    "Engines, constants of another release: time to first token",
)
"""Rows of README's table. They include the group with the largest error of a single
configuration.
"""
CLASSES = {
    "familiar": "none",
    "layout": "a feature of the layout or workload",
    "gpu": "the card (another card of its die was measured)",
    "release": "the release of the framework or engine",
    "family": "the model family",
    "precision": "the matmul precision",
    "scale": "the number of GPUs",
    "task": "adapters (LoRA)",
    "load": "how requests arrive",
    "model_kind": "the kind of model: dense, MoE, recurrent, sparse attention, ...",
    "die": "the GPU's die",
    "trainer": "the training framework",
    "engine": "the inference engine",
}
"""Descriptions of the familiarity classes: in what a query differs from all measured runs."""
KINDS = {
    "training dense": "dense training",
    "training mixture": "training of MoE models",
    "training adapters": "LoRA",
    "serving dense, tpot": "serving, time per output token",
}
"""Kinds of rows in the familiarity table, with their column headings."""


def _table(columns: str, rows: Iterable[str]) -> str:
    rule = f"|---{'|---' * columns.count('|')}|"
    return "\n".join([f"| {columns} |", rule, *(f"| {row} |" for row in rows)])


def headlines(result: dict[str, Any]) -> str:
    """Return the table in README."""
    return _labelled(result, HEADLINES)


def overview(result: dict[str, Any]) -> str:
    """Return the first table of docs/accuracy.md."""
    return _labelled(result, OVERVIEW)


def _labelled(result: dict[str, Any], titles: Iterable[str]) -> str:
    return _table(
        f"predicted | configurations | {ERRORS}",
        (f"{OVERVIEW[title]} | {_errors(result['groups'][title])}" for title in titles),
    )


def familiarity(result: dict[str, Any]) -> str:
    """Return median error and coverage by familiarity class and kind of row."""
    found = result["report"].get("classes", {})
    rows = []
    for name, meaning in CLASSES.items():
        cells = [_covered(found.get(f"{kind}: {name}")) for kind in KINDS]
        if any(cells):
            rows.append(f"`{name}` | {meaning} | {' | '.join(cells)}")
    return _table(f"class | difference | {' | '.join(KINDS.values())}", rows)


def _covered(figures: dict[str, Any] | None) -> str:
    """Return text such as `3.8%, 91% of 98`: median error, fraction inside the interval, number of
    configurations.
    """
    if figures is None:
        return ""
    return f"{percent(figures['median'])}, {percent(figures['inside'], 0)} of {figures['n']:,}"


ERRORS = "mean error | median | worst | inside 90% interval"


def _errors(f: dict[str, Any]) -> str:
    inside = percent(f["inside"], 0) if "inside" in f else "no interval"
    errors = " | ".join(percent(f[name]) for name in ("mean", "median", "worst"))
    return f"{f['n']:,} | {errors} | {inside}"


def summary(result: dict[str, Any]) -> str:
    """Return a table with a row for every group, and a paragraph about nanotron's grid and GPT-3's
    training days.
    """
    lines = _table(
        f"group | held out | configurations | {ERRORS}",
        (
            f"{title}{_refused(f)} | {words} | {_errors(f)}"
            for left_out, words in HELD_OUT.items()
            for title, f in result["groups"].items()
            if f["left_out"] == left_out
        ),
    )
    grid, days = result["report"]["grid"], result["report"]["days"]
    ranks, shipped = grid["model_left_out"]["rank_correlation_median"], grid["shipped"]
    words = (
        f"nanotron's grid: the shipped constants call {shipped['ran_but_refused']} of "
        f"{shipped['ran']:,} successful runs infeasible, and "
        f"{percent(shipped['failed_called_infeasible_share'], 0)} of {shipped['failed']} failed "
        f"runs. With constants of the other model, the median rank correlation of predicted and "
        f"measured order within a cell is {ranks:.2f}. GPT-3 175B on 300B tokens with 1,024 A100 "
        f"takes {days['selective_sequence_parallel_days']:.1f} predicted days with sequence "
        "parallelism and selective recomputation, and "
        f"{days['full_recompute_days']:.1f} days with full recomputation and no sequence "
        "parallelism. arXiv 2104.04473 reports 34 days for the software of 2021."
    )
    return f"{lines}\n\n{textwrap.fill(words, WIDTH)}"


def _refused(f: dict[str, Any]) -> str:
    """Return text such as `; 7 of 19 rows infeasible: memory`, or an empty text."""
    if not f["refused"]:
        return ""
    return (
        f"; {sum(f['refused'].values())} of {f['rows']:,} rows infeasible: "
        f"{', '.join(f['refused'])}"
    )


def _shown_class(name: str) -> str:
    return name.replace("mixture", "MoE").replace("adapters", "LoRA").replace(": ", " | ")


def classes(result: dict[str, Any]) -> str:
    """Return a table of all figures of held-out rows by kind and familiarity class."""
    rows = (
        f"{_shown_class(name)} | {f['n']:,} | {percent(f['inside'], 0)} | "
        f"{f['high_low']:.2f} | {f['score']:.2f} | {percent(f['median'])}"
        for name, f in result["report"].get("classes", {}).items()
    )
    return _table("rows | class | configurations | inside 90% | high/low | score | median", rows)


def pooled(result: dict[str, Any]) -> str:
    """Return a table of the figures of all held-out rows by predicted quantity."""
    rows = (f"{name} | {_cells(f)}" for name, f in result["report"]["pooled"].items())
    return _table(f"rows | {COLUMNS}", rows)


COLUMNS = (
    "n | configurations | mean | median | bias | inside 90% (expected) | high/low | score | "
    "worst case"
)


def _cells(f: dict[str, Any]) -> str:
    refused = "".join(f"; {count} infeasible: {code}" for code, count in f["refused"].items())
    head = f"{f['rows']:,}{refused} | {f['n']:,}"
    if "mean" not in f:
        return f"{head} | | | | | | |"
    errors = f"{percent(f['mean'])} | {percent(f['median'])} | {100 * f['bias']:+.1f}%"
    stated = "| | |"
    if "inside" in f:
        low, high = (f"{100 * bound:.0f}" for bound in f["inside_range"])
        stated = (
            f"{percent(f['inside'], 0)} ({low}-{high}) | {f['high_low']:.2f} | {f['score']:.2f} |"
        )
    return f"{head} | {errors} | {stated} {f['worst_case'].replace('|', '/')}"


def groups(result: dict[str, Any]) -> str:
    """Return tables of all groups with a row for each GPU or release, ordered by what the fits
    held out. Groups whose constants were fitted on the same rows share a table.
    """
    blocks = []
    for left_out, heading in HEADINGS.items():
        blocks.append(f"### {heading}")
        rows_by_saw: dict[str, list[str]] = {}
        for title, group in result["groups"].items():
            if group["left_out"] != left_out:
                continue
            parts = list(group["parts"].items())
            lines = [("all", group), *parts] if len(parts) > 1 else parts
            for at, (name, f) in enumerate(lines):
                first = "" if at else f"**{title}** ({group['unit']})"
                rows_by_saw.setdefault(group["saw"], []).append(
                    f"{first} | {name or '-'} | {_cells(f)}"
                )
        for saw, rows in rows_by_saw.items():
            blocks += [f"Fitted on: {saw}.", _table(f"group | part | {COLUMNS}", rows)]
    return "\n\n".join(blocks)


def published(result: dict[str, Any]) -> str:
    """Return a table of published headline figures and the causes of large errors."""
    rows = []
    for name, one in result["headlines"].items():
        error = "" if one["error"] is None else f"{100 * one['error']:+.1f}%"
        gap = "" if one["unit"] in ("%", "x") else " "
        rows.append(
            f"{name} | {one['date']} | {one['published']}{gap}{one['unit']} | "
            f"{one['predicted']:,.4g} | {error}"
        )
    reasons = [f"- {name}: {why}" for name, why in result["known"].items()]
    table = _table("published | month | figure | predicted | error", rows)
    return "\n".join([table, "", "Causes of errors above 6%, and of broken laws:", "", *reasons])


def laws(result: dict[str, Any]) -> str:
    """Return the number of comparisons and violations of each law."""
    rows = (
        f"{name} | {one['checked']:,} | {len(one['broken'])}"
        for name, one in result["laws"].items()
    )
    return _table("law | comparisons | broken", rows)


def moves(result: dict[str, Any]) -> str:
    """Return a list of the recorded changes of figures with their reasons, newest first."""
    if not result["moves"]:
        return "No recorded figure has changed."
    return "\n".join(
        f"- {one['date']}: {one['reason']} (groups: {len(one['figures']) or 'parts'})"
        for one in reversed(result["moves"])
    )


def pictures(result: dict[str, Any]) -> dict[str, str]:
    """Return the SVG pictures by file name."""
    drawn = {}
    for name, (title, chosen) in SKETCHES.items():
        series = {
            one: [
                (float(x), float(y))
                for x, y in (point.split(",") for point in drawn_points.split())
            ]
            for one, drawn_points in result["points"].items()
            if chosen(one, result["groups"][one])
        }
        drawn[name] = scatter(series, title=title)
    return drawn


def fill_page(text: str, result: dict[str, Any]) -> str:
    """Return the page with its generated blocks replaced."""
    blocks = {
        "headlines": headlines(result),
        "overview": overview(result),
        "familiarity": familiarity(result),
        "summary": summary(result),
        "pooled": pooled(result),
        "classes": classes(result),
        "groups": groups(result),
        "published": published(result),
        "laws": laws(result),
        "moves": moves(result),
    }
    return BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}", text)


def main() -> None:
    result = ledger.load()
    for path in PAGES:
        path.write_text(fill_page(path.read_text(encoding="utf-8"), result), encoding="utf-8")
    for name, picture in pictures(result).items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
