"""Limits on the work of one request. Only the service sets them; the CLI and the Python API set
none.

The limits are stored in a context variable, so that loops deep in the library can check them
without an extra argument in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hp_tool.errors import HpToolError, InputError


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Limits on the work of one request, and counters of the work done so far."""

    max_combinations: int
    max_values: int
    """Maximum number of values listed for one axis."""
    max_yaml_bytes: int
    """Maximum size of a YAML text in bytes. Parsing YAML takes about five seconds of CPU time per
    megabyte; JSON takes milliseconds.
    """
    check: Callable[[Bounds], None]
    """Called every few milliseconds during long work; raises to stop it."""
    planned: int = 0
    """Number of combinations announced so far."""
    counted: int = 0
    """Number of announced combinations that count against `max_combinations`."""
    questions: int = 1
    """Number of questions that the request answers. Each question has its own CPU time limit."""
    again: bool = False
    """Whether the combinations being announced were announced before and must not be counted
    again.
    """
    done: int = 0
    """Number of combinations evaluated so far."""
    spent_s: float = 0.0
    """CPU seconds counted by `check_work`."""


_CURRENT: ContextVar[Bounds | None] = ContextVar("bounds", default=None)


@contextmanager
def apply_bounds(bounds: Bounds) -> Iterator[None]:
    """Apply `bounds` to the work inside the context, including threads that copy the context."""
    token = _CURRENT.set(bounds)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def reset_counts() -> None:
    """Reset the counters before the next independent task, such as the next line of a batch."""
    if (bounds := _CURRENT.get()) is not None:
        bounds.planned, bounds.counted, bounds.done, bounds.spent_s, bounds.questions = (
            0,
            0,
            0,
            0.0,
            1,
        )


def announce_answers(questions: int) -> None:
    """Announce how many questions the request answers, for example one per machine."""
    if (bounds := _CURRENT.get()) is not None:
        bounds.questions = questions


@contextmanager
def repeat_search() -> Iterator[None]:
    """Do not count combinations announced inside this context, because the same spaces were
    announced before.
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
    """Add `done` to the number of evaluated combinations, and check the limits.

    Raises:
        HpToolError: The work exceeds its limits.
    """
    if (bounds := _CURRENT.get()) is not None:
        bounds.done += done
        bounds.check(bounds)


def announce_combinations(count: int, *, axes: Mapping[str, int], most: int) -> None:
    """Announce that `count` combinations will be evaluated.

    Args:
        count: Number of combinations.
        axes: Number of values of each axis, by query path.
        most: Maximum number of combinations, with or without bounds.

    Raises:
        InputError: `space_too_large` if `count` exceeds `most`; `request_too_costly` if the total
            exceeds the request's bounds.
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
    """Check the length of an axis's list of values.

    Raises:
        InputError: `request_too_costly` if the list is longer than the bounds allow.
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
    """Check the size of a YAML document.

    Raises:
        HpToolError: `payload_too_large` if it exceeds the bounds.
    """
    bounds = _CURRENT.get()
    if bounds is not None and num_bytes > bounds.max_yaml_bytes:
        raise HpToolError(
            f"{num_bytes:,} bytes of YAML exceed the maximum of "
            f"{bounds.max_yaml_bytes:,}; send JSON instead",
            code="payload_too_large",
        )


def _too_many_error(count: int, *, most: int, axes: Mapping[str, int], code: str) -> InputError:
    """Return an error that names the longest axes and the permitted number of values for each."""
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
