"""When each page of the dashboard is first painted, in a real Chromium: `python -m benchmarks.service.first_paint [--json]`.

The median of three visits with an empty cache, over a store that has something of everything; and the processor time of the
server and of the page's own thread, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing

from fastapi.testclient import TestClient
from playwright.sync_api import Browser, sync_playwright

from benchmarks.service.pages import CHROMIUM, FIRST_PAINT, QUIET
from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.service.conftest import SMALL
from tests.service.every_page import seeded_pages
from tests.service.processes import served

VISITS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, closing(open_store(f"sqlite:///{folder}/hp.sqlite3")) as store:
        app = create_app(Settings(), store=store)
        with TestClient(app, base_url="http://127.0.0.1:8000") as http:
            pages = seeded_pages(store, http, SMALL)
        with served(app) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
            report = {
                name: dict(zip(("ms", "processor_ms"), _painted(browser, url + path), strict=True))
                for name, path in pages.items()
            }
            browser.close()
    if arguments.json:
        print(json.dumps(report))
        return
    for name, each in sorted(report.items(), key=lambda item: -item[1]["ms"]):
        print(f"{each['ms']:6.0f} ms, processor {each['processor_ms']:4.0f} ms  {name}")


def _painted(browser: Browser, address: str) -> Iterator[float]:
    """Medians: milliseconds until something is painted, and of processors."""
    visits = []
    for _ in range(VISITS):
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        before_s = time.process_time()
        page.goto(address, wait_until="commit")
        painted_ms = page.evaluate(FIRST_PAINT)
        metrics = {metric["name"]: metric["value"] for metric in devtools.send("Performance.getMetrics")["metrics"]}
        visits.append((painted_ms, 1e3 * (time.process_time() - before_s + metrics["TaskDuration"])))
        page.context.close()
    return map(statistics.median, zip(*visits, strict=True))


if __name__ == "__main__":
    main()
