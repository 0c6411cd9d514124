"""Results that lone candidates of one case share: its layers, its pipelines, what only its model
decides.

In arrays each combination of a few axes is costed once (`candidates.unique_rows`); here it is for
configurations that come one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 4096
"""Results that one cache keeps."""
_caches: list[Shared[object]] = []


class Shared(Generic[T]):
    """Results by the objects they follow from, each equal to itself alone (hashing a whole case
    would cost more than it saves), and by a few numbers.
    """

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], tuple[tuple[object, ...], T]] = {}
        _caches.append(self)  # type: ignore[arg-type]

    def get(
        self, objects: tuple[object, ...], numbers: tuple[object, ...], compute: Callable[[], T]
    ) -> T:
        """Return the result of these objects and numbers, computed when it is first asked for."""
        key = (*map(id, objects), *numbers)
        kept = self._results.get(key)
        if kept is None:
            if len(self._results) >= MOST:
                self._results.clear()
            kept = self._results[key] = (
                objects,
                compute(),
            )  # with the objects, whose ids no others take then
        return kept[1]

    def forget(self) -> None:
        """Drop all results."""
        self._results.clear()


def forget_all() -> None:
    """Drop the results of every cache."""
    for cache in _caches:
        cache.forget()
