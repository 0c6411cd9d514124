"""The comparison of a search with measuring everything, on an engine in memory whose truth is the
cost model's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.search.local import QUERY, compare
from hp_tool.questions import schema
from tests.tuning.cpu_engine import CpuEngine


@pytest.mark.long
def test_the_whole_space_is_measured_and_the_search_is_judged_by_it():
    query = schema.parse_query(QUERY.read_text())
    query = replace(query, parallel=replace(query.parallel, micro_batch_size=(1, 2, 4, 8)))
    found = compare(query, candidates=1000, launcher=CpuEngine(num_gpus=2))
    assert found["candidates"] >= 30
    assert found["grid"]["runs"] == found["grid"]["worked"] == found["candidates"]
    assert 1 <= found["search"]["runs"] <= query.search.budget_runs
    assert found["search"]["step_s"] >= found["grid"]["best_step_s"]
    assert 0.0 <= found["regret"] < 0.1
