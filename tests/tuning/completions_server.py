"""A small server with OpenAI's completions API, as a process of its own: `python
completions_server.py PORT`.

It generates greedily with a tiny recurrent network, all running requests in one step. It wants a
key, which it repeats if it is the wrong one; `x-fault` in a request's body lets it miscount.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "sk-of-the-test"
VOCABULARY, WIDTH, SLOTS = 512, 128, 4
RNG = np.random.default_rng(0)
EMBEDDING = RNG.normal(size=(VOCABULARY, WIDTH)) / WIDTH**0.5
RECURRENCE = RNG.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5


class Engine:
    """Continuous batching of at most SLOTS requests; the others wait."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[np.ndarray, int, asyncio.Queue[int | None]]] = (
            asyncio.Queue()
        )
        self.most_at_once = self.unfinished = 0
        self.seen: list[tuple[int, int, list[int]]] = []
        """(prompt tokens, answer tokens, the prompt's first four) of every request."""

    async def run(self) -> None:
        running: list[list[Any]] = []
        while True:
            while len(running) < SLOTS and (not running or not self.waiting.empty()):
                state, tokens, answer = await self.waiting.get()
                running.append([state, tokens, answer])
            states = np.tanh(np.stack([each[0] for each in running]) @ RECURRENCE)
            tokens = (states @ EMBEDDING.T).argmax(axis=1)
            for each, state, token in zip(running, states, tokens, strict=True):
                each[0], each[1] = state + EMBEDDING[token], each[1] - 1
                each[2].put_nowait(int(token))
                if each[1] == 0:
                    each[2].put_nowait(None)
            running = [each for each in running if each[1] > 0]
            await asyncio.sleep(0.002)


ENGINE = Engine()


async def completions(request: Request) -> Response:
    body = await request.json()
    if request.headers.get("authorization") != f"Bearer {KEY}":
        return JSONResponse(
            {"error": f"unknown key {request.headers.get('authorization')}"}, status_code=401
        )
    prompt, length = body["prompt"], body["max_tokens"]
    prompt = (
        [hash(word) % VOCABULARY for word in prompt.split() for _ in "12"]
        if isinstance(prompt, str)
        else prompt
    )
    ENGINE.seen.append((len(prompt), length, prompt[:4]))
    ENGINE.unfinished += 1
    ENGINE.most_at_once = max(ENGINE.most_at_once, ENGINE.unfinished)
    answer: asyncio.Queue[int | None] = asyncio.Queue()
    ENGINE.waiting.put_nowait((EMBEDDING[prompt].sum(axis=0), length, answer))

    async def events() -> AsyncIterator[str]:
        told = 0
        try:
            while (token := await answer.get()) is not None:
                told += 1
                yield f"data: {json.dumps({'choices': [{'text': f'w{token}'}]})}\n\n"
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": told - (body.get("x-fault") == "short"),
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        finally:
            ENGINE.unfinished -= 1

    return StreamingResponse(events(), media_type="text/event-stream")


async def models(request: Request) -> Response:
    if "reset" in request.query_params:
        ENGINE.most_at_once = 0
        ENGINE.seen.clear()
    return JSONResponse(
        {"data": [{"id": "tiny", "most_at_once": ENGINE.most_at_once, "seen": ENGINE.seen}]}
    )


async def version(request: Request) -> Response:
    return JSONResponse({"version": "0.0.7"})


async def main(port: int) -> None:
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/version", version),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning")
    asyncio.create_task(ENGINE.run())  # noqa: RUF006 - lives as long as the loop
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
