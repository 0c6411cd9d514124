"""Measure the page of a search with very many trials in Chromium.

`python -m benchmarks.service.pages [--trials N] [--json]` measures the first paint, the time until
the table has its rows and the chart below it is drawn, how long the table and the visible charts
need to follow each filter and each order, and the size of the page. It also reports processor time,
which does not depend on the load of the machine: of server and page for the rows, and of the page's
thread for filters. The server runs in a separate process with a SQLite file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

from benchmarks.service.seeding import seed_search
from hp_tool.store import schema
from tests.service.faults.processes import Service

CHROMIUM = "/usr/bin/chromium"
QUIET = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-sandbox"),
)
TIMEOUT_MS = 60_000
FIRST_PAINT = """async () => {
    while (!performance.getEntriesByName('first-contentful-paint').length) await new Promise((next) => setTimeout(next, 20));
    return performance.getEntriesByName('first-contentful-paint')[0].startTime;
}"""  # noqa: E501
ROWS = """async () => {
    while (!document.querySelector('#trials[data-drawn]')) await new Promise((next) => setTimeout(next, 5));
    return performance.now();
}"""  # noqa: E501
WEIGHT = """() => [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')].map(
    (entry) => [new URL(entry.name).pathname.split('/').pop() || 'page', entry.transferSize, entry.decodedBodySize])"""  # noqa: E501
FILTERED = """([name, value]) => new Promise((resolve) => {
    const root = document.querySelector('#trials');
    const select = root.querySelector(`select[name="${name}"]`);
    const started = performance.now();
    const done = () => requestAnimationFrame(() => { watch.disconnect(); resolve(performance.now() - started); });
    const watch = new MutationObserver(done);
    watch.observe(root, { attributes: true, attributeFilter: ['data-drawn'] });
    select.value = value;
    select.dispatchEvent(new Event('change'));
})"""  # noqa: E501
SORTED = """(column) => new Promise((resolve) => {
    const started = performance.now();
    document.querySelector(`#trials th[data-column="${column}"] button`).click();
    requestAnimationFrame(() => resolve(performance.now() - started));
})"""
COLUMNS = (
    "() => [...document.querySelectorAll('#trials th[data-column]')].map((head) => "
    "head.dataset.column)"
)
CHOICES = """() => [...document.querySelectorAll('#trials [data-part=filter] select')].flatMap(
    (select) => [...select.options].slice(1).map((option) => [select.name, option.value]))"""


def measure(*, trials: int, repeat: int) -> dict[str, Any]:
    """Return medians of `repeat` visits with an empty cache, and the time of every filter."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/pages.sqlite3"
        schema.upgrade(url)
        search = seed_search(url=url, trials=trials)
        service = Service(database_url=url, home=Path(folder), lease_s=30.0)
        service.start_api()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
                visits = []
                for _ in range(repeat):
                    page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
                    page.set_default_timeout(TIMEOUT_MS)
                    server = psutil.Process(service.api.pid if service.api else None)
                    visits.append(_visit(page, f"{service.url}/searches/{search}", server=server))
                filters = _filters(page)
                sorts = [
                    page.evaluate(SORTED, column)
                    for column in page.evaluate(COLUMNS)
                    for _ in ("up", "down")
                ]
                browser.close()
        finally:
            service.stop()
    return {
        "trials": trials,
        "first_paint_ms": statistics.median(visit["first_paint_ms"] for visit in visits),
        "rows_ms": statistics.median(visit["rows_ms"] for visit in visits),
        "rows_processor_ms": statistics.median(visit["rows_processor_ms"] for visit in visits),
        "all_drawn_ms": statistics.median(visit["all_drawn_ms"] for visit in visits),
        "weight": visits[-1]["weight"],
        "filters": filters,
        "filter_ms": _spread([each["ms"] for each in filters]),
        "sort_ms": _spread(sorts),
        "filter_cpu_ms": _spread([each["cpu_ms"] for each in filters]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "worst": max(values)}


def _visit(page: Page, url: str, *, server: psutil.Process) -> dict[str, Any]:
    page_ms, before_s = _processor_ms(page), sum(server.cpu_times()[:2])
    page.goto(url)
    first_paint_ms = page.evaluate(FIRST_PAINT)
    rows_ms = page.evaluate(ROWS)
    rows_processor_ms = page_ms() + 1e3 * (sum(server.cpu_times()[:2]) - before_s)
    # Charts are drawn when they become visible.
    page.locator("#trials .charts").first.evaluate("(element) => element.scrollIntoView()")
    page.locator("#trials .plot > svg").first.wait_for()
    return {
        "first_paint_ms": first_paint_ms,
        "rows_ms": rows_ms,
        "rows_processor_ms": rows_processor_ms,
        "all_drawn_ms": page.evaluate("performance.now()"),
        "weight": [
            {"file": f, "sent_bytes": sent, "bytes": size}
            for f, sent, size in page.evaluate(WEIGHT)
        ],
    }


def _processor_ms(page: Page) -> Callable[[], float]:
    """Return a function that returns the processor time of the page's thread in milliseconds."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("Performance.enable", {"timeDomain": "threadTicks"})

    def processor_ms() -> float:
        metrics = {
            metric["name"]: metric["value"]
            for metric in cdp.send("Performance.getMetrics")["metrics"]
        }
        return 1e3 * float(metrics["TaskDuration"])

    return processor_ms


def _filters(page: Page) -> list[dict[str, Any]]:
    cpu_ms = _processor_ms(page)
    times = []
    for name, value in page.evaluate(CHOICES):
        for chosen in (value, ""):
            before = cpu_ms()
            ms = page.evaluate(FILTERED, [name, chosen])
            times.append(
                {"filter": name, "value": chosen or "any", "ms": ms, "cpu_ms": cpu_ms() - before}
            )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure(trials=arguments.trials, repeat=arguments.repeat)
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"{report['trials']:,} trials: first paint {report['first_paint_ms']:.0f} ms, rows after "
        f"{report['rows_ms']:.0f} ms "
        f"({report['rows_processor_ms']:.0f} ms of processors), a chart after "
        f"{report['all_drawn_ms']:.0f} ms"
    )
    for name, of in (("filter_ms", "wall"), ("filter_cpu_ms", "processor")):
        print(
            f"filters: median {report[name]['median']:.0f} ms, slowest {report[name]['worst']:.0f} "
            f"ms ({of})"
        )
    print(
        f"sorts: median {report['sort_ms']['median']:.0f} ms, slowest "
        f"{report['sort_ms']['worst']:.0f} ms (wall)"
    )
    for file in sorted(report["weight"], key=lambda each: -each["sent_bytes"]):
        print(
            f"{file['sent_bytes'] / 1e3:10,.0f} kB sent {file['bytes'] / 1e3:10,.0f} kB  "
            f"{file['file']}"
        )


if __name__ == "__main__":
    main()
