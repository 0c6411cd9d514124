"""Send generated valid and invalid requests to every operation of the API.

`python -m benchmarks.service.fuzz [--requests 50000] [--seed 0]` checks that no answer is a 5xx,
and that none takes more than 2 s of processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import hypothesis
import schemathesis
from schemathesis.config import SchemathesisConfig

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.service import schemathesis_hooks  # noqa: F401  registers what it holds

ROOT = Path(__file__).parents[2]
HEADERS = {"Authorization": "Bearer the-operator"}
LIMIT_S = 2.0


class Tally:
    """Numbers of answers by status, faults as text, and processor time of the slowest request."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self.slowest_s = 0.0
        self.operations = 0

    def send(
        self,
        operation: schemathesis.APIOperation,
        mode: schemathesis.GenerationMode,
        *,
        number: int,
        seed: int,
    ) -> None:
        """Send generated requests to one operation."""

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=number,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(mode))
        def each(case: schemathesis.Case) -> None:
            began = time.process_time()
            answer = case.call(headers=HEADERS)
            took = time.process_time() - began
            self.statuses[answer.status_code] += 1
            self.slowest_s = max(self.slowest_s, took)
            if answer.status_code >= 500 or took > LIMIT_S:
                self.faults.append(
                    f"{answer.status_code} after {took:.1f} s: {case.as_curl_command()[:2000]}"
                )
                sys.stderr.write(self.faults[-1] + "\n")

        # An operation without parameters has no invalid requests.
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):
            each()


def fuzz(
    *, requests: int, seed: int, seconds: float = math.inf, at_once: int | None = None
) -> Tally:
    """Send about `requests` generated requests, in rounds over all operations, for at most
    `seconds`.

    `at_once` is the number of requests that an operation gets in each round; None for as many as a
    single round needs.
    """
    tally = Tally()
    ending = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/fuzz.sqlite3")
        hosts = ("testserver",)
        settings = Settings(
            api_key="the-operator",
            allowed_hosts=hosts,
            max_body_bytes=100_000,
            poll_s=0.01,
            max_wait_s=0.05,
        )
        config = SchemathesisConfig.from_path(ROOT / "schemathesis.toml")
        app = create_app(settings, store=store)
        api = schemathesis.openapi.from_asgi("/openapi.json", app, headers=HEADERS, config=config)
        operations = [each.ok() for each in api.get_all_operations()]
        tally.operations = len(operations)
        modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
        # In an order of the seed's, so that a run that ends early does not always leave out the
        # same ones.
        turns = random.Random(seed).sample(operations, len(operations))
        # An operation with few parameters has few different requests.
        while (left := requests - sum(tally.statuses.values())) > 0:
            number = at_once or -(-left // (len(operations) * len(modes)))
            for operation in turns:
                for mode in modes:
                    if time.monotonic() > ending:
                        store.close()
                        return tally
                    tally.send(operation, mode, number=number, seed=seed)
                sys.stderr.write(
                    f"{sum(tally.statuses.values())} requests, {len(tally.faults)} faults\n"
                )
            seed += 1
        store.close()
    return tally


def main() -> None:
    """Exit with 1 if a request had a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tally = fuzz(requests=arguments.requests, seed=arguments.seed)
    print("\n".join(tally.faults))
    print(
        f"{sum(tally.statuses.values())} requests to {tally.operations} operations: "
        f"{dict(tally.statuses.most_common())}"
    )
    print(f"{len(tally.faults)} faults; the slowest took {tally.slowest_s:.2f} s of processor time")
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
