"""What this process opened or listed on disk, whichever code of whichever thread asked for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_watching: list[tuple[str, list[str]]] = []


@contextmanager
def opened(part: str) -> Iterator[list[str]]:
    """Paths that hold `part` and were opened, or tried to be, while this is open; the list
    grows.
    """
    entry = (part, list[str]())
    _watching.append(entry)
    try:
        yield entry[1]
    finally:
        _watching.remove(entry)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching or event not in ("open", "os.listdir", "os.scandir"):
        return
    name = (
        arguments[0].decode(errors="replace")
        if isinstance(arguments[0], bytes)
        else str(arguments[0])
    )
    for part, found in _watching:
        if part in name:
            found.append(name)


sys.addaudithook(_hook)  # for good: Python takes none back
