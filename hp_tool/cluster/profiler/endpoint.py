"""Load generator for OpenAI's completions API: closed loop, Poisson arrivals, or a trace.

The process starts in the job folder. It reads the URL from endpoint.json and the API key from the
environment. Prompts are random, so that no prefix cache contains them. The exception is the shared
prefix that the load defines as cached.

A closed-loop load keeps the requested number of requests in flight. Requests beyond `max_num_seqs`
wait in this process, and their time to first token includes the wait. Responses are counted in the
order in which they end, `num_requests` per repetition. The first repetitions are warm-up, and the
load continues until the last repetition has ended.
"""

import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hp_tool.cluster.profiler.__main__ import failure_path, read_request, write_measurement
from hp_tool.cluster.profiler.support import check_serving
from hp_tool.domain.measurement import Hardware, Measurement, ServingTimes, Tail, Tails
from hp_tool.domain.requests import InferenceRequest
from hp_tool.errors import HpToolError

_KEY = "HP_ENDPOINT_API_KEY"
_VOCABULARY = 10_000
"""Range from which token ids are drawn. Ids above it may have a special meaning."""
_WORDS = (
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
)
_LENGTH_TOLERANCE, _LENGTH_SLACK = 0.05, 2
"""Relative and absolute tolerance of the server's prompt token count. Words have varying token
counts, and a server may add a token.
"""
_BACKLOG = 64
"""If more requests wait than those of ten repetitions plus this number, the request rate of an
open-loop load is too high.
"""
_CAUSE_CHARACTERS, _TAIL_CHARACTERS = 500, 4096


class EndpointError(Exception):
    """The server's responses cannot be used for a measurement."""


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request, in seconds of the monotonic clock."""

    ttft_s: float
    """Seconds from the request's arrival to its first token. The arrival may precede the sending.
    """
    tpot_s: float
    latency_s: float
    ended_s: float
    tokens: int


class Endpoint:
    """The server under test."""

    def __init__(
        self, client: httpx.AsyncClient, request: InferenceRequest, *, where: dict[str, Any]
    ) -> None:
        self._client, self._request, self._where = client, request, where
        self._random = random.Random(request.seed)
        self._model: str | None = where["model"]
        self._words_per_token = 1.0
        self._requests = itertools.cycle(_requests(request))
        self._shared: list[Any] = []
        """Tokens of the common prefix of all prompts, which the prefix cache contains."""

    async def prepare(self) -> dict[str, str]:
        """Look up the model name, measure the tokens per word, and return the server's versions."""
        if self._model is None:
            listed = await self._client.get("models")
            if listed.status_code != 200 or not listed.json().get("data"):
                raise EndpointError(
                    f"HTTP {listed.status_code} when listing models: {listed.text[:200]}"
                )
            self._model = str(listed.json()["data"][0]["id"])
        if self._where["prompts"] == "text":
            length = self._request.inference.input_length
            usage, _ = await self._tokens(self._prompt(length, cached=0), max_tokens=1)
            self._words_per_token = length / max(usage["prompt_tokens"], 1)
        versions = {"python": platform.python_version()}
        # This route is vLLM's; other servers may not have it.
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            response = await self._client.get(self._client.base_url.copy_with(path="/version"))
            versions[self._request.inference.engine] = str(response.json()["version"])[:100]
        return versions

    async def answers(self, total: int) -> list[RequestTimes]:
        """Return the first `total` responses, in the order in which they ended."""
        ended: list[RequestTimes] = []
        enough = asyncio.Event()
        parallel, load = self._request.parallel, self._request.inference
        users, rate = load.concurrency, load.request_rate_per_second
        slots = asyncio.Semaphore(parallel.max_num_seqs * parallel.data_parallel_size)
        waiting = 0

        async def send_request(arrived: float) -> None:
            nonlocal waiting
            waiting += 1
            async with slots:
                waiting -= 1
                ended.append(await self._answer(arrived))
            if len(ended) >= total:
                enough.set()

        async def run_user() -> None:
            while True:
                await send_request(time.monotonic())

        async def run_load() -> None:
            async with asyncio.TaskGroup() as group:
                if isinstance(users, int):
                    for _ in range(users):
                        group.create_task(run_user())
                    return
                assert isinstance(rate, int | float)  # A search has only one rate.
                for arrival in self._arrivals(rate):
                    if waiting > 10 * self._request.num_requests + _BACKLOG:
                        break
                    await asyncio.sleep(max(arrival - time.monotonic(), 0.0))
                    group.create_task(send_request(arrival))
                raise EndpointError(
                    f"{waiting} requests are waiting: the server cannot sustain {rate:g} per second"
                )

        sending, done = asyncio.create_task(run_load()), asyncio.create_task(enough.wait())
        await asyncio.wait({sending, done}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sending, done):
            task.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as group:
            if len(ended) < total:
                raise next(
                    each
                    for each in group.exceptions
                    if not isinstance(each, asyncio.CancelledError)
                ) from None
        return ended[:total]

    def _arrivals(self, rate: float) -> Iterator[float]:
        trace, start = self._request.trace, time.monotonic()
        times = None if trace is None else trace.arrival_s
        while True:
            for at in times or (self._random.expovariate(rate),):
                yield start + at
            start += (times[-1] + 1.0 / rate) if times else at

    async def _answer(self, arrived: float) -> RequestTimes:
        inputs, outputs, cached = next(self._requests)
        usage, at = await self._tokens(self._prompt(inputs, cached=cached), max_tokens=outputs)
        for name, length, slack in (
            ("prompt_tokens", inputs, max(_LENGTH_SLACK, _LENGTH_TOLERANCE * inputs)),
            ("completion_tokens", outputs, 0),
        ):
            if abs(usage[name] - length) > slack:
                raise EndpointError(
                    f"the server counts {usage[name]} {name}, not {length} as requested. Check "
                    "`prompts` and `body` of its entry"
                )
        following = max(outputs - 1, 1)
        return RequestTimes(
            ttft_s=at[0] - arrived,
            tpot_s=(at[-1] - at[0]) / following,
            latency_s=at[-1] - arrived,
            ended_s=at[-1],
            tokens=outputs,
        )

    def _prompt(self, length: int, *, cached: int) -> list[int] | str:
        """Return a prompt of `length` tokens.

        Its first `cached` tokens are the same in all prompts.
        """
        text = self._where["prompts"] == "text"
        each: Sequence[Any] = (
            _WORDS if text else range(min(self._request.model.vocab_size, _VOCABULARY))
        )
        if text:
            length, cached = (round(tokens * self._words_per_token) for tokens in (length, cached))
        if cached > len(self._shared):
            self._shared += self._random.choices(each, k=cached - len(self._shared))
        prompt = self._shared[:cached] + self._random.choices(each, k=max(length - cached, 1))
        return " ".join(prompt) if text else prompt

    async def _tokens(
        self, prompt: list[int] | str, *, max_tokens: int
    ) -> tuple[dict[str, int], list[float]]:
        """Return the server's token counts, and the arrival times of the events that contain text.

        Raises:
            EndpointError: The response is not a stream of completions.
        """
        fields = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        usage: dict[str, int] = {}
        at: list[float] = []
        body = fields | {"stream_options": {"include_usage": True}} | self._where["body"]
        async with self._client.stream("POST", "completions", json=body) as response:
            if response.status_code != 200:
                raise EndpointError(
                    f"HTTP {response.status_code}: "
                    f"{(await response.aread())[:200].decode(errors='replace')}"
                )
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EndpointError(f"the server reports {event['error']}")
                if event.get("choices"):
                    at.append(time.monotonic())
                usage = event.get("usage") or usage
                if len(at) > 4 * max_tokens + _BACKLOG:
                    raise EndpointError(
                        f"the server sent more than the {max_tokens} requested tokens"
                    )
        if not at or not {"prompt_tokens", "completion_tokens"} <= usage.keys():
            raise EndpointError(
                "a response contains no tokens, or no token counts (stream_options.include_usage)"
            )
        return usage, at


def _requests(request: InferenceRequest) -> list[tuple[int, int, int]]:
    load, trace = request.inference, request.trace
    if trace is None:
        return [
            (
                load.input_length,
                load.output_length,
                int(load.prefix_cache_hit_rate * load.input_length),
            )
        ]
    # The search has already drawn the requests.
    assert isinstance(trace.input_tokens, tuple) and isinstance(trace.output_tokens, tuple)
    shared = trace.prefix_tokens or (0,) * len(trace.input_tokens)
    return list(zip(trace.input_tokens, trace.output_tokens, shared, strict=True))


def serving_times(
    answers: list[RequestTimes], request: InferenceRequest, *, started_s: float
) -> ServingTimes:
    """Summarize the responses after warm-up.

    TTFT and TPOT are means per repetition, whose median is reported. Quantiles cover all requests,
    and the rate counts all output tokens.
    """
    n = request.num_requests
    warm, later = answers[: request.warmup * n], answers[request.warmup * n :]
    measured = [later[first : first + n] for first in range(0, len(later), n)]
    began_s = max((each.ended_s for each in warm), default=started_s)
    seconds = max(each.ended_s for each in later) - began_s
    ttft = tuple(statistics.fmean(each.ttft_s for each in repetition) for repetition in measured)
    several = [
        [each.tpot_s for each in repetition if each.tokens > 1] or [0.0] for repetition in measured
    ]
    tpot = tuple(statistics.fmean(repetition) for repetition in several)
    rate = sum(each.tokens for each in later) / max(seconds, 1e-9)
    tails = Tails(
        ttft_s=Tail.from_values([each.ttft_s for each in later]),
        tpot_s=Tail.from_values([each.tpot_s for each in later if each.tokens > 1] or [0.0]),
        request_latency_s=Tail.from_values([each.latency_s for each in later]),
    )
    return ServingTimes.from_repetitions(
        ttft_s=ttft, tpot_s=tpot, output_tokens_per_second=rate, runner="endpoint", tails=tails
    )


async def measure(
    request: InferenceRequest, *, where: dict[str, Any], key: str | None
) -> Measurement:
    """Run the load and return its times. Raise EndpointError or httpx.HTTPError on failure."""
    started = time.monotonic()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=where["url"],
        headers=headers,
        limits=limits,
        timeout=request.timeout_s,
        trust_env=False,
    ) as client:
        server = Endpoint(client, request, where=where)
        versions = await server.prepare()
        loaded = time.monotonic()
        answers = await server.answers(
            (request.warmup + request.repetitions) * request.num_requests
        )
    return Measurement(
        status="ok",
        serving=serving_times(answers, request, started_s=loaded),
        hardware=Hardware(
            gpu=request.gpu, num_gpus=request.num_gpus, hosts=tuple(where["hosts"]), declared=True
        ),
        versions=versions,
        wall_s=time.monotonic() - started,
    )


def main(folder: Path) -> int:
    """Run the request in a job folder.

    Return 0 if the result was written, 1 if a failure was reported.
    """
    request, where = (
        read_request(folder / "request.json"),
        json.loads((folder / "endpoint.json").read_text()),
    )
    assert isinstance(request, InferenceRequest)
    key = os.environ.pop(_KEY, None)
    try:
        check_serving(request)
        measurement = asyncio.run(measure(request, where=where, key=key))
    except (EndpointError, httpx.HTTPError, HpToolError, ValueError) as error:
        is_unreachable = isinstance(error, httpx.ConnectError)  # independent of the configuration
        texts = (f"{where['url']}: {type(error).__name__}: {error}", traceback.format_exc())
        # A server may repeat the API key in an error, so remove it.
        cause, tail = (text.replace(key, "***") if key else text for text in texts)
        print(tail, file=sys.stderr)
        report = Measurement(
            status="preempted" if is_unreachable else "crashed",
            cause=cause[:_CAUSE_CHARACTERS],
            log_tail=tail[-_TAIL_CHARACTERS:],
        )
        write_measurement(failure_path(folder / "result.json", rank=0), report)
        return 1
    write_measurement(folder / "result.json", measurement)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
