"""Releases of engines and frameworks that a query may name, from `data/releases` and the user's
files.
"""

import functools
from dataclasses import dataclass

from hp_tool.catalog import library
from hp_tool.domain.releases import release_numbers
from hp_tool.errors import InputError

_NAMED_RELEASES = 24
"""Maximum number of releases listed in an error; older ones are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """The releases of one program."""

    releases: tuple[str, ...]
    """Newest first; the user's before the built-in ones."""
    as_of: str | None
    """Month of the list; None: not dated."""
    series: int
    """Numbers of a release that name its minor release."""


@functools.lru_cache(maxsize=1)
def _releases() -> dict[str, _Listed]:
    """Return the releases of each program."""
    known: dict[str, _Listed] = {}
    for folder in library.folders():
        for path in sorted((folder / "releases").glob("*.yaml")):
            for entry in library.file_entries(path):
                before = known.get(entry.name, _Listed(releases=(), as_of=None, series=2))
                listed = (str(each) for each in entry.fields.get("releases", ()))
                known[entry.name] = _Listed(
                    releases=tuple(dict.fromkeys((*before.releases, *listed))),
                    as_of=entry.fields.get("as_of", before.as_of),
                    series=entry.fields.get("series", before.series),
                )
    return known


library.on_change(_releases.cache_clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAge:
    """How far a release is behind the newest one of a dated list."""

    newest: str
    minor_releases: int
    """Minor releases after this one."""
    as_of: str
    """Month of the list."""


def release_age(program: str, release: str) -> ReleaseAge | None:
    """Return how far a release of a program is behind; None without a dated list."""
    listed = _releases().get(program)
    if listed is None or listed.as_of is None:
        return None
    numbers = listed.series
    series = {release_numbers(each)[:numbers]: each for each in reversed(listed.releases)}
    return ReleaseAge(
        newest=series[max(series)],
        minor_releases=sum(each > release_numbers(release)[:numbers] for each in series),
        as_of=str(listed.as_of),
    )


def has_releases(program: str) -> bool:
    """Return whether an engine or framework has releases."""
    return program in _releases()


def check_release(program: str, release: str, *, field: str) -> None:
    """Check a release of an engine or framework.

    Releases are compared by their numbers: candidates, post releases and builds count as their
    release, and a series (0.16) as any of its releases.

    Raises:
        InputError: `unknown_release`: no list names the release.
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
    hint = f"; {series[0]}.{series[1]} names its series" if series else ""
    listed = ", ".join(known[:_NAMED_RELEASES]) + (
        f" and {len(known) - _NAMED_RELEASES} older ones" if len(known) > _NAMED_RELEASES else ""
    )
    message = (
        f"{field} {release[:80]!r} is not a known release of {program}{hint}; known: {listed}"
        if known
        else f"no release of {program} is known to change a prediction; remove {field}"
    )
    raise InputError(message, field=field, code="unknown_release")
