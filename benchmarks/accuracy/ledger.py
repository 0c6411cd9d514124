"""Compare the accuracy of predictions with the recorded accuracy: `python -m
benchmarks.accuracy.ledger [--data DIR]`.

`ledger.json` contains the figures of every group of evidence, every published headline and every
law at its commit. The command computes them again and exits with 1 if one of them moved by more
than its band. `--save --reason TEXT` records the new figures with the reason. `python -m
benchmarks.accuracy.page` then generates docs/accuracy.md and README's table from them. `--quick`
omits the sections that take minutes. Without a folder of measured figures, only headlines and laws
are checked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.accuracy import (
    classes,
    evidence,
    headlines,
    inference,
    laws,
    report,
    tables,
)
from benchmarks.accuracy.data import add_data_argument, data_folder
from benchmarks.accuracy.groups import Group, figures

PATH = Path(__file__).with_name("ledger.json")
Entry = dict[str, Any]
Ledger = dict[str, Any]

NAMES = {
    "rows": "rows",
    "configurations": "n",
    "mean_error": "mean",
    "median_error": "median",
    "worst_error": "worst",
    "bias": "bias",
    "coverage": "inside",
    "coverage_range": "inside_range",
    "width": "high_low",
    "interval_score": "score",
    "worst": "worst_case",
    "refused": "refused",
}
"""Names of a group's figures in the ledger, by their name in `groups.figures`."""
BANDS = {"n": 0.0, "mean": 0.002, "median": 0.003, "worst": 0.01, "bias": 0.002, "inside": 0.015}
RELATIVE_BANDS = {"high_low": 0.01, "score": 0.02}
"""Relative changes that require a reason; BANDS has absolute ones (errors, bias and coverage). Fits
differ by less than this between machines.
"""
SHOWN = (*BANDS, *RELATIVE_BANDS)
HEADLINE_BAND = 0.06
"""Maximum error of a published headline without an entry in KNOWN."""
HEADLINE_MOVE = 0.01
"""Relative change of a predicted headline that requires a reason."""
DRAWN = ("model", "GPU", "setting", "all")
"""Groups with points in pictures, by what their constants were fitted without."""
LINE = 420
"""Maximum length of an entry that is written on one line of the file."""


def compute(folder: Path, *, quick: bool = False, only: Sequence[str] | None = None) -> Ledger:
    """Compute {groups, headlines, laws, report, points} with the current model.

    Args:
        folder: The folder of measured figures.
        quick: Omit the sections in evidence.LONG and the serving fits.
        only: Sections of evidence to compute, in this process; no serving groups.
    """
    if only is not None:
        found = [group for name in only for group in evidence.section(name, folder) if group.rows]
        return {"groups": {group.title: entry(group) for group in found}}
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        # The laws and the serving fits run concurrently with the sections of evidence, which use
        # separate processes.
        engines = [] if quick else [pool.submit(inference.compare_refitted, folder)]
        checked = pool.submit(broken_laws)
        names = evidence.SECTIONS.keys() - (evidence.LONG if quick else set())
        found = report.evaluate(folder, only=names)
        trained = found["groups"]
        served = [
            *inference.compare_shipped(folder),
            *(group for one in engines for group in one.result()),
        ]
        broken = checked.result()
    kept = {group.title: entry(group) for group in (*trained, *served) if group.rows}
    return {
        "groups": kept,
        "headlines": predicted_headlines(),
        "laws": broken,
        "report": _rounded(
            {
                "pooled": _all_named(found["pooled"]),
                "classes": {} if quick else _all_named(classes.table([*trained, *served])),
                "grid": _without(found["grid"] or {}, "cells"),
                "days": _without(found["days"], "configurations"),
                "not_stated": found["not_stated"],
            }
        ),
        "points": {group.title: points(group) for group in trained if group.left_out in DRAWN},
    }


def _without(figures: Mapping[str, Any], name: str) -> Entry:
    return {key: value for key, value in figures.items() if key != name}


def entry(group: Group) -> Entry:
    """Return the figures of a group and of its parts."""
    parts = _all_named({name: figures(rows) for name, rows in group.parts.items()})
    return _rounded(
        {
            "left_out": group.left_out,
            "saw": group.saw,
            "unit": group.unit,
            "long": group.is_long,
            **_named(figures(group.rows)),
            "parts": parts,
        }
    )


def points(group: Group) -> str:
    """Return `log10 published,log10 predicted` of the group's rows, rounded to the precision of a
    picture.
    """
    counted = [row for row in group.rows if math.isfinite(row.predicted)]
    return " ".join(
        f"{math.log10(row.published):.2f},{math.log10(row.predicted):.2f}" for row in counted
    )


def predicted_headlines() -> dict[str, Entry]:
    """Return {headline: {source, date, published, predicted, unit, error}}."""
    return {
        f"{one.what}, {one.source}": _rounded(
            {
                "date": one.date,
                "published": one.published,
                "predicted": one.predicted,
                "unit": one.unit,
                "error": None if one.error is None else round(one.error, 4),
            }
        )
        for one in headlines.evaluate()
    }


def broken_laws() -> dict[str, Entry]:
    """Return {law: {checked, broken: [what]}}."""
    return {
        name: {
            "checked": len(compared),
            "broken": sorted(one.what for one in compared if one.is_broken),
        }
        for name, compared in laws.check().items()
    }


def _named(summary: Mapping[str, Any]) -> Entry:
    return {name: summary[old] for old, name in NAMES.items() if old in summary}


def _all_named(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Entry]:
    return {name: _named(summary) for name, summary in summaries.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def find_moves(now: Ledger, recorded: Ledger) -> dict[str, dict[str, list[Any]]]:
    """Return {entry: {figure: [recorded, now]}} for the figures that changed by more than their
    band.

    Only groups in `now` are compared; `missing` returns the groups that should be in it.
    """
    changes: dict[str, dict[str, list[Any]]] = {}
    for name, new, old in _pairs(now["groups"], recorded["groups"]):
        differences = _differences(new, old)
        if differences:
            changes[name] = differences
    for name, new in now.get("headlines", {}).items():
        old = recorded["headlines"].get(name)
        if old is None or abs(new["predicted"] / old["predicted"] - 1.0) > HEADLINE_MOVE:
            changes[name] = {"predicted": [old and old["predicted"], new["predicted"]]}
    for name, new in now.get("laws", {}).items():
        if appeared := set(new["broken"]) - set(
            recorded["laws"].get(name, {"broken": []})["broken"]
        ):
            changes[name] = {"broken": [0, sorted(appeared)]}
    return changes


def _pairs(
    now: Mapping[str, Entry], recorded: Mapping[str, Entry]
) -> Iterator[tuple[str, Entry, Entry]]:
    """Yield each group and each of its parts with the recorded entry; the entry is empty if there
    is none.
    """
    for title, new in now.items():
        old = recorded.get(title, {"parts": {}})
        yield title, new, old
        for part in dict.fromkeys([*old["parts"], *new["parts"]]):
            yield f"{title} | {part}", new["parts"].get(part, {}), old["parts"].get(part, {})


def _differences(new: Entry, old: Entry) -> dict[str, list[Any]]:
    differences = {}
    for name in SHOWN:
        before, after = old.get(name), new.get(name)
        relative = RELATIVE_BANDS.get(name, 0.0) * abs(before or 0.0)
        if before is None or after is None:
            moved = before is not after
        else:
            moved = abs(after - before) > BANDS.get(name, relative) + 1e-9
        if moved:
            differences[name] = [before, after]
    if new.get("refused", {}) != old.get("refused", {}):
        differences["refused"] = [old.get("refused"), new.get("refused")]
    return differences


def missing(now: Ledger, recorded: Ledger, *, quick: bool) -> list[str]:
    """Return the recorded groups that should have been computed but were not."""
    return [
        title
        for title, old in recorded["groups"].items()
        if title not in now["groups"] and not (quick and old.get("long"))
    ]


def unexplained_violations(ledger: Ledger, known: Mapping[str, str]) -> list[str]:
    """Return the headlines outside HEADLINE_BAND and the broken laws that no entry of `known`
    explains.
    """
    return [
        what
        for name, what in _exceptions(ledger)
        if not any(name.startswith(prefix) for prefix in known)
    ]


def _exceptions(ledger: Ledger) -> list[tuple[str, str]]:
    """Return (name, description) of each headline outside HEADLINE_BAND and of each broken
    comparison of a law.
    """
    headlines = ((name, one["error"]) for name, one in ledger.get("headlines", {}).items())
    far = [
        (name, f"{name}: {error:+.1%}")
        for name, error in headlines
        if error is not None and abs(error) > HEADLINE_BAND
    ]
    broken = [
        f"{law}: {what}" for law, one in ledger.get("laws", {}).items() for what in one["broken"]
    ]
    return far + [(what, what) for what in broken]


def unneeded_exceptions(ledger: Ledger, known: Mapping[str, str]) -> list[str]:
    """Return the entries of `known` that are no longer needed, so that the list can be
    shortened.
    """
    needed = [name for name, _ in _exceptions(ledger)]
    return [prefix for prefix in known if not any(name.startswith(prefix) for name in needed)]


def load(path: Path = PATH) -> Ledger:
    """Return the recorded ledger."""
    ledger: Ledger = json.loads(path.read_text(encoding="utf-8"))
    return ledger


def save(ledger: Ledger, path: Path = PATH) -> None:
    """Write a ledger with one line per entry, so that diffs are readable."""
    path.write_text(_lines(ledger, "") + "\n", encoding="utf-8")


def _lines(value: Any, indent: str) -> str:
    short = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or (len(short) <= LINE and indent):
        return short
    inner = ",\n".join(
        f"{indent} {json.dumps(key, ensure_ascii=False)}: {_lines(one, indent + ' ')}"
        for key, one in value.items()
    )
    return f"{{\n{inner}\n{indent}}}" if value else "{}"


def updated_ledger(
    now: Ledger, recorded: Ledger, changes: Mapping[str, Any], reason: str
) -> Ledger:
    """Return the new ledger: the current figures, the known exceptions, and all changes with their
    reasons, newest last.
    """
    move = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "reason": reason,
        "figures": {name: one for name, one in changes.items() if " | " not in name},
    }
    return {
        "known": recorded.get("known", {}),
        **{name: now[name] for name in ("headlines", "laws", "report")},
        "groups": {
            name: _keep_unmoved(group, recorded["groups"].get(name, {}), changes.get(name, {}))
            for name, group in now["groups"].items()
        },
        "points": now["points"],
        "moves": [*recorded.get("moves", []), *([move] if changes else [])],
    }


def _keep_unmoved(now: dict[str, Any], recorded: Mapping[str, Any], moved: Container[str]) -> Any:
    """Return the current group with the recorded value of each number that stayed within its
    band.
    """
    kept = {
        name: value
        for name, value in recorded.items()
        if name in now and name not in moved and isinstance(value, float)
    }
    return now | kept


def as_text(now: Ledger) -> str:
    """Return tables of the groups, headlines and laws."""
    shown = {title: {name: one.get(name) for name in SHOWN} for title, one in now["groups"].items()}
    laws = {
        name: {"comparisons": one["checked"], "broken": len(one["broken"])}
        for name, one in now.get("laws", {}).items()
    }
    return tables.as_text([shown, now.get("headlines", {}), laws])


def failures(now: Ledger, recorded: Ledger, *, quick: bool) -> list[str]:
    """Return a sentence for each reason why the ledger check fails."""
    known = recorded.get("known", {})
    lines = [
        f"moved: {name}: "
        + ", ".join(f"{figure} {old} -> {new}" for figure, (old, new) in figures.items())
        for name, figures in find_moves(now, recorded).items()
    ]
    lines += [f"not computed: {title}" for title in missing(now, recorded, quick=quick)]
    lines += [
        f"outside {HEADLINE_BAND:.0%} or broken, and not known: {what}"
        for what in unexplained_violations(now, known)
    ]
    return lines + [
        f"known, but no longer so, remove it: {name}" for name in unneeded_exceptions(now, known)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.ledger", description=__doc__
    )
    add_data_argument(parser)
    parser.add_argument(
        "--quick", action="store_true", help="leave out the sections that take minutes"
    )
    parser.add_argument(
        "--save", action="store_true", help="record today's figures; needs --reason if any moved"
    )
    parser.add_argument("--reason", metavar="TEXT", help="why figures moved")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per group on stdout"
    )
    arguments = parser.parse_args()
    if arguments.save and arguments.quick:
        parser.error("--save records every group: leave out --quick")
    folder = data_folder(arguments)
    now, recorded = compute(folder, quick=arguments.quick), _recorded()
    if arguments.json:
        for title, one in now["groups"].items():
            print(json.dumps({"name": title, **{name: one.get(name) for name in SHOWN}}))
    else:
        print(as_text(now))
    if arguments.save:
        changes = find_moves(now, recorded) if recorded["groups"] else {}
        if changes and not arguments.reason:
            parser.error(f"{len(changes)} entries moved: state why with --reason TEXT")
        record(now, arguments.reason or "")
        return
    found = failures(now, recorded, quick=arguments.quick)
    for line in found:
        print(line, file=sys.stderr)
    print(
        f"{len(found)} differences from the ledger" if found else "no differences from the ledger",
        file=sys.stderr,
    )
    sys.exit(1 if found else 0)


def _recorded() -> Ledger:
    return {"groups": {}, "headlines": {}, "laws": {}} | (load() if PATH.is_file() else {})


def record(now: Ledger, reason: str) -> None:
    """Write the ledger with the current figures, and with the reason if some changed."""
    recorded = _recorded()
    changes = find_moves(now, recorded) if recorded["groups"] else {}
    save(updated_ledger(now, recorded, changes, reason))


if __name__ == "__main__":
    main()
