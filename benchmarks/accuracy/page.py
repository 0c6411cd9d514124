"""Write docs/accuracy.md, its pictures and README's table from the ledger: `python -m
benchmarks.accuracy.page`.

Only what stands between `<!-- result: NAME -->` and `<!-- end -->` is written; the prose around it
is by hand.
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
PAGES = (ROOT / "README.md", ROOT / "docs/accuracy.md")
PICTURES = ROOT / "docs/pictures"
BLOCK = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 128
LEFT_OUT = {
    "model": "its model",
    "GPU": "its GPU or die",
    "setting": "its layout, nodes or load",
    "all": "anything like it",
    "future": "its month and later",
    "framework": "its framework",
    "seen": "nothing: seen",
}
"""What the constants did not see, in the order of the page."""
HEADINGS = {
    "model": "A model left out",
    "GPU": "A GPU left out",
    "setting": "A layout, a number of nodes or a load left out",
    "all": "Nothing like it was fitted",
    "future": "Time travel: the next round, the next release",
    "framework": "A framework left out",
    "seen": "Seen: fitted, or published with a layout that stands in this repository",
}
SKETCHES: dict[str, tuple[str, Callable[[str, dict[str, Any]], bool]]] = {
    "accuracy-training": (
        "Seconds of a training step, s",
        lambda title, g: g["unit"] == "s" and not _kind(title),
    ),
    "accuracy-nanotron": (
        "nanotron's grid, the other model fitted, s",
        lambda title, g: title == "nanotron's grid",
    ),
    "accuracy-memory": ("Memory of the fullest GPU, GiB", lambda title, g: g["unit"] == "GiB"),
    "accuracy-serving": (
        "Serving: time per output token, s",
        lambda title, g: title == "Serving: time per output token",
    ),
}
"""Pictures: title, and which groups are in them; never those that were seen or left their framework
out.
"""


def _kind(title: str) -> bool:
    return title.startswith(("Serving", "nanotron")) or "today's recipe" in title


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}%"


HEADLINES = {
    "Dense pre-training on H100 in fp8": "step of dense models, Megatron Core on H100",
    "Mixtures of experts, releases from 26.02.01 on": "step of mixtures of experts, Megatron Core",
    "The plain question: mixtures of experts": "step of mixtures of experts, minimal query",
    "Dense pre-training on a die left out": "step on a GPU that nothing was fitted on",
    "Serving: time per output token": "serving: time per output token",
    "Engines, another release's constants: time to first "
    "token": "serving: time to first token, release without constants",
}
"""Groups on the first page, in plain words, the worst one included."""


def _table(columns: str, rows: Iterable[str]) -> str:
    """Return a table of rows whose cells are joined by ` | `."""
    rule = f"|---{'|---' * columns.count('|')}|"
    return "\n".join([f"| {columns} |", rule, *(f"| {row} |" for row in rows)])


def headlines(result: dict[str, Any]) -> str:
    """README's table: one line for each kind of answer; what is left out there stands in
    `summary`.
    """
    return _table(
        f"what is predicted | configurations | {ERRORS}",
        (f"{words} | {_errors(result['groups'][title])}" for title, words in HEADLINES.items()),
    )


ERRORS = "mean error | median | worst | inside 90% interval"


def _errors(f: dict[str, Any]) -> str:
    inside = percent(f["inside"], 0) if "inside" in f else "none stated"
    errors = " | ".join(percent(f[name]) for name in ("mean", "median", "worst"))
    return f"{f['n']:,} | {errors} | {inside}"


def summary(result: dict[str, Any]) -> str:
    """A line for every group, whatever its figures are, and what is said of the grid and of
    days.
    """
    lines = _table(
        f"what is predicted | constants did not see | configurations | {ERRORS}",
        (
            f"{title}{_refused(f)} | {words} | {_errors(f)}"
            for left_out, words in LEFT_OUT.items()
            for title, f in result["groups"].items()
            if f["left_out"] == left_out
        ),
    )
    grid, days = result["report"]["grid"], result["report"]["days"]
    ranks, shipped = grid["model_left_out"]["rank_correlation_median"], grid["shipped"]
    words = (
        f"Of {shipped['ran']:,} nanotron runs {shipped['ran_but_refused']} are called infeasible "
        "by the shipped constants, and "
        f"of {shipped['failed']} that failed "
        f"{percent(shipped['failed_called_infeasible_share'], 0)} are; within a cell the "
        f"predicted order has a median rank correlation of {ranks:.2f} with the measured one, the "
        "model left out. GPT-3 175B "
        "on 300B tokens with 1,024 A100 is predicted to take "
        f"{days['selective_sequence_parallel_days']:.1f} days with "
        f"sequence parallelism and selective recomputation, and {days['full_recompute_days']:.1f} "
        "days with full recomputation "
        "and without; the 34 days "
        "in arXiv 2104.04473 are with 2021's software."
    )
    return f"{lines}\n\n{textwrap.fill(words, WIDTH)}"


def _refused(f: dict[str, Any]) -> str:
    """`; 7 of 19 rows infeasible: memory`, or nothing."""
    if not f["refused"]:
        return ""
    return (
        f"; {sum(f['refused'].values())} of {f['rows']:,} rows infeasible: "
        f"{', '.join(f['refused'])}"
    )


def classes(result: dict[str, Any]) -> str:
    """Return a table of left-out rows by how familiar they are."""
    rows = (
        f"{name.replace(': ', ' | ')} | {f['n']:,} | {percent(f['inside'], 0)} | "
        f"{f['high_low']:.2f} | {f['score']:.2f} | {percent(f['median'])}"
        for name, f in result["report"].get("classes", {}).items()
    )
    return _table("rows | class | configurations | inside 90 % | high/low | score | median", rows)


def pooled(result: dict[str, Any]) -> str:
    """All rows that constants of their framework did not see, by what is predicted."""
    rows = (f"{name} | {_cells(f)}" for name, f in result["report"]["pooled"].items())
    return _table(f"rows | {COLUMNS}", rows)


COLUMNS = (
    "n | configurations | mean | median | bias | inside 90 % (if right) | high/low | score | "
    "worst case"
)


def _cells(f: dict[str, Any]) -> str:
    refused = "".join(f"; {count} infeasible: {code}" for code, count in f["refused"].items())
    head = f"{f['rows']:,}{refused} | {f['n']:,}"
    if "mean" not in f:
        return f"{head} | | | | | | |"
    errors = f"{percent(f['mean'])} | {percent(f['median'])} | {100 * f['bias']:+.1f} %"
    stated = "| | |"
    if "inside" in f:
        low, high = (f"{100 * bound:.0f}" for bound in f["inside_range"])
        stated = (
            f"{percent(f['inside'], 0)} ({low}-{high}) | {f['high_low']:.2f} | {f['score']:.2f} |"
        )
    return f"{head} | {errors} | {stated} {f['worst_case'].replace('|', '/')}"


def groups(result: dict[str, Any]) -> str:
    """A table for each group, a line for each GPU or release, under what its constants did not
    see.
    """
    blocks = []
    for left_out, heading in HEADINGS.items():
        blocks.append(f"### {heading}")
        for title, group in result["groups"].items():
            if group["left_out"] != left_out:
                continue
            parts = list(group["parts"].items())
            lines = [("all", group), *parts] if len(parts) > 1 else parts
            rows = (f"{name or '-'} | {_cells(f)}" for name, f in lines)
            blocks += [
                f"**{title}** ({group['unit']}). Constants from: {group['saw']}.",
                _table(f"| {COLUMNS}", rows),
            ]
    return "\n\n".join(blocks)


def published(result: dict[str, Any]) -> str:
    """Return a table of the published headlines: date, published and predicted figure, error, and
    why one is far off.
    """
    rows = []
    for name, one in result["headlines"].items():
        error = "" if one["error"] is None else f"{100 * one['error']:+.1f} %"
        rows.append(
            f"{name} | {one['date']} | {one['published']} {one['unit']} | "
            f"{one['predicted']:,.4g} | {error}"
        )
    reasons = [f"- {name}: {why}" for name, why in result["known"].items()]
    table = _table("published | month | figure | predicted | error", rows)
    return "\n".join([table, "", "Outside 6 %, or against a law below, and why:", "", *reasons])


def laws(result: dict[str, Any]) -> str:
    """Return a table of the laws: comparisons made, and broken."""
    rows = (
        f"{name} | {one['checked']:,} | {len(one['broken'])}"
        for name, one in result["laws"].items()
    )
    return _table("law | comparisons | broken", rows)


def moves(result: dict[str, Any]) -> str:
    """Return the moves of recorded figures with their reasons, the newest first."""
    if not result["moves"]:
        return "Nothing moved since the ledger began."
    return "\n".join(
        f"- {one['date']}: {one['reason']} ({', '.join(one['figures']) or 'parts of groups'})"
        for one in reversed(result["moves"])
    )


def pictures(result: dict[str, Any]) -> dict[str, str]:
    """SVGs by name."""
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


def filled(text: str, result: dict[str, Any]) -> str:
    """The page with its blocks as the result gives them."""
    blocks = {
        "headlines": headlines(result),
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
        path.write_text(filled(path.read_text(encoding="utf-8"), result), encoding="utf-8")
    for name, picture in pictures(result).items():
        (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
