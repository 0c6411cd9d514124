"""Find distributions of sequence lengths by catalogue name, or read one from a user's file."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import Interval

from hp_tool.catalog import documents, library, records
from hp_tool.cost.lengths.sequences import LengthDistribution
from hp_tool.domain.query import OwnFile
from hp_tool.errors import InputError

FIELD = "training.sequence_lengths"
MAX_LENGTH = 1 << 24
"""Maximum number of tokens in a sequence, far above any practical length."""
MAX_COUNTED_LENGTHS = 1e15
MAX_LINES = 1_000_000
TABLES = (".txt", ".csv")
Tokens = Annotated[int, Interval(ge=1, le=MAX_LENGTH)]
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """A log-normal component of a length distribution."""

    share: Annotated[float, Interval(ge=1e-9, le=1e9)]
    """Weight relative to the other components."""
    median: Annotated[float, Interval(ge=1.0, le=MAX_LENGTH)]
    """Median length in tokens."""
    sigma: Annotated[float, Interval(ge=0.01, le=10.0)]
    """Standard deviation of the logarithm of the length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRecord:
    """A length distribution as written in a file: either `log_normal` components or `counts`."""

    name: str
    log_normal: dict[str, LogNormal] | None = None
    """Components by name."""
    shortest: Tokens = 1
    """Minimum length in tokens, for `log_normal`."""
    longest: Tokens = 1 << 20
    counts: dict[str | int, float] | None = None
    """Number of sequences by length in tokens."""


def sequence_lengths(name: str) -> LengthDistribution:
    """Return a distribution by catalogue name, or from a user's file.

    A file is YAML or JSON with LengthRecord's fields, or text (.txt, .csv) with a length and
    optionally a count on each line. A file is read only if the name is an OwnFile.

    Raises:
        InputError: The file is malformed.
        NotFoundError: The name is unknown; the error names the nearest known names.
    """
    path = Path(name)
    if path.suffix not in (*documents.SUFFIXES, *TABLES):
        return _from_entry(library.entry("lengths", name, field=FIELD))
    if not isinstance(name, OwnFile):
        raise InputError(
            f"sequence_lengths {name[:200]!r} is a file path, which is not accepted "
            "here; use the name of a distribution",
            field=FIELD,
        )
    try:
        return (
            _lengths_from_table(path)
            if path.suffix in TABLES
            else _build(library.sole_entry(path, field=FIELD))
        )
    except InputError as error:
        raise InputError(error.message, field=FIELD) from None


def _build(entry: library.Entry) -> LengthDistribution:
    record = records.build(
        LengthRecord, {"name": entry.name, **entry.fields}, field=FIELD, origin=entry.path
    )
    if (record.log_normal is None) == (record.counts is None):
        raise InputError(
            f"{entry.path}: {entry.name}: set either log_normal or counts", field=FIELD
        )
    if record.counts is not None:
        pairs = [
            (_parse_line(length, int, where=str(entry.path)), count)
            for length, count in record.counts.items()
        ]
        return _count_lengths(entry.name, pairs, origin=entry.path)
    assert record.log_normal is not None
    return _log_normal(record, record.log_normal, origin=entry.path)


_from_entry = functools.lru_cache(maxsize=64)(_build)


def _log_normal(
    record: LengthRecord, components: dict[str, LogNormal], *, origin: Path
) -> LengthDistribution:
    if record.shortest >= record.longest:
        raise InputError(
            f"{origin}: {record.name}: shortest must be less than longest", field=FIELD
        )
    for name, part in components.items():
        if not record.shortest <= part.median <= record.longest:
            raise InputError(
                f"{origin}: {record.name}: {name} requires a median between shortest and longest",
                field=FIELD,
            )
    if not components:
        raise InputError(f"{origin}: {record.name}: log_normal has no components", field=FIELD)
    total = sum(part.share for part in components.values())
    return LengthDistribution.log_normal_mixture(
        name=record.name,
        components=[(part.share / total, part.median, part.sigma) for part in components.values()],
        shortest=record.shortest,
        longest=record.longest,
    )


def _lengths_from_table(path: Path) -> LengthDistribution:
    lines = [line.strip() for line in documents.read_text(path).splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) > MAX_LINES:
        raise InputError(
            f"{path} has {len(lines):,} lines; the maximum is {MAX_LINES:,}. "
            "Combine equal lengths into one line: length, count"
        )
    pairs = []
    for number, line in enumerate(lines, start=1):
        length, _, count = line.partition(",")
        where = f"{path}, entry {number}"
        pairs.append(
            (
                _parse_line(length, int, where=where),
                _parse_line(count, float, where=where) if count else 1.0,
            )
        )
    return _count_lengths(path.stem, pairs, origin=path)


def _count_lengths(
    name: str, pairs: list[tuple[int, float]], *, origin: Path
) -> LengthDistribution:
    if not any(count > 0 for _, count in pairs):
        raise InputError(f"{origin}: no lengths with a positive count", field=FIELD)
    for length, count in pairs:
        if not (1 <= length <= MAX_LENGTH and 0 <= count <= MAX_COUNTED_LENGTHS):
            raise InputError(
                f"{origin}: length {length} with count {count:g} is out of range; lengths "
                f"are from 1 to {MAX_LENGTH:,}, counts from 0 to {MAX_COUNTED_LENGTHS:g}",
                field=FIELD,
            )
    return LengthDistribution.from_counts(
        name=name, lengths=(n for n, _ in pairs), counts=(count for _, count in pairs)
    )


def _parse_line(text: str | int, kind: Callable[[str | int], N], *, where: str) -> N:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number of tokens" if kind is int else "a number of sequences"
        raise InputError(f"{where}: {str(text)[:40]!r} is not {what}", field=FIELD) from None
