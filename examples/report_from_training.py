"""A training asks what to expect of its steps, reports what they took, and hears when they stray:
paste `Watch`.

python examples/report_from_training.py --server http://127.0.0.1:8000

runs a toy training against a server (`hp-tool serve`; HP_API_KEY where it asks for a key). In a
real one, `step_done()` stands after the optimizer's step, on one rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hp_tool.errors import HpToolError
from service.client import Client


class Watch:
    """Holds a training's step time against its prediction."""

    def __init__(
        self,
        *,
        client: Client,
        query: Mapping[str, Any],
        parallel: Mapping[str, Any],
        warmup_steps: int = 3,
        every: int = 20,
    ) -> None:
        """`query`: the model, cluster and batch, as for an estimate; `parallel`: the one
        configuration that trains.

        Every `every` steps after the first `warmup_steps` their median is reported, once more with
        each new one.
        """
        self._client, self._query, self._parallel = client, dict(query), dict(parallel)
        self._warmup, self._every = warmup_steps, every
        self._times: list[float] = []
        self._last = time.perf_counter()
        self.predicted_s = self.low_s = self.high_s = 0.0
        self._unknown = self._ask()

    def _ask(self) -> str:
        """What to expect; why that is not known, where it is not: a training does not end because a
        service is away.
        """
        try:
            answer = self._client.estimate(query={**self._query, "parallel": self._parallel})
        except HpToolError as error:
            return error.message
        estimate = answer.get("calibrated_estimate") or answer["estimate"]
        if estimate["time"] is None:
            return str(estimate["reasons"][0]["message"])
        self.predicted_s = estimate["time"]["step_s"]
        interval = (estimate.get("intervals") or {}).get("step_s")
        self.low_s, self.high_s = interval or (0.8 * self.predicted_s, 1.25 * self.predicted_s)
        return ""

    def step_done(self) -> str | None:
        """Call after every step. What there is to say after a report: how the steps stand to their
        prediction.
        """
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        counted = len(self._times) - self._warmup
        if counted <= 0 or counted % self._every:
            return None
        step_s = statistics.median(self._times[self._warmup :][-self._every :])
        told = self._verdict(step_s)
        try:
            self._report(step_s)
        except HpToolError as error:
            told += f" (not reported: {error.message})"
        self._last = time.perf_counter()  # the report's own time is no step's
        return told

    def _verdict(self, step_s: float) -> str:
        if self._unknown and (still := self._ask()):
            return f"step {step_s:.4g} s, no prediction: {still}"
        self._unknown = ""
        if step_s > self.high_s:
            word = (
                f"slower than predicted by {step_s / self.predicted_s - 1:.0%}: look for a slow "
                "host, a busy network, or input"
            )
        elif step_s < self.low_s:
            word = f"faster than predicted by {1 - step_s / self.predicted_s:.0%}"
        else:
            word = "as predicted"
        return (
            f"step {step_s:.4g} s, {word} ({self.predicted_s:.4g} s, {self.low_s:.4g} to "
            f"{self.high_s:.4g})"
        )

    def _report(self, step_s: float) -> None:
        measurement = {"status": "ok", "step_s": step_s}
        self._client.report_measurement(
            report={"query": self._query, "parallel": self._parallel, "measurement": measurement}
        )


QUERY: dict[str, Any] = {
    "kind": "training",
    "model": {
        "name": "toy",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 256,
    },
    "cluster": {"gpu": "cpu", "num_gpus": 1},
    "training": {"sequence_length": 64, "global_batch_size": 4, "precision": "fp32"},
}


def train(*, server: str, steps: int, slow_down_s: float = 0.0) -> list[str]:
    """A toy training of so many steps, each `slow_down_s` longer than it need be; what the watch
    said.
    """
    weights = np.random.default_rng(0).normal(size=(64, 64))
    told = []
    with Client(server=server) as client:
        watch = Watch(client=client, query=QUERY, parallel={"tensor_parallel_size": 1}, every=5)
        for _ in range(steps):
            weights -= 1e-3 * (
                weights @ weights.T @ weights - weights
            )  # towards an orthogonal matrix
            time.sleep(slow_down_s)
            if (word := watch.step_done()) is not None:
                told.append(word)
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=23)
    asked = parser.parse_args()
    print("\n".join(train(server=asked.server, steps=asked.steps)))
