"""Generate the tables of evidence/README.md: `python -m evidence.readme`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from evidence.schema import KINDS, Kind
from evidence.table import FOLDER, files, read

PAGE = FOLDER / "README.md"


def main() -> None:
    PAGE.write_text(generate_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def generate_page(text: str) -> str:
    """Return the page with all generated parts, from the schema and the files."""
    for name, part in (
        ("files", _files()),
        ("excluded", _excluded()),
        ("columns", _columns()),
    ):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = "\n".join([before + begin, *part, "", end + after])
    return text


def _files() -> Iterator[str]:
    yield from _header("file", "rows", "collected as")
    for kind in KINDS.values():
        for path in files(kind.name):
            tables = Counter(row["table"] for row in read(path, kind))
            names = ", ".join(f"`{name}` ({count:,})" for name, count in tables.items())
            yield f"| `{path.relative_to(FOLDER)}` | {tables.total():,} | {names} |"


def _excluded() -> Iterator[str]:
    yield from _header("file", "rows", "why")
    for kind in KINDS.values():
        for path in files(kind.name):
            reasons = Counter(row["excluded"] for row in read(path, kind) if row.get("excluded"))
            for reason, count in reasons.items():
                yield f"| `{path.relative_to(FOLDER)}` | {count} | {reason} |"


def _columns() -> Iterator[str]:
    for kind in KINDS.values():
        yield from (f"### {kind.name}/", "", kind.meaning, "")
        yield from _columns_of(kind)
        yield ""


def _columns_of(kind: Kind) -> Iterator[str]:
    yield from _header("column", "type", "unit", "meaning")
    for column in kind.columns:
        type_ = f"{column.type}, required" if column.required else column.type
        yield f"| `{column.name}` | {type_} | {column.unit} | {column.meaning} |"


def _header(*names: str) -> Iterable[str]:
    return (f"| {' | '.join(names)} |", "|---" * len(names) + "|")


if __name__ == "__main__":
    main()
