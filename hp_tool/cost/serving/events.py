"""Event simulation of one scheduler with continuous batching, chunked prefill and preemption.

Between two events (an arrival, the end of a prompt or a last token) only the cache grows, by one
token per sequence and pass. With B sequences, K cached tokens and c = cached_token_s, n such passes
take

    n (base(B) + c K) + c B n (n - 1) / 2

seconds. The simulation therefore needs only a few events per request, regardless of the number of
tokens. The front end is a separate server that handles requests in order of arrival while the
device works.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np

from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.serving.passes import PassTable

SETTLED = 600
"""Number of passes over which SGLang lowers its reserved fraction from the initial to the final
value (new_token_ratio_decay_steps).
"""
AHEAD = 20
"""Number of future passes for which SGLang frees room when its cache is full
(retract_decode_steps).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Times and lengths of n simulated requests, shape (n,), in seconds since the start of the
    simulation.
    """

    arrival_s: FloatArray
    first_token_s: FloatArray
    finish_s: FloatArray
    output_tokens: IntArray
    preemptions: int
    """Number of preemptions of requests because of a full cache. The tokens of a preempted request
    are computed again.
    """

    @property
    def ttft_s(self) -> FloatArray:
        return self.first_token_s - self.arrival_s

    @property
    def request_latency_s(self) -> FloatArray:
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> FloatArray:
        """Return the seconds per output token after the first; 0 for a single output token."""
        seconds: FloatArray = (self.finish_s - self.first_token_s) / np.maximum(
            self.output_tokens - 1, 1
        )
        return seconds


def simulate_requests(
    *,
    table: PassTable,
    input_tokens: IntArray,
    output_tokens: IntArray,
    arrival_s: FloatArray | None = None,
    concurrency: int | None = None,
    think_s: float = 0.0,
    cached_tokens: IntArray | None = None,
) -> Served:
    """Simulate requests that arrive at the given times, or a closed load of `concurrency` requests.
    In a closed load, a new request starts `think_s` after another one ends.

    Arrival times are in ascending order. `cached_tokens` tokens of each prompt are in the prefix
    cache. A request that is larger than the cache is served nevertheless.
    """
    cached = (
        np.zeros_like(input_tokens)
        if cached_tokens is None
        else np.minimum(cached_tokens, input_tokens - 1)
    )
    run = _Scheduler(table, input_tokens, output_tokens, cached)
    run.begin(arrival_s, concurrency, think_s)
    while run.served < len(input_tokens):
        run.enter()
        run.admit()
        run.step()
    return Served(
        arrival_s=np.array(run.arrival),
        first_token_s=np.array(run.first),
        finish_s=np.array(run.finish),
        output_tokens=output_tokens,
        preemptions=run.preemptions,
    )


class _Scheduler:
    """State of the simulation. Requests are identified by their list index."""

    def __init__(
        self, table: PassTable, inputs: IntArray, outputs: IntArray, cached: IntArray
    ) -> None:
        self.table = table
        self.prompt: list[int] = inputs.tolist()
        """Tokens that prefill must put into the cache. After a preemption, they include the tokens
        generated before it.
        """
        self.done: list[int] = cached.tolist()
        """Number of `prompt` tokens that are already in the cache."""
        self.left: list[int] = outputs.tolist()
        """Number of tokens still to be generated."""
        self.outputs = tuple(self.left)
        self.first = [math.nan] * len(self.prompt)
        self.finish = [math.nan] * len(self.prompt)
        self.now = self.front = 0.0  # time until which the front end is busy
        self.passes = self.served = self.preemptions = 0
        self.cached = 0  # tokens that decoding sequences attend to
        self.used = 0  # tokens in the cache, including prompts being computed and states
        self.promised = 0  # the same, if all answers had their full length
        # fraction of the difference that is kept free for running requests
        self.share = table.promised[0]
        # (time at which the request leaves the front end, request)
        self.entering: deque[tuple[float, int]] = deque()
        self.waiting: deque[int] = deque()
        self.prefilling: deque[int] = deque()
        self.decoding: dict[int, int] = {}  # pass of the last token, by request, oldest first
        self.ends: list[tuple[int, int]] = []  # the same as a heap, including preempted requests
        self.rows: dict[int, list[float]] = {}
        self.places: list[float] = table.prompt.tolist()

    def begin(self, arrival_s: FloatArray | None, concurrency: int | None, think_s: float) -> None:
        n = len(self.prompt)
        self.think_s = think_s
        self.arrival = [0.0] * n if arrival_s is None else arrival_s.tolist()
        self.issued = n if arrival_s is not None else min(concurrency or n, n)
        # ascending, therefore a heap
        self.coming = [(self.arrival[i], i) for i in range(self.issued)]

    def enter(self) -> None:
        """Process arrivals in the front end, one at a time."""
        while self.coming and self.coming[0][0] <= self.now:
            at, request = heapq.heappop(self.coming)
            self.front = max(self.front, at) + self.table.request_s
            self.entering.append((self.front + self.table.first_token_s, request))
        while self.entering and self.entering[0][0] <= self.now:
            self.waiting.append(self.entering.popleft()[1])

    def admit(self) -> None:
        """Admit waiting requests while a slot is free, and the cache has room for the prompt and
        for the next pass or the reservation.
        """
        table = self.table
        while self.waiting and len(self.decoding) + len(self.prefilling) < table.max_num_seqs:
            request = self.waiting[0]
            prompt, left = self.prompt[request], self.left[request]
            coming = (
                self.share * (self.promised - self.used) + left
                if self.share
                else len(self.decoding)
            )
            taken = prompt + table.state_tokens
            if self.used + taken + coming > table.cache_tokens and (
                self.decoding or self.prefilling
            ):
                return
            self.prefilling.append(self.waiting.popleft())
            self.used += taken
            self.promised += taken + left

    def step(self) -> None:
        """Run passes until the next event. If there is nothing to run, wait for the event."""
        if self.prefilling:
            self._prefill()
        elif self.decoding:
            self._decode()
        else:
            self.now, self.share = self._next_arrival(), self.table.promised[0]

    def _prefill(self) -> None:
        """Run one pass with as many prompt tokens as its limit allows. Unless the schedule is
        prefill_first, the pass also decodes.
        """
        table = self.table
        beside = 0 if table.prefill_first else len(self.decoding)
        space, tokens, keys = max(table.max_num_batched_tokens - beside, 1), 0, 0.0
        ended: list[int] = []
        while self.prefilling and space > 0:
            request = self.prefilling[0]
            take = min(self.prompt[request] - self.done[request], space)
            keys += take * (self.done[request] + 0.5 * take)
            self.done[request] += take
            tokens, space = tokens + take, space - take
            if self.done[request] < self.prompt[request]:
                break
            ended.append(self.prefilling.popleft())
        seconds = (
            self._base_seconds(beside, tokens) + table.key_s * keys + table.prompt_s * len(ended)
        )
        self._advance(seconds, sequences=beside, count=1, firsts=len(ended))
        for request in ended:
            self._first_token(request)
        self._make_room()

    def _decode(self) -> None:
        """Run decode-only passes until a request ends or arrives, or the cache is full."""
        table, sequences = self.table, len(self.decoding)
        while self.decoding.get(self.ends[0][1]) != self.ends[0][0]:
            heapq.heappop(self.ends)  # preempted in the meantime
        count = self.ends[0][0] - self.passes
        if self.share < 1.0:
            count = min(count, int((table.cache_tokens - self.used) // sequences))
        if self.waiting and self.share > table.promised[1]:
            count = min(count, AHEAD)
        base, growth = self._base_seconds(sequences, 0), 0.5 * table.cached_token_s * sequences
        wait = self._next_arrival() - self.now
        if wait < math.inf:
            linear = base + table.cached_token_s * self.cached - growth
            root = math.sqrt(linear * linear + 4.0 * growth * wait)
            count = min(count, math.ceil(2.0 * wait / (linear + root)))
        count = max(count, 1)
        self._advance(
            count * base + growth * count * (count - 1), sequences=sequences, count=count, firsts=0
        )
        self._make_room()

    def _advance(self, seconds: float, *, sequences: int, count: int, firsts: int) -> None:
        """Advance by `count` passes in which `sequences` requests decode, and remove the requests
        that end.
        """
        table = self.table
        streamed = (sequences * count + firsts) * table.stream_s
        if sequences:
            seconds += table.cached_token_s * self.cached * count
            self.passes += count
            self.share = max(
                self.share - count * (table.promised[0] - table.promised[1]) / SETTLED,
                table.promised[1],
            )
            self.cached += sequences * count
            self.used += sequences * count
        self.now += seconds
        if streamed:
            self.front = max(
                self.front + streamed, self.now + (sequences + firsts) * table.stream_s
            )
        while self.ends and self.ends[0][0] <= self.passes:
            last, request = heapq.heappop(self.ends)
            if self.decoding.get(request) == last:
                del self.decoding[request]
                self.cached -= self.prompt[request] + self.left[request]
                self._finish(request, self.prompt[request] + self.left[request])

    def _first_token(self, request: int) -> None:
        if math.isnan(self.first[request]):
            self.first[request] = max(self.now, self.front)
        prompt, left = self.prompt[request] + 1, self.left[request] - 1
        self.prompt[request], self.left[request] = prompt, left
        self.used += 1
        if left == 0:
            self._finish(request, prompt)
            return
        self.cached += prompt
        self.decoding[request] = self.passes + left
        heapq.heappush(self.ends, (self.passes + left, request))

    def _finish(self, request: int, tokens: int) -> None:
        """Finish a request. In a closed load, the next request then arrives."""
        self.finish[request] = max(self.now, self.front)
        self.served += 1
        self.used -= tokens + self.table.state_tokens
        self.promised -= tokens + self.table.state_tokens
        if self.issued < len(self.prompt):
            self.arrival[self.issued] = self.finish[request] + self.think_s
            heapq.heappush(self.coming, (self.arrival[self.issued], self.issued))
            self.issued += 1

    def _make_room(self) -> None:
        """If the next pass would exceed the cache, preempt the youngest requests and put them at
        the head of the queue.

        Their tokens are computed again. From then on, SGLang reserves the fraction of the output
        that its running requests have generated so far.
        """
        cache, last_share = self.table.cache_tokens, self.table.promised[1]
        if self.used + len(self.decoding) <= cache or last_share == 1.0:
            return
        ahead = AHEAD if last_share else 1
        while len(self.decoding) > 1 and self.used + ahead * len(self.decoding) > cache:
            request, last = self.decoding.popitem()
            left = last - self.passes
            tokens = self.prompt[request] + self.left[request] - left
            self.cached -= tokens
            self.used -= tokens + self.table.state_tokens
            self.promised -= tokens + self.table.state_tokens + left
            self.prompt[request], self.left[request], self.done[request] = tokens, left, 0
            self.waiting.appendleft(request)
            self.preemptions += 1
        if last_share:
            to_come = sum(self.decoding.values()) - self.passes * len(self.decoding)
            whole = sum(self.outputs[request] for request in self.decoding)
            self.share = min((whole - to_come + ahead * len(self.decoding)) / whole, 1.0)

    def _next_arrival(self) -> float:
        coming = self.coming[0][0] if self.coming else math.inf
        return min(coming, self.entering[0][0]) if self.entering else coming

    def _base_seconds(self, decoding: int, prompt: int) -> float:
        """Return the time in seconds of a pass excluding attention to cached tokens, interpolated
        linearly in the table.
        """
        row = self.rows.get(decoding)
        if row is None:
            row = self.rows[decoding] = self.table.row(decoding)
        if prompt == 0:
            return row[0]
        at = bisect_left(self.places, prompt, 1)
        low, high = self.places[at - 1], self.places[at]
        return row[at - 1] + (row[at] - row[at - 1]) * (prompt - low) / (high - low)
