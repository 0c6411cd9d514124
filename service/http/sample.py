"""A finished sample search that everybody may see: published runs of an 8B model on 64 H100."""

import json
from functools import cache
from pathlib import Path

from hp_tool.store.sample import open_sample
from hp_tool.store.sql import SqlStore

SAMPLE = "sample"
"""ID of the sample search."""
READING = frozenset({"runs", "list_runs", "run_figures", "get_run", "events"})
"""Store methods that read the sample."""
RECORDED = Path(__file__).with_name("sample.json")


@cache
def sample_store() -> SqlStore:
    """Return a store that contains only the sample search."""
    return open_sample(json.loads(RECORDED.read_text(encoding="utf-8")))
