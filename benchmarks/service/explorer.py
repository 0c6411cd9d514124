"""How long the explorer's charts take to follow a slider, in a real Chromium: from the input event to the frame that shows it.

python -m benchmarks.service.explorer [--moves N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from playwright.sync_api import Page, sync_playwright

from hp_tool.store import open_store
from service.app import create_app
from service.settings import Settings

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
    """A service over an empty store, in a thread: its process is the browser's peer, not its rival."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'hp.sqlite3'}")
        config = uvicorn.Config(create_app(Settings(), store=store), host="127.0.0.1", port=0, log_level="warning")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
        running.should_exit = True
        thread.join()
        store.close()


if __name__ == "__main__":
    main()
