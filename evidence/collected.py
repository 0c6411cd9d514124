"""Convert tables in the format of their sources to rows of the schema.

The files of evidence/ were made from such tables. A folder of them (`--data DIR`), such as newer
measurements from the same sources, is read with the same mapping, which is `collected.yaml`. To add
other measurements, write the schema's columns instead.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from evidence.arithmetic import find_contradictions
from evidence.megatron_bridge import FP8, LORA, megatron_knobs
from evidence.schema import KINDS, Kind
from evidence.table import FILE_OF, Row, cell_of, parse

MAPPING: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("collected.yaml").read_text(encoding="utf-8")
)
RENAMED = {
    name: target.split(" / ") for name, target in MAPPING["renamed"].items()
}  # [column, divisor]
GIB = float(2**30)
BLANK = ("", "n/a")
REFERENCE = re.compile(r"\{(\w+)(?:([-^])([^}]+))?\}")
_ARXIV = re.compile(r"arXiv (\d\d)(\d\d)\.\d+")
_MONTHLY = re.compile(r"(?:NeMo|v)?(2\d)\.(0[1-9]|1[0-2])(?:\.\d+)*")
Values = dict[str, Any]


class Cells(dict[str, str]):
    """A collected row; records which cells were read."""

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        super().__init__({name: cell or "" for name, cell in cells.items() if name})
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.seen.add(name)
        return super().get(name, "")

    def matches(self, conditions: Mapping[str, Any]) -> Iterator[bool]:
        """Yield, for each condition, whether its cell matches one of the condition's patterns."""
        for name, patterns in conditions.items():
            listed = [patterns] if isinstance(patterns, str) else patterns
            yield any(fnmatchcase(self[name], pattern) for pattern in listed)


def read_collected(path: Path, table: str) -> list[Row]:
    """Return the rows of a collected table in the schema.

    A row that does not fit the schema is skipped, with a notice on stderr. Another notice lists the
    rows that contradict themselves.
    """
    rows: list[Row] = []
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        for cells in reader:
            try:
                rows += convert_row(cells, table)
            except (KeyError, ValueError) as error:
                print(f"skipped: {path}:{reader.line_num}: {error}", file=sys.stderr)
    excluded = [row["excluded"] for row in rows if row["excluded"]]
    if excluded:
        print(f"excluded: {len(excluded)} rows of {path}, such as: {excluded[0]}", file=sys.stderr)
    return rows


def convert_row(cells: Mapping[Any, Any], table: str) -> Iterator[Row]:
    """Yield the schema rows for a collected row.

    If the figures of a row contradict each other, its column `excluded` says so.
    """
    kind = KINDS[FILE_OF[table].partition("/")[0]]
    row = Cells(_correct_cells(_repair_cells(cells, table), table))
    for values in _rule_values(row, _table_mapping(table), kind):
        given = {**_translate_cells(row, values), **values, "table": table}
        given |= date_of(table, row, str(given.get("source") or ""))
        given["other"] = _remaining_cells(row)
        given["source"] = given.get("source") or f"{table}.csv"
        texts = {name: cell_of(value) for name, value in given.items()}
        typed, reasons = parse(texts | {"excluded": "unchecked"}, kind)
        if reasons:
            raise ValueError("; ".join(reasons))
        contradictions = find_contradictions({**typed, "excluded": None}, kind.name)
        yield {**typed, "excluded": row["excluded"] or "; ".join(contradictions) or None}


def _table_mapping(table: str) -> Mapping[str, Any]:
    """Return the mapping of a table to the schema, including the mapping that it extends
    (`like`).
    """
    found: Mapping[str, Any] = MAPPING["tables"][table]
    return _table_mapping(found["like"]) if "like" in found else found


def _rule_values(row: Cells, format: Mapping[str, Any], kind: Kind) -> Iterator[Values]:
    """Yield the values that the table's rules determine: one set, or one set for each applicable
    entry of `each`.
    """
    row.seen.update(format.get("hidden", "").split())
    pairs = (pair.partition("=") for pair in format.get("columns", "").split())
    copied = {
        name: _column_value(row, kind, name, f"{{{cell or name}}}") for name, _, cell in pairs
    }
    values = {**format.get("assumed", {}), **copied}
    for rule in format.get("rules", ()):
        values |= _apply_rule(rule, row, kind) or {}
    if format.get("recipe"):
        values |= _recipe_settings(row)
    row.seen -= set(format.get("told", "").split())
    variants = (_apply_rule(rule, row, kind) for rule in format.get("each", [{}]))
    yield from ({**values, **variant} for variant in variants if variant is not None)


def _apply_rule(rule: Mapping[str, Any], row: Cells, kind: Kind) -> Values | None:
    """Return the values of a rule if all conditions in `if` and none in `unless` are true;
    otherwise None.

    Cells that did not have to be checked count as unread.

    Raises:
        ValueError: The rule rejects the row because of the named cell.
    """
    if any(row.matches(rule.get("unless", {}))) or not all(row.matches(rule.get("if", {}))):
        return None
    if "refuse" in rule:
        raise ValueError(f"unknown {rule['refuse']} {row[rule['refuse']]!r}")
    given = {
        name: _column_value(row, kind, name, text) for name, text in rule.get("set", {}).items()
    }
    for cell in rule.get("ones", "").split():
        given[RENAMED[cell][0]] = "1" if row[cell] in BLANK else row[cell]
    return given


def _column_value(row: Cells, kind: Kind, column: str, text: Any) -> Any:
    """Return the value of `text` for a column.

    One reference `{cell}` is translated by the column: names, flags, GiB to bytes. `{cell-x}` is
    the cell without x before or after it, `{cell^x}` its beginning before x. `= a * b // c` is
    computed from left to right, and blank if a cell is; `a & b` is the less, `a < b` is a if it is
    less than b, else 0.
    """
    if not isinstance(text, str):
        return text
    if text.startswith("= "):
        return _computed_value(row, text.split()[1:], kind.by_name[column].type == "integer")
    reference = REFERENCE.fullmatch(text)
    if not reference:
        return REFERENCE.sub(lambda match: _referenced_value(row, match), text)
    cell = _referenced_value(row, reference)
    if kind.by_name[column].type == "flag":
        return cell.lower() in ("1", "true") if cell else None
    if kind.by_name[column].unit == "bytes":
        return float(cell) * GIB if cell else None
    if column == "gpu":
        return MAPPING["gpus"].get(cell.lower(), cell) or None
    return MAPPING["names"].get(column, {}).get(cell, cell) or None


def _referenced_value(row: Cells, reference: re.Match[str]) -> str:
    name, operation, text = reference.groups()
    cell = row[name]
    if operation == "^":
        return cell.partition(text)[0]
    return cell.removeprefix(text).removesuffix(text) if operation else cell


def _computed_value(row: Cells, words: list[str], whole: bool) -> float | None:
    numbers = [row[word] if word.isidentifier() else word for word in words[::2]]
    if not all(numbers):
        return None
    result, *others = map(float, numbers)
    for operator, number in zip(words[1::2], others, strict=True):
        if operator == "*":
            result *= number
        elif operator == "-":
            result -= number
        elif operator == "&":
            result = min(result, number)
        elif operator == "<":
            result = result if result < number else 0.0
        else:
            result = result // number if operator == "//" else result / number
    return round(result) if whole else result


def _recipe_settings(row: Cells) -> Values:
    precision, scaling = FP8.get(row["precision"], (row["precision"], None))
    lora, quantised = row["task"] == "LoRA", row["fp8_params"] == "1"
    narrow = "fp8" if quantised and precision in ("fp8", "mxfp8") else None
    return {
        "precision": precision,
        "fp8_recipe": scaling,
        **(LORA if lora else {}),
        "parameter_precision": None if lora else narrow,
        "frozen_precision": narrow if lora else None,
        **megatron_knobs(
            dispatcher=row["dispatcher"],
            overlaps_experts=row["ep_overlap"].lower() in ("1", "true"),
            recompute_modules=row["recompute_modules"],
            graphs=row["cuda_graph_impl"],
            graph_modules=row["cuda_graph_modules"],
            offloaded_layers=int(row["offload_layers"] or 0),
        ),
    }


def _correct_cells(cells: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    for correction in MAPPING["corrections"]:
        if correction["table"] == table and correction["rows"].items() <= cells.items():
            cells = {**cells, **correction["cells"]}
    return cells


def _repair_cells(cells: Mapping[Any, Any], table: str) -> Mapping[str, Any]:
    """Return the corrected cells of a row. One row of cache counts has an unquoted comma in the
    name of its GPU.
    """
    if None not in cells:
        return cells
    if table != "kv_cache_counts":
        raise ValueError(f"{table}: more cells than columns: {cells}")
    names = [name for name in cells if name]
    texts = [*(cells[name] for name in names), *cells[None]]
    place = names.index("gpu")
    texts[place : place + 2] = [", ".join(text.strip() for text in texts[place : place + 2])]
    return dict(zip(names, texts, strict=True))


def _translate_cells(row: Cells, values: Values) -> Values:
    """Return the columns whose cells have a name in RENAMED, unless `values` already contains
    them.
    """
    found: Values = {}
    for name in [name for name in row if name in RENAMED]:
        column, *divisor = RENAMED[name]
        cell = row[name]
        if column not in values and cell not in BLANK:
            found[column] = float(cell) / float(divisor[0]) if divisor else cell
    return found


def _remaining_cells(row: Cells) -> str | None:
    handled = row.seen | set(MAPPING["left_out"].split())
    pairs = [
        f"{name}={cell.replace('; ', ', ').replace(';', ',')}"
        for name, cell in row.items()
        if name not in handled
        and cell not in BLANK
        and (name, cell) != ("source_kind", "repo")
        and "truth" not in cell  # a note on how the row was found, not its source
    ]
    return "; ".join(pairs) or None


def date_of(table: str, row: Mapping[str, str], source: str) -> dict[str, str | None]:
    """Return {date, date_is}: the date of the row, of its release, or of the page that states
    it.
    """
    for name in ("date", "measured"):
        if row[name]:
            return {"date": row[name], "date_is": "measured"}
    release = row["release"] or row["version"]
    dates = MAPPING["dates"]
    known = dates["releases"].get(table, {}).get(release) or dates["rounds"].get(row["round"])
    if not known and (monthly := _MONTHLY.fullmatch(release)):
        known = f"20{monthly[1]}-{monthly[2]}"
    if not known and (paper := _ARXIV.search(source)):
        known = f"20{paper[1]}-{paper[2]}"
    if known:
        return {"date": known, "date_is": "release"}
    if row["table_last_changed"]:
        return {"date": row["table_last_changed"], "date_is": "source"}
    page = next((date for part, date in dates["pages"].items() if part in source), None)
    return {"date": page, "date_is": "source" if page else None}
