"""Clocks that can be set: libfaketime's, by what a file says. Imported before whatever takes
`time.sleep` for itself.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

FILE = "FAKETIME_TIMESTAMP_FILE"
if (
    FILE in os.environ
):  # libfaketime 0.9.10 fails under time.sleep, which sleeps until an absolute time
    time.sleep = lambda seconds: select.select((), (), (), seconds) and None


def environment(file: Path) -> dict[str, str]:
    """Of a process whose clock, and that of all it starts, is ahead by what `file` says; empty
    where libfaketime is missing.
    """
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    file.write_text("+0")
    fake = {FILE: str(file), "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    return {**os.environ, **fake, "LD_PRELOAD": str(libraries[0])} if libraries else {}
