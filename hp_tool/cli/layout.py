"""Tables that fit the terminal, with one line per row, columns that are hidden in narrow terminals,
and a legend.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hp_tool.cli.printable import escape_control_characters
from hp_tool.wording.columns import Column

PIPE_WIDTH = 10_000
"""Maximum number of characters per line in files and pipes, where lines are not wrapped."""


class _Console(Console):
    """A console that escapes control characters in text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield (
                segment
                if segment.control
                else segment._replace(text=escape_control_characters(segment.text))
            )


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or standard error. In files and pipes, tables have all
    columns and lines are not wrapped, unless COLUMNS sets a width.

    rich reads FORCE_COLOR and TERM:
    https://rich.readthedocs.io/en/stable/console.html#environment-variables. NO_COLOR also disables
    bold text.
    """
    colors = None if os.environ.get("NO_COLOR") else "auto"
    console = _Console(stderr=stderr, color_system=colors)  # type: ignore[arg-type]
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _Console(
        stderr=stderr,
        color_system=colors,  # type: ignore[arg-type]
        width=PIPE_WIDTH,
        highlight=False,
    )


SELF_EXPLANATORY_HEADS = (
    "TP",
    "PP",
    "CP",
    "EP",
    "DP",
    "SP",
    "ZeRO",
    "MFU",
    "TTFT",
    "TPOT",
    "tokens",
)
"""Column heads that need no explanation."""


def print_columns(
    console: Console,
    columns: Sequence[Column],
    *,
    title: str | None = None,
    bold_first: bool = False,
    legend: bool = True,
) -> None:
    """Print a table of as many columns as fit.

    If not all columns fit, columns with the same value in every row are printed as one line below
    the table. If necessary, further columns are hidden. With `legend`, a line below the table
    explains the heads.
    """
    shown, merged, dropped = list(columns), [], []
    gap = 2 if _fits_console(console, shown, gap=2) else 1
    while not _fits_console(console, shown, gap=gap):
        if constant := [column for column in shown if column.is_constant and column.meaning]:
            merged.append(constant[-1])
            shown.remove(constant[-1])
        elif droppable := [column for column in shown if column.drop]:
            last = max(droppable, key=lambda column: column.drop)
            dropped.append(last)
            shown.remove(last)
        else:
            break
    if title:
        console.print(Text(title, style="bold"))
    console.print(_make_table(shown, gap=gap, bold_first=bold_first))
    if merged:
        console.print(
            "same in every row: "
            + ", ".join(f"{c.head} {c.cells[0]} {c.unit}".strip() for c in reversed(merged)),
            highlight=False,
        )
    if dropped:
        console.print(
            f"columns hidden at this width: {', '.join(c.head for c in dropped)}",
            style="dim",
            highlight=False,
        )
    if legend and (
        meanings := [
            f"{c.head}: {c.meaning}"
            for c in columns
            if c.meaning and c not in dropped and c.head not in SELF_EXPLANATORY_HEADS
        ]
    ):
        console.print("; ".join(meanings), style="dim", highlight=False)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: int = 0,
    wrap: bool = False,
) -> None:
    """Print a table whose first `left` columns contain text. In a narrow terminal, the last columns
    are hidden first. With `wrap`, no column is hidden.
    """
    cells = list(zip(*rows, strict=True)) or [()] * len(heads)
    columns = [
        Column(head=head, cells=tuple(column), left=number < left, drop=0 if wrap else number)
        for number, (head, column) in enumerate(zip(heads, cells, strict=True))
    ]
    print_columns(console, columns, title=title)


def print_flags(console: Console, changes: Iterable[Mapping[str, object]]) -> None:
    """Print changed flags as a diff: `- old` and `+ new`, each with `from`, `to` and `flag`."""
    for change in changes:
        flag = str(change["flag"])
        separator = " " if flag.startswith("-") else "="
        for sign, value in (("-", change["from"]), ("+", change["to"])):
            if value is not None:
                console.print(
                    f"{sign} {flag}{f'{separator}{value}' if value else ''}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )


def _fits_console(console: Console, columns: Sequence[Column], *, gap: int) -> bool:
    return table_width(columns, gap=gap) <= console.width


def table_width(columns: Sequence[Column], *, gap: int) -> int:
    """Return the width of a table: the widest text of each column, plus gaps of `gap`
    characters.
    """
    texts = ((*column.cells, column.head, column.unit) for column in columns)
    widths = [
        max(cell_len(line) for text in each for line in (text.splitlines() or [""]))
        for each in texts
    ]
    return sum(widths) + gap * (len(widths) - 1)


def _make_table(columns: Sequence[Column], *, gap: int, bold_first: bool = False) -> Table:
    two_lines = any(
        column.unit for column in columns
    )  # A rule below them; the lines of a list are names for other programs.
    lines, padding = (box.SIMPLE_HEAD, gap - 1) if two_lines else (None, gap)
    table = Table(
        box=lines, show_edge=False, pad_edge=False, padding=(0, padding, 0, 0), header_style="bold"
    )
    for column in columns:
        head = f"{column.head}\n{column.unit}" if two_lines else column.head
        table.add_column(
            Text(head),
            justify="left" if column.left else "right",
            no_wrap=not column.left,
            overflow="fold",
        )
    for number, row in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*map(Text, row), style="bold" if bold_first and number == 0 else None)
    return table
