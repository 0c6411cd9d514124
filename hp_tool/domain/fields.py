"""Base classes of dataclasses that describe user input. Unknown keys are errors, and numbers are
bounded.

The bounds are wide enough for realistic input and narrow enough that no formula overflows. They are
part of the field annotations, so that pydantic enforces them and /openapi.json and the form show
them.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, cast, get_args, get_type_hints

from annotated_types import Interval, MinLen

from hp_tool.errors import InputError

T = TypeVar("T")
ChosenValues: TypeAlias = dict[str, Any]
"""Query values other than `parallel` that a ranking, a fix or a search set, by dotted path."""
_BUILD_LOCK = threading.Lock()


def short_repr(value: Any) -> str:
    """Return a dataclass as Python source, without fields that have their default:
    `ParallelConfig(tensor_parallel_size=8)`.
    """
    names = (
        field.name
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    )
    return (
        f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in names)})"
    )


Count = Annotated[int, Interval(ge=1, le=1 << 31)]
Devices = Annotated[int, Interval(ge=1, le=1 << 20)]
"""Number of devices or nodes, or a parallel size."""
Amount = Annotated[float, Interval(ge=1e-9, le=1e18)]
"""A positive amount of money, duration or rate."""
Fraction = Annotated[float, Interval(ge=0.0, le=0.99)]
"""A fraction from 0 (inclusive) to 1 (exclusive)."""
Rate = Annotated[float, Interval(ge=1.0, le=1e24)]
"""Bytes or FLOPs per second."""
NonNegative = Annotated[float, Interval(ge=0.0, le=1e24)]
"""A price, power or latency; may be 0."""
OneOrMany: TypeAlias = T | Annotated[tuple[T, ...], MinLen(1)] | None
"""A value (fixed), a list (allowed values) or absent (free)."""


class _OneOrSeveral:
    """pydantic marker of a field that accepts a value or a list of values."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        one = handler(source)
        several = {
            "type": "tuple",
            "items_schema": [one],
            "variadic_item_index": 0,
            "min_length": 1,
        }
        kinds = {
            "One": one,
            "Several": several,
        }  # In capitals, like other union branches, which errors omit from a path.
        return {
            "type": "tagged-union",
            "choices": kinds,
            "discriminator": lambda value: "Several" if isinstance(value, list | tuple) else "One",
        }


Choice: TypeAlias = Annotated[T, _OneOrSeveral()]
"""One value. A ranking also accepts a list of values and treats each as a separate query."""


class _NotBlank:
    """pydantic marker of a text that is not blank."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), "pattern": r"\S"}


Release: TypeAlias = Annotated[str, _NotBlank()]
"""A release number, as text."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """How interfaces show a query field: forms, the explorer, field tables and the API schema."""

    label: str
    section: str
    """Title of the section that contains the field."""
    unset: str = ""
    """Short text shown for an omitted field; empty: its default."""
    example: str = ""
    """A realistic value, shown as an example."""
    kind: str = ""
    """Kind of query that has the field: training or inference; empty: both."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        more = {
            "x-section": self.section,
            "x-unset": self.unset,
            "x-example": self.example,
            "x-kind": self.kind,
        }
        return {
            **handler(core_schema),
            "title": self.label,
            **{name: text for name, text in more.items() if text},
        }


class Strict:
    """Base of dataclasses parsed from JSON that accepts only known keys and finite numbers.

    The docstrings of the fields become descriptions in the schema.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, bool | str]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
        "allow_inf_nan": False,
    }


class Flattened(Strict):
    """A dataclass whose field `others` contains pairs of key and value. They are written as
    additional keys of the same mapping.
    """

    __slots__ = ()

    @classmethod
    def _fold(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the mapping with unknown keys moved into `others`.

        Raises:
            InputError: A key is not valid.
        """
        raise NotImplementedError

    @classmethod
    def _other_keys(cls) -> tuple[str, dict[str, Any]]:
        """Return the pattern of the additional keys, and the JSON schema of their values."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> dict[str, Any]:
        def read(data: Any) -> Any:
            return cls._fold(data) if isinstance(data, dict) else data

        def write(value: Any, handler: Any) -> Any:
            return {key: each for key, each in handler(value).items() if key != "others"} | dict(
                value.others
            )

        schema = handler(source)
        own: dict[str, Any] = handler.resolve_ref_schema(schema)
        if own["schema"]["type"] != "function-before":  # A repeated type shares its schema.
            own["schema"] = {
                "type": "function-before",
                "function": {"type": "no-info", "function": read},
                "schema": own["schema"],
            }
            own["serialization"] = {"type": "function-wrap", "function": write}
        return cast(dict[str, Any], schema)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        pattern, value = cls._other_keys()
        own.get("properties", {}).pop("others", None)
        own["patternProperties"] = {f"^{pattern}$": value}
        return schema


@contextlib.contextmanager
def build_validators(*, described: bool) -> Iterator[None]:
    """Return a context in which validators may be built, by one thread at a time.

    Python 3.11 cannot parse docstrings in two threads at once. Parsing docstrings for schemas with
    descriptions takes a sixth of a command's run time.
    """
    with _BUILD_LOCK:
        Strict.__pydantic_config__["use_attribute_docstrings"] = described
        try:
            yield
        finally:
            Strict.__pydantic_config__["use_attribute_docstrings"] = True


@functools.cache
def choice_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that accept a list of values for a ranking.

    Reads the text of postponed annotations, because evaluating them takes milliseconds.
    """
    return tuple(each.name for each in dataclasses.fields(kind) if "Choice[" in str(each.type))


@functools.cache
def bounds_of(kind: Any) -> dict[str, tuple[float, float]]:
    """Return the minimum and maximum of each bounded field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: bounds
        for name, hint in hints.items()
        if (bounds := _bounds_of_hint(hint)) is not None
    }


def check_bounds(kind: Any, values: Mapping[str, Any], *, field: str = "") -> None:
    """Check bounds of numbers that pydantic has not validated.

    Args:
        values: Values by field name of `kind`; None if omitted.

    Raises:
        InputError: `invalid_value`, with the value's path below `field`.
    """
    prefix = f"{field}." if field else ""
    for name, bounds in bounds_of(kind).items():
        value = values.get(name)
        numbers = (
            value
            if isinstance(value, Mapping)
            else dict(enumerate(value))
            if isinstance(value, tuple)
            else {"": value}
        )
        for key, number in numbers.items():
            if (
                isinstance(number, int | float) and not bounds[0] <= number <= bounds[1]
            ):  # `not` because NaN compares False with every bound.
                raise bounds_error(number, bounds, field=f"{prefix}{name}.{key}".rstrip("."))


def check_spec(spec: T, *, field: str) -> T:
    """Return the dataclass if its numbers are within their bounds.

    Raises:
        InputError: A number is outside its bounds, as in `check_bounds`.
    """
    kind: Any = type(spec)
    check_bounds(kind, {name: getattr(spec, name) for name in bounds_of(kind)}, field=field)
    return spec


def bounds_error(value: object, bounds: tuple[float, float], *, field: str) -> InputError:
    """Return the error for a number outside its inclusive bounds."""
    ends = " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in bounds)
    return InputError(
        f"{field} must be from {ends}, got {str(value)[:80]}", field=field, code="invalid_value"
    )


def _bounds_of_hint(hint: Any) -> tuple[float, float] | None:
    own: list[Any] = [
        each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Interval)
    ]
    return (
        (own[0].ge, own[0].le)
        if own
        else next(filter(None, map(_bounds_of_hint, get_args(hint))), None)
    )
