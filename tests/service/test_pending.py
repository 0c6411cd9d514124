"""A job that waits for devices is shown as waiting, with the engine's reason, wherever its search
is.
"""

from __future__ import annotations

from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.questions import schema
from tests.service.conftest import SMALL as QUERY

PENDING = {"runs": 1, "reason": "Resources", "starts_at": "2026-11-23T04:00:00"}


def test_a_search_whose_job_waits_says_why_and_what_waiting_took(
    http: TestClient, store: Store
) -> None:
    search = store.create_search(query=schema.to_dict(schema.parse_query(QUERY)))
    claimed = store.claim_search(holder="w", lease_s=60.0)
    assert claimed is not None
    lease = claimed[1]
    store.set_progress(
        lease=lease, progress={"profile_runs": 0, "pending": PENDING, "queue_s": 7200.0}
    )
    page = http.get(f"/searches/{search.id}.json").json()
    assert page["pending"] == "1 run: Resources, expected to start at 2026-11-23T04:00:00"
    html = http.get(f"/searches/{search.id}").text
    assert "Waiting for devices: 1 run: Resources, expected to start at 2026-11-23T04:00:00" in html
    assert "Time in queue" in html
    assert http.get(f"/v1/searches/{search.id}").json()["progress"]["pending"] == PENDING


def test_a_run_that_was_given_up_keeps_its_account_and_its_log(
    http: TestClient, store: Store
) -> None:
    search = store.create_search(query=schema.to_dict(schema.parse_query(QUERY)))
    claimed = store.claim_search(holder="w", lease_s=60.0)
    assert claimed is not None
    lease = claimed[1]
    run = store.intend_run(
        lease=lease, parallel=ParallelConfig(), fidelity=Fidelity(), predicted={"step_s": 1.0}
    )
    account = {"queue_s": 3600.0, "wall_s": 4.0, "hosts": ["n7"], "log_tail": "the node went away"}
    store.abandon_run(
        lease=lease, run_id=run.id, cause="NODE_FAIL", gpu_seconds=32.0, account=account
    )  # type: ignore[arg-type]
    (trial,) = http.get(f"/v1/searches/{search.id}/trials").json()["trials"]
    assert (trial["cause"], trial["gpu_seconds"], trial["account"]) == ("NODE_FAIL", 32.0, account)
    assert http.get(f"/searches/{search.id}/logs/{run.id}").text == "the node went away"
