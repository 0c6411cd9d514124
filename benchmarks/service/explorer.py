"""Measure how long the explorer's charts need to follow a slider in Chromium.

`python -m benchmarks.service.explorer [--moves N] [--json]` measures the time from the input event
to the frame that shows it, and the processor time of server and page, which does not depend on the
load of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from playwright.sync_api import Page, sync_playwright

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.service.processes import served

CHROMIUM = "/usr/bin/chromium"
SLIDERS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "recompute",
)
TARGET_MS = 150.0
MOVE = """async ([name, place]) => {
  const range = document.querySelector(`select[name='at.parallel.${name}']`).previousElementSibling;
  const charts = document.querySelector("[data-part=figures]");
  const followed = new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      observer.disconnect();
      requestAnimationFrame(() => resolve(performance.now()));
    });
    observer.observe(charts, { childList: true });
  });
  const start = performance.now();
  range.value = Math.round(place * range.max);
  range.dispatchEvent(new Event("input", { bubbles: true }));
  return (await followed) - start;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with _server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto(f"{url}/explorer")
        measured = list(moves(page, number=arguments.moves))
        milliseconds, processor = (sorted(times) for times in zip(*measured, strict=True))
        size = len(page.request.get(page.url).body())
        browser.close()
    report = {
        "moves": len(milliseconds),
        "median_ms": statistics.median(milliseconds),
        "p95_ms": milliseconds[int(0.95 * len(milliseconds))],
        "slowest_ms": milliseconds[-1],
        "processor_median_ms": statistics.median(processor),
        "processor_p95_ms": processor[int(0.95 * len(processor))],
        "within_target": sum(each <= TARGET_MS for each in milliseconds) / len(milliseconds),
        "page_bytes": size,
    }
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"{report['moves']} moves: median {report['median_ms']:.0f} ms, 95 % within "
        f"{report['p95_ms']:.0f} ms, slowest "
        f"{report['slowest_ms']:.0f} ms; {report['within_target']:.0%} within {TARGET_MS:.0f} ms; "
        "processor time median "
        f"{report['processor_median_ms']:.0f} ms, 95 % within {report['processor_p95_ms']:.0f} ms; "
        f"the page has {size / 1e3:.0f} kB"
    )


def moves(page: Page, *, number: int) -> Iterator[tuple[float, float]]:
    """Return the milliseconds of each move of each slider, on the clock and of processor time."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def processor_ms() -> float:
        metrics = {
            metric["name"]: metric["value"]
            for metric in devtools.send("Performance.getMetrics")["metrics"]
        }
        return 1e3 * (time.process_time() + float(metrics["TaskDuration"]))

    for k in range(number):
        name = SLIDERS[k % len(SLIDERS)]
        place = (k // len(SLIDERS)) % 4 / 4
        before = processor_ms()
        milliseconds = page.evaluate(MOVE, [name, place])
        yield milliseconds, processor_ms() - before
        page.locator(".findings:not([aria-busy=true])").wait_for()


@contextmanager
def _server() -> Iterator[str]:
    """Return the URL of a service with an empty store, in a thread of this process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_store(f"sqlite:///{folder}/hp.sqlite3")) as store,
        served(create_app(Settings(), store=store)) as url,
    ):
        yield url


if __name__ == "__main__":
    main()
