"""The finished search that everybody may look at: examples/quickstart.yaml, as it once ran on a
processor with two cores.
"""

import json
from functools import cache
from pathlib import Path

from hp_tool.store.sample import open_sample
from hp_tool.store.sql import SqlStore

SAMPLE = "sample"
"""The sample search's id."""
READING = frozenset({"runs", "list_runs", "run_figures", "get_run", "events"})
"""Methods of a store that read the sample; none changes it."""
RECORDED = Path(__file__).with_name("sample.json")


@cache
def sample_store() -> SqlStore:
    """A store that has this one search."""
    return open_sample(json.loads(RECORDED.read_text(encoding="utf-8")))
