"""Report the step times of a training to a server and compare them with the prediction.

    python examples/report_from_training.py --server http://127.0.0.1:8000

This command runs a toy training against a server (`hp-tool serve`; set HP_API_KEY if the server
requires a key). For your own training, copy `Watch` and call `step_done()` after each optimizer
step on one rank.
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
    """Compare the step times of a training with their prediction, and report them to a server."""

    def __init__(
        self,
        *,
        client: Client,
        query: Mapping[str, Any],
        parallel: Mapping[str, Any],
        warmup_steps: int = 3,
        every: int = 20,
    ) -> None:
        """Ask the server for the prediction.

        Args:
            client: Client of the server.
            query: Model, cluster and batch of the training, as for an estimate.
            parallel: Configuration of the training.
            warmup_steps: Number of first steps to ignore.
            every: Number of steps between two reports of the median step time.
        """
        self._client, self._query, self._parallel = client, dict(query), dict(parallel)
        self._warmup, self._every = warmup_steps, every
        self._times: list[float] = []
        self._last = time.perf_counter()
        self.predicted_s = self.low_s = self.high_s = 0.0
        self._missing_reason = self._request_prediction()

    def _request_prediction(self) -> str:
        """Set the predicted step time. Return an empty text, or the reason if there is none.

        A training must not fail because the server is unreachable.
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
        """Record the time of a step. Call this function after every step.

        Return a comparison of step time and prediction after each report, else None.
        """
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        counted = len(self._times) - self._warmup
        if counted <= 0 or counted % self._every:
            return None
        step_s = statistics.median(self._times[self._warmup :][-self._every :])
        message = self._comparison(step_s)
        try:
            self._report(step_s)
        except HpToolError as error:
            message += f" (not reported: {error.message})"
        self._last = time.perf_counter()  # The time of the report does not count as step time.
        return message

    def _comparison(self, step_s: float) -> str:
        if self._missing_reason:
            self._missing_reason = self._request_prediction()
        if self._missing_reason:
            return f"step {step_s:.4g} s, no prediction: {self._missing_reason}"
        if step_s > self.high_s:
            comparison = (
                f"slower than predicted by {step_s / self.predicted_s - 1:.0%}: check for a slow "
                "host, a busy network, or slow data loading"
            )
        elif step_s < self.low_s:
            comparison = f"faster than predicted by {1 - step_s / self.predicted_s:.0%}"
        else:
            comparison = "as predicted"
        return (
            f"step {step_s:.4g} s, {comparison} ({self.predicted_s:.4g} s, {self.low_s:.4g} to "
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
    """Run a toy training with an additional delay of `slow_down_s` per step, and return the
    messages of the watch.
    """
    weights = np.random.default_rng(0).normal(size=(64, 64))
    messages = []
    with Client(server=server) as client:
        watch = Watch(client=client, query=QUERY, parallel={"tensor_parallel_size": 1}, every=5)
        for _ in range(steps):
            weights -= 1e-3 * (
                weights @ weights.T @ weights - weights
            )  # toward an orthogonal matrix
            time.sleep(slow_down_s)
            if (message := watch.step_done()) is not None:
                messages.append(message)
    return messages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=23)
    arguments = parser.parse_args()
    print("\n".join(train(server=arguments.server, steps=arguments.steps)))
