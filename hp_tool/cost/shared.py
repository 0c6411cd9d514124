"""Cached results for single candidates of one case: its layers, its pipelines, values of its model.

For arrays, `candidates.unique_rows` computes each combination of a few axes once. This module does
the same for configurations that are evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_ENTRIES = 4096
"""Maximum number of results in one cache."""
_caches: list[Shared[object]] = []


class Shared(Generic[T]):
    """A cache of results, keyed by the identity of the objects they depend on and by a few numbers.

    Keys use identity because hashing a whole case would cost more than it saves.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[tuple[object, ...], T]] = {}
        _caches.append(self)  # type: ignore[arg-type]

    def get(
        self, objects: tuple[object, ...], numbers: tuple[object, ...], compute: Callable[[], T]
    ) -> T:
        """Return the result for these objects and numbers; compute it at first use."""
        key = (*map(id, objects), *numbers)
        kept = self._results.get(key)
        if kept is None:
            if len(self._results) >= MAX_ENTRIES:
                self._results.clear()
            kept = self._results[key] = (
                objects,
                compute(),
            )  # Stored with the objects, so that their ids are not reused.
        return kept[1]

    def forget(self) -> None:
        """Drop all results."""
        self._results.clear()


def forget_all() -> None:
    """Drop the results of every cache."""
    for cache in _caches:
        cache.forget()
