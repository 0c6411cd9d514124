"""Releases of engines and frameworks that a query may name, from `data/releases` and the user's
files.
"""

import functools

from hp_tool.catalog import library
from hp_tool.domain.releases import release_numbers
from hp_tool.errors import InputError

_NAMED_RELEASES = 24
"""Maximum number of releases listed in an error; older ones are only counted."""


@functools.lru_cache(maxsize=1)
def _releases() -> dict[str, tuple[str, ...]]:
    """Return the releases of each program, newest first; the user's before the built-in ones."""
    known: dict[str, tuple[str, ...]] = {}
    for folder in library.folders():
        for path in sorted((folder / "releases").glob("*.yaml")):
            for entry in library.file_entries(path):
                listed = (str(each) for each in entry.fields.get("releases", ()))
                known[entry.name] = tuple(dict.fromkeys((*known.get(entry.name, ()), *listed)))
    return known


library.on_change(_releases.cache_clear)


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
    known = _releases().get(program, ())
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
