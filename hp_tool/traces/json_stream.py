"""Iterate over the events of a Chrome trace of any size.

`json.JSONDecoder.raw_decode` parses a single value at a position in a text. The standard library's
C scanner reads 100 MB in 1.4 s; ijson's C backend needs 2.0 s (`python -m benchmarks.traces`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from hp_tool.domain import bounds
from hp_tool.errors import InputError

CHUNK = 2**20
MAX_VALUE = 8 * 2**20
"""Maximum length of an event or other value in characters. Real ones have thousands."""
EVENTS = "traceEvents"
HEADER = frozenset({"baseTimeNanoseconds", "deviceProperties", "distributedInfo"})
"""Top-level keys whose values are stored, in addition to the events."""
_SPACE = re.compile(r"[\s,]*")


def _reject_constant(text: str) -> NoReturn:
    raise OverflowError(f"{text} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


class TraceStream:
    """A trace that can be iterated once.

    `header` collects the values of HEADER during the iteration.
    """

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self.header: dict[str, Any] = {}
        self._stream, self._name = stream, name
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._done, self._consumed = "", 0, False, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the events: the objects in a top-level list, or in the list under EVENTS.

        Raises:
            InputError: The file is not a trace.
        """
        opening = self._next()
        if opening == "[":
            yield from self._list()
            return
        if opening != "{":
            self._refuse(
                f"starts with {opening!r}; a trace is a JSON list or object", code="no_trace"
            )
        has_events = False
        while self._next(peek=True) != "}":
            key = self._value()
            if self._next() != ":" or not isinstance(key, str):
                self._refuse("a key has no value")
            if key == EVENTS and self._next(peek=True) == "[":
                has_events = True
                self._next()
                yield from self._list()
            else:
                value = self._value()
                if key in HEADER:
                    self.header[key] = value
        if not has_events:
            self._refuse(f"no key {EVENTS}", code="no_trace")

    def _list(self) -> Iterator[dict[str, Any]]:
        while self._next(peek=True) != "]":
            value = self._value()
            if isinstance(value, dict):
                yield value
        self._next()

    def _next(self, *, peek: bool = False) -> str:
        """Return the next character that is neither whitespace nor a comma."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                character = self._text[self._at]
                self._at += not peek
                return character
            if not self._more():
                self._refuse("unexpected end: was the trace written completely?", code="cut_off")

    def _value(self) -> Any:
        self._next(peek=True)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_VALUE:
                    self._refuse(
                        f"a value has more than {MAX_VALUE:,} characters, or is invalid JSON "
                        f"({error.msg})"
                    )
                if not self._more():
                    cut = error.pos >= len(self._text) - 1
                    self._refuse(
                        "unexpected end within a value" if cut else error.msg,
                        code="cut_off" if cut else "syntax",
                    )
            except RecursionError:
                self._refuse("lists and objects are nested too deeply", code="nesting")
            except (ValueError, OverflowError) as error:
                self._refuse(f"invalid number: {str(error).partition(';')[0]}", code="number")
            else:
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read the next chunk. Return False at the end of the file."""
        if self._done:
            return False
        bounds.check_work()
        content = self._stream.read(CHUNK)
        self._done = not content
        self._consumed += self._at
        self._text, self._at = (
            self._text[self._at :] + self._decode.decode(content, final=self._done),
            0,
        )
        return not self._done or self._at < len(self._text)

    def _refuse(self, reason: str, *, code: str = "syntax") -> NoReturn:
        raise InputError(
            f"{self._name} at character {self._consumed + self._at:,}: {reason}",
            field="trace",
            code=code,
        )
