"""Text of others' making: a job's log may hold anything, and what was stored of it must be readable
on both databases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.store import SqlStore


def test_a_log_with_nul_characters_hides_no_run(
    store: SqlStore, new_measurement: Callable[..., NewMeasurement]
) -> None:
    search = store.create_search(query={"id": "q"})
    claimed = store.claim_search(holder="test", lease_s=60, search_id=search.id)
    assert claimed is not None
    lease = claimed[1]
    new = new_measurement(status="crashed", step_s=None)
    new = replace(
        new,
        measurement=replace(new.measurement, cause="rank 1: \0\\u0000", log_tail="\0\x01 the end"),
    )
    for tensor in (1, 2):
        parallel = ParallelConfig(tensor_parallel_size=tensor)
        run = store.intend_run(
            lease=lease, parallel=parallel, fidelity=Fidelity(), predicted={"chosen_by": "\0"}
        )
        if tensor == 1:
            store.finish_run(lease=lease, run_id=run.id, measurement=new, gpu_seconds=1.0)
        else:
            store.abandon_run(lease=lease, run_id=run.id, cause="sbatch: \0")
    figures = store.run_figures(search_id=search.id)
    assert [each.cause for each in figures] == ["rank 1: \ufffd\\u0000", "sbatch: \ufffd"]
    assert [each.chosen_by for each in figures] == ["\ufffd"] * 2
    measurement = store.runs(search_id=search.id)[0].measurement
    assert measurement is not None
    assert measurement.log_tail == "\ufffd\x01 the end"
