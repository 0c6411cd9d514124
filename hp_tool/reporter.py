"""Report the step times of a training run, from inside the run, to `hp-tool serve` or to a file
that `hp-tool watch` reads.

This file needs only Python's standard library, so it may be copied next to a training script. It
never blocks and never raises. Steps wait in a bounded queue. A background thread sends them and
keeps them until the service has stored them. Each step has a sequence number, so a step that is
sent twice counts once.

    from hp_tool.reporter import Reporter
    reporter = Reporter()                      # HP_WATCH_URL, HP_API_KEY, HP_WATCH_FILE, RANK
    train_step = reporter.timed(train_step)    # one call is one step
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

CAPACITY = 100_000
"""Maximum number of queued steps: a day of one-second steps. If the queue is full, the oldest steps
are dropped, and their number is reported to the service.
"""
AT_ONCE = 500
EVERY_S = 1.0
LONGEST_WAIT_S = 30.0
CLOSING_WAIT_S = 0.2
LIMIT_S = 10.0
Function = TypeVar("Function", bound=Callable[..., Any])


class Reporter:
    """Collect the steps of one process and send them in the background."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        file: str | None = None,
        rank: int | None = None,
        capacity: int = CAPACITY,
        every_s: float = EVERY_S,
    ) -> None:
        """Create a reporter. Without `url` and `file`, it reports nothing.

        Args:
            url: URL of a watch, https://SERVER/v1/watches/ID; by default HP_WATCH_URL.
            api_key: API key of the service; by default HP_API_KEY.
            file: File to which JSON lines are appended; by default HP_WATCH_FILE, with {rank}
                replaced.
            rank: Rank of this process; by default RANK.
            capacity: Maximum number of queued steps.
            every_s: Seconds between two messages.
        """
        self.url = (url or os.environ.get("HP_WATCH_URL") or "").rstrip("/")
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        file = file or os.environ.get("HP_WATCH_FILE") or ""
        self.file = file.replace("{rank}", str(self.rank))
        self.dropped = 0
        """Number of steps dropped because the queue was full."""
        self._key = api_key or os.environ.get("HP_API_KEY")
        self._source, self._host = uuid.uuid4().hex, socket.gethostname()
        self._capacity, self._every_s, self._at_once = capacity, every_s, AT_ONCE
        self._waiting: deque[dict[str, Any]] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._seq = 0
        self._last: float | None = None
        self._parts: dict[str, float] = {}
        self._warned = False

    def step(
        self,
        step_s: float | None = None,
        *,
        step: int | None = None,
        parts_s: dict[str, float] | None = None,
        samples: float | None = None,
        tokens: float | None = None,
    ) -> None:
        """Report one optimizer step.

        Args:
            step_s: Step time in seconds. Default: the time since the previous call, so the first
                call only starts the clock.
            step: Step number.
            parts_s: Seconds of this rank by part; `communication` includes waiting for other ranks.
            samples: Samples in the step on all ranks, so that a larger batch does not count as a
                slowdown.
            tokens: Tokens in the step on all ranks.
        """
        now = time.perf_counter()
        last, self._last = self._last, now
        parts, self._parts = {**self._parts, **(parts_s or {})}, {}
        if step_s is None and last is None:
            return
        seconds = now - last if step_s is None and last is not None else step_s
        if seconds is None or not 1e-6 <= seconds <= 1e7:
            return
        self._seq += 1
        report: dict[str, Any] = {"seq": self._seq, "step_s": seconds}
        if step is not None:
            report["step"] = int(step)
        report |= {
            name: float(each)
            for name, each in (("samples", samples), ("tokens", tokens))
            if each and each > 0
        }
        if parts:
            report["parts_s"] = parts
        if self.file:
            self._write(report)
        if self.url:
            self._queue(report)

    def timed(self, function: Function) -> Function:
        """Return the function wrapped so that each call ends a step."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._last is None:
                self._last = time.perf_counter()
            result = function(*args, **kwargs)
            self.step()
            return result

        return wrapped  # type: ignore[return-value]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a part of the current step.

        For work on a GPU, synchronize before the block ends.
        """
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - begun

    def close(self, *, timeout_s: float = LIMIT_S) -> bool:
        """Send the queued steps, for at most `timeout_s` seconds. Return True if all of them were
        stored.
        """
        self._until = time.monotonic() + timeout_s
        self._closing.set()
        if self._waiting:
            self._start()
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
            if (
                thread.is_alive()
            ):  # The thread exits after it receives the response to its last message.
                return False
        self._thread = None
        self._closing.clear()
        return not self._waiting

    def _write(self, report: dict[str, Any]) -> None:
        with suppress(OSError), open(self.file, "a") as stream:  # noqa: PTH123
            stream.write(json.dumps({**report, "rank": self.rank}) + "\n")

    def _queue(self, report: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.append(report)
            if len(self._waiting) > self._capacity:
                self._waiting.popleft()
                self.dropped += 1
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._send_all, name="hp-tool reporter", daemon=True
            )
            self._thread.start()
            atexit.unregister(self.close)
            atexit.register(self.close)

    def _send_all(self) -> None:
        wait_s = self._every_s
        while True:
            closing = self._closing.wait(wait_s)
            accepted = self._send()
            wait_s = self._every_s if accepted else min(2.0 * wait_s, LONGEST_WAIT_S)
            if closing and (not self._waiting or time.monotonic() >= self._until):
                return
            if closing and not accepted:
                time.sleep(CLOSING_WAIT_S)
            if accepted and len(self._waiting) >= self._at_once:
                wait_s = 0.0

    def _send(self) -> bool:
        """Send the oldest queued steps, and remove those that the service stored."""
        with self._lock:
            reports = [
                self._waiting[index] for index in range(min(self._at_once, len(self._waiting)))
            ]
            dropped = self.dropped
        if not reports:
            return True
        body = {
            "source": self._source,
            "rank": self.rank,
            "host": self._host,
            "dropped": dropped,
            "reports": reports,
        }
        headers = {"Content-Type": "application/json", "User-Agent": "hp-tool reporter"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(  # noqa: S310
                f"{self.url}/steps", json.dumps(body).encode(), headers
            )
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:  # noqa: S310
                stored = int(json.load(response)["acknowledged"])
        except Exception as error:
            if getattr(error, "code", None) == 413:  # The service limits the message size.
                self._at_once = max(self._at_once // 2, 1)
            if not self._warned:
                print(f"hp-tool: steps wait for {self.url}: {error}", file=sys.stderr)
                self._warned = True
            return False
        self._warned = False
        with self._lock:
            while self._waiting and self._waiting[0]["seq"] <= stored:
                self._waiting.popleft()
        return True


class _Callback:
    """Accept every hook of a trainer and do nothing."""

    def __init__(self, reporter: Reporter | None = None) -> None:
        self.reporter = reporter or Reporter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class HuggingFaceCallback(_Callback):
    """Callback of transformers and TRL: `Trainer(..., callbacks=[HuggingFaceCallback()])`."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock at the first step."""
        if self.reporter._last is None:
            self.reporter.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report an optimizer step."""
        self.reporter.step(step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the queued steps."""
        self.reporter.close()


class LightningCallback(_Callback):
    """Callback for Lightning: `Trainer(..., callbacks=[LightningCallback()])`.

    Each reported step is an optimizer step, also with gradient accumulation.
    """

    state_key = "hp_tool.reporter"
    _global_step = 0

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Start the clock at the first batch."""
        if self.reporter._last is None:
            self.reporter.step()

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Report an optimizer step if the batch ended one."""
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.reporter.step(step=trainer.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Send the queued steps."""
        self.reporter.close()

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because checkpoints contain nothing of this callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state in a checkpoint."""
