"""Cached results for single candidates of one case: its layers, its pipelines, values of its model.

In arrays each combination of a few axes is computed once (`candidates.unique_rows`); this does the
same for configurations that are evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ENTRIES = 4096
"""Maximum number of results in one cache."""
_caches: list[Shared[object]] = []


class Shared(Generic[T]):
    """Results by the identity of the objects they depend on, and by a few numbers.

    Identity is used because hashing a whole case would cost more than it saves.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[tuple[object, ...], T]] = {}
        _caches.append(self)  # type: ignore[arg-type]

    def get(
        self, objects: tuple[object, ...], numbers: tuple[object, ...], compute: Callable[[], T]
    ) -> T:
        """Return the result of these objects and numbers, computed at first use."""
        key = (*map(id, objects), *numbers)
        kept = self._results.get(key)
        if kept is None:
            if len(self._results) >= MAX_ENTRIES:
                self._results.clear()
            kept = self._results[key] = (
                objects,
                compute(),
            )  # with the objects, so that their ids are not reused
        return kept[1]

    def forget(self) -> None:
        """Drop all results."""
        self._results.clear()


def forget_all() -> None:
    """Drop the results of every cache."""
    for cache in _caches:
        cache.forget()
