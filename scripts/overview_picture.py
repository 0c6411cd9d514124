"""Draw README's picture of an answer, as `--plot` shows it.

`python scripts/overview_picture.py` needs Chromium and the development dependencies.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "llama-3-70b-on-64-h100.svg"
COMMAND = (
    "recommend --model llama-3-70b --gpu h100-sxm-80gb --num-gpus 64 --sequence-length 8192 "
    "--global-batch-size 128 --plot"
)
CHROMIUM = "/usr/bin/chromium"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        answer = Path(folder) / "answer.html"
        hp_tool = Path(sys.executable).with_name("hp-tool")
        subprocess.run([hp_tool, *COMMAND.split(), answer], check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        page = browser.new_page()
        page.goto(answer.as_uri())
        size = "{format: 'svg', width: 1300, height: 590}"
        drawn = page.evaluate(
            f"() => Plotly.toImage(document.querySelector('.js-plotly-plot'), {size})"
        )
        browser.close()
    PICTURE.write_text(unquote(drawn.partition(",")[2]), encoding="utf-8")


if __name__ == "__main__":
    main()
