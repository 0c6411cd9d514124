"""Tables that a phone shows as blocks: each cell of a wide table knows the heading of its column."""

import re
from collections.abc import Iterator

LEAST_COLUMNS = 4
"""A table of fewer columns fits a phone as it is."""

_TABLE = re.compile(r"<table(?P<attributes>[^>]*)>(?P<before>.*?)<thead>(?P<head>.*?)</thead>(?P<rest>.*?)</table>", re.DOTALL)
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<(td|th)(?=[\s>])(?P<attributes>[^>]*)>")
_TAG = re.compile(r"<[^>]*>")


def labelled(html: str) -> str:
    """Return the page with `data-rows` at each table of at least LEAST_COLUMNS columns and `data-heading` at each of its cells.

    The style sheet makes a block of each such row on a narrow screen, where the headings do not stand above the cells. Text of
    users is escaped by then, so that every tag is one of ours.
    """
    return _TABLE.sub(_table, html)


def _table(match: re.Match[str]) -> str:
    headings = [_TAG.sub("", each).strip() for each in _HEADING.findall(match["head"])]
    if len(headings) < LEAST_COLUMNS:
        return match[0]
    rest = _ROW.sub(lambda row: _row(row[0], iter(headings)), match["rest"])
    return f"<table data-rows{match['attributes']}>{match['before']}<thead>{match['head']}</thead>{rest}</table>"


def _row(row: str, headings: Iterator[str]) -> str:
    def cell(match: re.Match[str]) -> str:
        heading = next(headings, "")
        if match[1] == "th" or "colspan" in match["attributes"] or not heading:
            return match[0]
        return f'<td data-heading="{heading}"{match["attributes"]}>'

    return _CELL.sub(cell, row)
