"""The events of a Chrome trace, one after the other, whatever the file's size.

`json.JSONDecoder.raw_decode` reads one value from a place in a text: the standard library's scanner
is written in C and reads 100 MB in 1.4 s, ijson's C backend in 2.0 s (`python -m
benchmarks.traces`), so that no other library is needed.
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
"""Characters of one event, or of one value beside the events; real ones have thousands."""
EVENTS = "traceEvents"
HEADER = frozenset({"baseTimeNanoseconds", "deviceProperties", "distributedInfo"})
"""Keys beside the events whose values are kept."""
_SPACE = re.compile(r"[\s,]*")


def _no_number(text: str) -> NoReturn:
    raise OverflowError(f"{text} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class TraceStream:
    """A trace that is read once: iterate over its events; `header` has the keys of HEADER that came
    so far.
    """

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self.header: dict[str, Any] = {}
        self._stream, self._name = stream, name
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text, self._at, self._done, self._passed = "", 0, False, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The events: objects of a list, or of the list under EVENTS. Raises InputError for what is
        no trace.
        """
        opening = self._next()
        if opening == "[":
            yield from self._list()
            return
        if opening != "{":
            self._refuse(
                f"it begins with {opening!r}, and a trace is a list or an object", code="no_trace"
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
            self._refuse(f"it has no {EVENTS}", code="no_trace")

    def _list(self) -> Iterator[dict[str, Any]]:
        while self._next(peek=True) != "]":
            value = self._value()
            if isinstance(value, dict):
                yield value
        self._next()

    def _next(self, *, peek: bool = False) -> str:
        """The next character that is no space or comma."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                character = self._text[self._at]
                self._at += not peek
                return character
            if not self._more():
                self._refuse("it ends too early: was the trace written to its end?", code="cut_off")

    def _value(self) -> Any:
        self._next(peek=True)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_VALUE:
                    self._refuse(
                        f"one value has more than {MAX_VALUE:,} characters, or is no JSON "
                        f"({error.msg})"
                    )
                if not self._more():
                    cut = error.pos >= len(self._text) - 1
                    self._refuse(
                        "it ends within a value" if cut else error.msg,
                        code="cut_off" if cut else "syntax",
                    )
            except RecursionError:
                self._refuse("lists and objects are nested too deep", code="nesting")
            except (ValueError, OverflowError) as error:
                self._refuse(f"a number cannot be: {str(error).partition(';')[0]}", code="number")
            else:
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on; False at the end."""
        if self._done:
            return False
        bounds.check()
        content = self._stream.read(CHUNK)
        self._done = not content
        self._passed += self._at
        self._text, self._at = (
            self._text[self._at :] + self._decode.decode(content, final=self._done),
            0,
        )
        return not self._done or self._at < len(self._text)

    def _refuse(self, reason: str, *, code: str = "syntax") -> NoReturn:
        raise InputError(
            f"{self._name} at character {self._passed + self._at:,}: {reason}",
            field="trace",
            code=code,
        )
