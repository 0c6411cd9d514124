"""Tables that phones show as blocks: each cell of a wide table contains the heading of its
column.
"""

import re
from collections.abc import Iterator

from service.dashboard.formats import ABSENT

LEAST_COLUMNS = 4
"""Minimum columns; smaller tables fit a phone. Columns of class `spare`, which phones hide, do not
count.
"""

_TABLE = re.compile(
    r"<table(?![^>]*data-rows)(?P<attributes>[^>]*)>(?P<before>.*?)<thead>(?P<head>.*?)</thead>(?P<rest>.*?)</table>",
    re.DOTALL,
)
_HEADING = re.compile(r"<th\b(?P<attributes>[^>]*)>(?P<text>.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<(td|th)(?=[\s>])(?P<attributes>[^>]*)>(?P<content>.*?)</\1>", re.DOTALL)
_NOTHING = re.compile(rf"(?:\s|{ABSENT}|</?(?:div|span|strong)\b[^>]*>)*")
_TAG = re.compile(r"<[^>]*>")


def labelled(html: str) -> str:
    """Return the page with attributes for narrow screens at each table of at least LEAST_COLUMNS
    columns.

    `data-rows` is at the table, `data-heading` at its cells and `data-none` at cells without a
    value. On a narrow screen the style sheet shows each such row as a block, in which headings are
    not above the cells and headings without a value are hidden. Users' text is already escaped, so
    every tag is ours.
    """
    return _TABLE.sub(_table, html)


def _table(match: re.Match[str]) -> str:
    columns = list(_HEADING.finditer(match["head"]))
    headings = [
        "" if "unseen" in each["text"] else _TAG.sub("", each["text"]).strip() for each in columns
    ]
    if sum("spare" not in each["attributes"] for each in columns) < LEAST_COLUMNS:
        return match[0]
    rest = _ROW.sub(lambda row: _row(row[0], iter(headings)), match["rest"])
    return (
        "<table "
        f"data-rows{match['attributes']}>{match['before']}<thead>{match['head']}</thead>{rest}</table>"
    )


def _row(row: str, headings: Iterator[str]) -> str:
    def cell(match: re.Match[str]) -> str:
        heading = next(headings, "")
        if match[1] == "th" or "colspan" in match["attributes"] or not heading:
            return match[0]
        none = " data-none" if _NOTHING.fullmatch(match["content"]) else ""
        return f'<td data-heading="{heading}"{none}{match["attributes"]}>{match["content"]}</td>'

    return _CELL.sub(cell, row)
