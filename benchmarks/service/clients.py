"""Simulate many clients of a server in one process.

They are plain asyncio streams with keep-alive and prepared requests, so that sending costs little
compared with answering.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Asked:
    """The answers that clients received."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0
    wall_s: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.wall_s

    def quantile_s(self, share: float) -> float:
        """Return the seconds that this share of the answers took at most."""
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def request_bytes(*, path: str, body: bytes, port: int) -> bytes:
    """Return the bytes of a POST request."""
    lines = (f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def send_requests(*, port: int, requests: Iterator[bytes], clients: int, seconds: float) -> Asked:
    """Run clients that each send the next request when they have received an answer."""
    return asyncio.run(_ask(port=port, requests=requests, clients=clients, seconds=seconds))


async def _ask(*, port: int, requests: Iterator[bytes], clients: int, seconds: float) -> Asked:
    tally = Asked()
    begun = time.perf_counter()
    await asyncio.gather(*(_client(port, requests, begun + seconds, tally) for _ in range(clients)))
    tally.wall_s = time.perf_counter() - begun
    return tally


async def _client(port: int, requests: Iterator[bytes], ending: float, tally: Asked) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begun := time.perf_counter()) < ending:
        writer.write(next(requests))
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line[15:])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        await reader.readexactly(length)
        tally.seconds.append(time.perf_counter() - begun)
        tally.errors += not head.startswith(b"HTTP/1.1 200")
    writer.close()


def repeat_forever(request: bytes) -> Iterator[bytes]:
    """Yield the same request forever."""
    return itertools.repeat(request)
