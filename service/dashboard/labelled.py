"""Tables that a phone shows as blocks: each cell of a wide table knows the heading of its
column.
"""

import re
from collections.abc import Iterator

from service.dashboard.formats import ABSENT

LEAST_COLUMNS = 4
"""A table of fewer columns fits a phone as it is. Columns of class `spare` do not count: a phone
does not show them.
"""

_TABLE = re.compile(
    r"<table(?P<attributes>[^>]*)>(?P<before>.*?)<thead>(?P<head>.*?)</thead>(?P<rest>.*?)</table>",
    re.DOTALL,
)
_HEADING = re.compile(r"<th\b(?P<attributes>[^>]*)>(?P<text>.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<(td|th)(?=[\s>])(?P<attributes>[^>]*)>(?P<content>.*?)</\1>", re.DOTALL)
_NOTHING = re.compile(rf"(?:\s|{ABSENT}|</?(?:div|span|strong)\b[^>]*>)*")
_TAG = re.compile(r"<[^>]*>")


def labelled(html: str) -> str:
    """Return the page with `data-rows` at each table of at least LEAST_COLUMNS columns,
    `data-heading` at each of its cells and `data-none` at those without a value.

    The style sheet makes a block of each such row on a narrow screen, where the headings do not
    stand above the cells and a heading without a value is left out. Text of users is escaped by
    then, so that every tag is one of ours.
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
