"""Newline-delimited JSON as it arrives: chunks of bytes in, whole lines out, in bounded memory."""

from __future__ import annotations

from hp_tool.batch import Line
from hp_tool.errors import HpToolError

MEDIA_TYPE = "application/x-ndjson"


class LineSplitter:
    """Cuts a stream into its non-empty lines. An overlong line is skipped, not collected."""

    def __init__(self, *, limit: int) -> None:
        """`limit`: bytes in the longest accepted line."""
        self._limit = limit
        self._kept = bytearray()
        self._overlong = False

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that `chunk` completes."""
        *ends, rest = chunk.split(b"\n")
        complete = [line for end in ends for line in self._end_line(end)]
        self._keep(rest)
        return complete

    def finish(self) -> list[Line]:
        """The last line, where the stream did not end in a newline."""
        return self._end_line(b"")

    def _keep(self, piece: bytes) -> None:
        self._overlong = self._overlong or len(self._kept) + len(piece) > self._limit
        if self._overlong:
            self._kept.clear()
        else:
            self._kept += piece

    def _end_line(self, piece: bytes) -> list[Line]:
        self._keep(piece)
        overlong, line = self._overlong, bytes(self._kept).strip()
        self._overlong = False
        self._kept.clear()
        if overlong:
            return [HpToolError(f"the line is longer than {self._limit} bytes", code="payload_too_large")]
        return [line] if line else []
