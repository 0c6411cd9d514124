"""How long the explorer's charts take to follow a slider, in a real Chromium: from the input event to the frame that shows it.

python -m benchmarks.service.explorer [--moves N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from playwright.sync_api import Page, sync_playwright

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings
from tests.service.processes import served

CHROMIUM = "/usr/bin/chromium"
SLIDERS = ("tp", "pp", "cp", "mbs", "recompute", "sequence_length")
TARGET_MS = 100.0
MOVE = """async ([name, place]) => {
  const range = document.querySelector(`select[name=${name}]`).previousElementSibling;
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
    given = parser.parse_args()
    with _server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"{url}/explorer")
        milliseconds = sorted(moves(page, number=given.moves))
        size = len(page.request.get(page.url).body())
        browser.close()
    found = {
        "moves": len(milliseconds),
        "median_ms": statistics.median(milliseconds),
        "p90_ms": milliseconds[int(0.9 * len(milliseconds))],
        "slowest_ms": milliseconds[-1],
        "within_100_ms": sum(each <= TARGET_MS for each in milliseconds) / len(milliseconds),
        "page_bytes": size,
    }
    if given.json:
        print(json.dumps(found))
        return
    print(
        f"{found['moves']} moves: median {found['median_ms']:.0f} ms, 90 % within {found['p90_ms']:.0f} ms, slowest "
        f"{found['slowest_ms']:.0f} ms; {found['within_100_ms']:.0%} within {TARGET_MS:.0f} ms; "
        f"the page has {size / 1e3:.0f} kB"
    )


def moves(page: Page, *, number: int) -> Iterator[float]:
    """Milliseconds of each move, slider by slider, from one end to the other and back."""
    for k in range(number):
        name = SLIDERS[k % len(SLIDERS)]
        place = (k // len(SLIDERS)) % 4 / 4
        yield page.evaluate(MOVE, [name, place])
        page.wait_for_timeout(50)


@contextmanager
def _server() -> Iterator[str]:
    """URL of a service over an empty store, in a thread of this process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(open_store(f"sqlite:///{folder}/hp.sqlite3")) as store,
        served(create_app(Settings(), store=store)) as url,
    ):
        yield url


if __name__ == "__main__":
    main()
