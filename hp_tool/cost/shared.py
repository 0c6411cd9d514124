"""Caches for single candidates of one case: results for layers, pipelines and properties of the
model.

For arrays, `candidates.unique_rows` computes each combination of a few axes once. This module does
the same for configurations that are evaluated one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ENTRIES = 4096
"""Maximum number of results in one cache."""
_caches: list[Shared[object]] = []


class Shared(Generic[T]):
    """A cache of results. A key consists of the identities of the objects that a result depends on,
    and a few numbers.

    Identities are used because hashing a complete case would take longer than the cache saves.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[tuple[object, ...], T]] = {}
        _caches.append(self)  # type: ignore[arg-type]

    def get(
        self, objects: tuple[object, ...], numbers: tuple[object, ...], compute: Callable[[], T]
    ) -> T:
        """Return the result for these objects and numbers; compute it on first use."""
        key = (*map(id, objects), *numbers)
        entry = self._results.get(key)
        if entry is None:
            if len(self._results) >= MAX_ENTRIES:
                self._results.clear()
            entry = self._results[key] = (
                objects,
                compute(),
            )  # Stored with the objects, so that their ids are not reused.
        return entry[1]

    def forget(self) -> None:
        """Clear the cache."""
        self._results.clear()


def forget_all() -> None:
    """Clear every cache."""
    for cache in _caches:
        cache.forget()
