"""List the releases of engines and frameworks, from `data/releases` and the user's files."""

import functools
from dataclasses import dataclass

from hp_tool.catalog import library
from hp_tool.domain.releases import release_numbers
from hp_tool.errors import InputError

_NAMED_RELEASES = 24
"""Maximum number of releases listed in an error message. Older releases are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The known releases of one program."""

    releases: tuple[str, ...]
    """Release numbers, newest first. The user's releases precede the built-in ones."""
    as_of: str | None
    """Month in which the list was complete; None if the list is not dated."""
    series: int
    """Number of leading components of a release number that identify its minor release."""


@functools.lru_cache(maxsize=1)
def _releases() -> dict[str, _Listed]:
    by_program: dict[str, _Listed] = {}
    for folder in library.folders():
        for path in sorted((folder / "releases").glob("*.yaml")):
            for entry in library.file_entries(path):
                previous = by_program.get(entry.name, _Listed(releases=(), as_of=None, series=2))
                numbers = (str(each) for each in entry.fields.get("releases", ()))
                by_program[entry.name] = _Listed(
                    releases=tuple(dict.fromkeys((*previous.releases, *numbers))),
                    as_of=entry.fields.get("as_of", previous.as_of),
                    series=entry.fields.get("series", previous.series),
                )
    return by_program


library.on_change(_releases.cache_clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAge:
    """How far a release is behind the newest release in a dated list."""

    newest: str
    minor_releases: int
    """Number of newer minor releases."""
    as_of: str
    """Month in which the list was complete."""


def release_age(program: str, release: str) -> ReleaseAge | None:
    """Return how far a release is behind the newest one; None if there is no dated list."""
    known_releases = _releases().get(program)
    if known_releases is None or known_releases.as_of is None:
        return None
    numbers = known_releases.series
    series = {release_numbers(each)[:numbers]: each for each in reversed(known_releases.releases)}
    return ReleaseAge(
        newest=series[max(series)],
        minor_releases=sum(each > release_numbers(release)[:numbers] for each in series),
        as_of=str(known_releases.as_of),
    )


def has_releases(program: str) -> bool:
    """Return True if the releases of an engine or framework are listed."""
    return program in _releases()


def check_release(program: str, release: str, *, field: str) -> None:
    """Check that a release of an engine or framework is known.

    Suffixes are ignored: 0.16.0rc1, 0.16.0.post1 and 0.16.0+cu128 count as 0.16.0. 0.16 matches any
    of its patch releases.

    Raises:
        InputError: `unknown_release`: no list contains the release.
    """
    listed_releases = _releases().get(program)
    known = () if listed_releases is None else listed_releases.releases
    numbers = release_numbers(release)
    if len(numbers) > 1 and any(release_numbers(each)[: len(numbers)] == numbers for each in known):
        return
    series = next(
        (
            numbers[:2]
            for each in known
            if len(numbers) > 2 and release_numbers(each)[:2] == numbers[:2]
        ),
        None,
    )
    hint = f"; use {series[0]}.{series[1]} for any patch" if series else ""
    shown = ", ".join(known[:_NAMED_RELEASES]) + (
        f" and {len(known) - _NAMED_RELEASES} older ones" if len(known) > _NAMED_RELEASES else ""
    )
    message = (
        f"{field} {release[:80]!r} is not a known release of {program}{hint}; known: {shown}"
        if known
        else f"predictions do not depend on the release of {program}; remove {field}"
    )
    raise InputError(message, field=field, code="unknown_release")
