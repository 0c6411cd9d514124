"""What one piece of work may cost, where whoever asks for it sets bounds; commands and Python set
none.

They stand in a context variable: a loop deep in the library meets those of its request, and no
route can forget to pass them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hp_tool.errors import HpToolError, InputError


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Limits of one request's work, and its progress."""

    max_combinations: int
    max_values: int
    """Longest list that an axis may be given."""
    max_yaml_bytes: int
    """Maximum bytes of YAML, which takes about five seconds of processor time per megabyte; JSON
    takes milliseconds.
    """
    check: Callable[[Bounds], None]
    """Called every few milliseconds of long work; raises to end it."""
    planned: int = 0
    """Announced combinations."""
    counted: int = 0
    """How many of them count against `max_combinations`."""
    questions: int = 1
    """Number of questions that the work answers; each has its own processor time."""
    again: bool = False
    """Whether what is announced was announced before, and counts no more."""
    done: int = 0
    """How many of them were."""
    spent_s: float = 0.0
    """Processor time that `check_work` has counted."""


_CURRENT: ContextVar[Bounds | None] = ContextVar("bounds", default=None)


@contextmanager
def apply_bounds(bounds: Bounds) -> Iterator[None]:
    """Limit the work inside the context to `bounds`, including threads that copy the context."""
    token = _CURRENT.set(bounds)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def reset_counts() -> None:
    """Begin the next of several pieces of work, each of which may cost as much: a line of a
    batch.
    """
    if (bounds := _CURRENT.get()) is not None:
        bounds.planned, bounds.counted, bounds.done, bounds.spent_s, bounds.questions = (
            0,
            0,
            0,
            0.0,
            1,
        )


def announce_answers(questions: int) -> None:
    """Announce that the work answers so many questions, as of so many machines."""
    if (bounds := _CURRENT.get()) is not None:
        bounds.questions = questions


@contextmanager
def repeat_search() -> Iterator[None]:
    """Within, spaces that were announced already are searched again with choices of ours: they do
    not count twice.
    """
    if (bounds := _CURRENT.get()) is None:
        yield
        return
    before, bounds.again = bounds.again, True
    try:
        yield
    finally:
        bounds.again = before


def check_work(*, done: int = 0) -> None:
    """Count `done` combinations as evaluated, and raise if the work exceeds its limits."""
    if (bounds := _CURRENT.get()) is not None:
        bounds.done += done
        bounds.check(bounds)


def announce_combinations(count: int, *, axes: Mapping[str, int], most: int) -> None:
    """Announce `count` combinations of `axes`: the number of values of each, by its path in a
    query.

    Raises InputError `space_too_large` for more than `most`, which is too much for anyone,
    `request_too_costly` for more than the bounds leave.
    """
    if (bounds := _CURRENT.get()) is not None:
        bounds.planned += count
        bounds.counted += 0 if bounds.again else count
        if bounds.counted > bounds.max_combinations:
            raise _too_many_error(
                bounds.counted, most=bounds.max_combinations, axes=axes, code="request_too_costly"
            )
    if count > most:
        raise _too_many_error(count, most=most, axes=axes, code="space_too_large")


def check_values(count: int, *, field: str) -> None:
    """Raises InputError `request_too_costly` for a longer list of values than an axis may be
    given.
    """
    bounds = _CURRENT.get()
    if bounds is not None and count > bounds.max_values:
        raise InputError(
            f"{field} lists {count:,} values; the maximum for one request is "
            f"{bounds.max_values:,}. List fewer, or send several requests",
            field=field,
            code="request_too_costly",
        )


def check_yaml(num_bytes: int) -> None:
    """Raises HpToolError `payload_too_large` for longer YAML than the bounds allow."""
    bounds = _CURRENT.get()
    if bounds is not None and num_bytes > bounds.max_yaml_bytes:
        raise HpToolError(
            f"{num_bytes:,} bytes of YAML exceed the maximum of "
            f"{bounds.max_yaml_bytes:,}; send JSON instead",
            code="payload_too_large",
        )


def _too_many_error(count: int, *, most: int, axes: Mapping[str, int], code: str) -> InputError:
    """Names the longest axes, and how many values of each would fit."""
    widest_first = sorted(axes.items(), key=lambda axis: -axis[1])
    excess, advice = count / most, []
    for name, values in widest_first:
        fitting = max(int(values / excess), 1)
        advice.append(f"{name} to {fitting:,} of {values:,} values")
        excess *= fitting / values
        if excess <= 1.0:
            break
    return InputError(
        f"{count:,} combinations are more than {most:,}; fix or narrow {', '.join(advice)}",
        field=widest_first[0][0],
        code=code,
    )
