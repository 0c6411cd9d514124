"""Measure when each page of the dashboard is first painted in Chromium.

`python -m benchmarks.service.first_paint [--json]` reports medians of three visits with an empty
cache, with a store that contains data of every kind, and the processor time of the server and of
the page's thread, which does not depend on the load of the machine. It also measures the first page
of a new `hp-tool serve` that has warmed up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from fastapi.testclient import TestClient
from playwright.sync_api import Browser, sync_playwright

from benchmarks.service.pages import CHROMIUM, FIRST_PAINT, QUIET
from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.service.conftest import SMALL
from tests.service.every_page import seeded_pages
from tests.service.processes import api_process, served

VISITS = 3
WARM_S = 2.0
"""Seconds of inactivity after which the server has warmed up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_store(f"sqlite:///{folder}/hp.sqlite3")) as store,
    ):
        app = create_app(Settings(), store=store)
        with TestClient(app, base_url="http://127.0.0.1:8000") as http:
            pages = seeded_pages(store, http, SMALL)
        with served(app) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
            report = {name: _painted(browser, url + path) for name, path in pages.items()}
            with api_process(database_url=f"sqlite:///{folder}/hp.sqlite3", home=Path(folder)) as (
                new,
                process,
            ):
                report["the first of a process"] = _first(
                    browser, new, processor_s=lambda: sum(process.cpu_times()[:2])
                )
            browser.close()
    if arguments.json:
        print(json.dumps(report))
        return
    for name, each in sorted(report.items(), key=lambda item: -item[1]["ms"]):
        print(f"{each['ms']:6.0f} ms, processor {each['processor_ms']:4.0f} ms  {name}")


def _painted(
    browser: Browser,
    address: str,
    *,
    visits: int = VISITS,
    processor_s: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Return the median milliseconds until the first paint and of processor time. `processor_s`
    returns the server's processor time.
    """
    measured = [_visit(browser, address, processor_s) for _ in range(visits)]
    return dict(
        zip(
            ("ms", "processor_ms"), map(statistics.median, zip(*measured, strict=True)), strict=True
        )
    )


def _visit(browser: Browser, address: str, processor_s: Callable[[], float]) -> tuple[float, float]:
    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    before_s = processor_s()
    page.goto(address, wait_until="commit")
    painted_ms = page.evaluate(FIRST_PAINT)
    metrics = {
        metric["name"]: metric["value"]
        for metric in devtools.send("Performance.getMetrics")["metrics"]
    }
    server_s = processor_s() - before_s
    page.context.close()
    return painted_ms, 1e3 * (server_s + metrics["TaskDuration"])


def _first(browser: Browser, address: str, *, processor_s: Callable[[], float]) -> dict[str, float]:
    """Return the time that a new server needs to show its front page after it has warmed up."""
    _wait_until_idle(processor_s)
    return _painted(browser, address, visits=1, processor_s=processor_s)


def _wait_until_idle(processor_s: Callable[[], float]) -> None:
    """Return when the server used less than WARM_S / 20 of processor time within WARM_S."""
    busy_s = WARM_S
    while busy_s > 0.05 * WARM_S:
        before_s = processor_s()
        time.sleep(WARM_S)
        busy_s = processor_s() - before_s


if __name__ == "__main__":
    main()
