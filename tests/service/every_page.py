"""Every page of the dashboard over a store that has something to show, some of it written by
someone who means no good.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from hp_tool.domain.measurement import Fidelity, Measurement
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.states import SearchState
from hp_tool.errors import HpToolError
from hp_tool.loop.search.underway import Underway
from hp_tool.loop.tuning import tune
from service.dashboard.new_search_form import to_values
from service.dashboard.page import address
from service.dashboard.pages import MODULES
from service.dashboard.presets import QUICKSTART_HREF
from tests.service.coordinator import claim, finish, one_run
from tests.service.detailed import DETAILED
from tests.tuning.serving_engine import ServingEngine
from tests.tuning.test_serving_search import query as serving_query

EVIL = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
LLAMA: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 8192, "global_batch_size": 512, "total_tokens": 1e12},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "precision": "fp8",
    },
    "parallel": {"tensor_parallel_size": 4},
}
ALONE = {"at.parallel.tensor_parallel_size": "1", "at.parallel.pipeline_parallel_size": "1"}
RENTED = {"cluster.node_type": "priced", "cluster.gpu": "h100-sxm-80gb"}
RENT = {
    "model": "llama-3.1-8b",
    **RENTED,
    "cluster.num_gpus": "8, 16",
    "training.sequence_length": "4096",
    "training.global_batch_size": "64",
    "training.total_tokens": "1e10",
    "constraints.max_days": "9",
    "parallel.pipeline_parallel_size": "1",
}
DONE = Measurement(
    status="ok", step_s=0.4, tokens_per_second_per_gpu=1280.0, peak_memory_bytes=3 << 30
)
OTHER = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, recompute="selective")


def seeded_pages(store: Store, http: TestClient, query: dict[str, Any]) -> dict[str, str]:
    """Fill the store; every page by a name, and the address at which it shows something."""
    own = query["model"] | {"name": EVIL}
    running = _search(store, http, query, ended=False)
    ended = _search(store, http, query | {"model": own, "id": "named"}, ended=True)
    failed, cancelled, live = (
        _failed(store, http, query),
        _cancelled(store, http, query),
        _live(store, http, query),
    )
    waiting = _submitted(http, query)
    series = _calibration(store, http)
    http.post("/v1/models", json={"name": "mine", "spec": query["model"] | {"name": "mine"}})
    http.post("/v1/keys", json={"owner": EVIL[:60], "scope": "read"})
    pipeline = LLAMA | {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}}
    alone = LLAMA | {"parallel": {"tensor_parallel_size": 1}}
    hurried = SERVING | {"targets": {"tpot_s": 0.008}}
    served = tune(
        query=serving_query(search={"budget_runs": 6}),
        store=store,
        launcher=ServingEngine(num_gpus=2),
    ).search.id
    first, second = (run.id for run in store.runs(search_id=ended))
    evil = query | {"model": own}
    detailed = _asked("/configurations", query=DETAILED["rack"])
    return {
        "ask": "/",
        "searches": "/searches",
        "new-search": "/searches/new",
        "new-search-example": QUICKSTART_HREF,
        "new-search-detailed": address("/searches/new", to_values(DETAILED["rack"])),
        "search-running": f"/searches/{running}",
        "search-ended": f"/searches/{ended}",
        "search-failed": f"/searches/{failed}",
        "search-cancelled": f"/searches/{cancelled}",
        "search-live": f"/searches/{live}",
        "search-queued": f"/searches/{waiting}",
        "search-serving": f"/searches/{served}",
        "runs": f"/searches/{ended}/runs",
        "run-of-a-search": f"/searches/{ended}/runs/{first}",
        "compare-runs": address(
            "/compare", {"more": [f"/searches/{ended}/runs/{run}" for run in (first, second)]}
        ),
        "configuration": _asked("/configurations", query=pipeline),
        "configuration-too-large": _asked("/configurations", query=alone),
        "configuration-serving": _asked("/configurations", query=SERVING),
        "configuration-serving-too-slow": _asked("/configurations", query=hurried),
        "configuration-named": _asked("/configurations", query=evil),
        "run": _asked("/run", query=pipeline),
        "compare-a-run": f"/compare?{urlencode({'first': f'/searches/{ended}/runs/{first}', 'second': json.dumps(query)})}",  # noqa: E501
        "compare": _asked("/compare", first=alone, second=pipeline),
        "compare-choices": "/compare",
        "find": "/find?q=llama",
        "explain": "/explain",
        "explorer": "/explorer",
        "explorer-detailed": str(http.get(detailed.replace("?", ".json?")).json()["explorer_href"]),
        "explorer-serving": "/explorer?kind=inference",
        "explorer-serving-too-slow": "/explorer?kind=inference&targets.tpot_s=0.001",
        "machines": address("/explorer", RENT),
        "machines-out-of-reach": address("/explorer", RENT | {"constraints.max_cost": "5"}),
        "machines-serving": address("/explorer", RENTED | {"kind": "inference"}),
        "explorer-too-large": address("/explorer", ALONE),
        "calibration": "/calibration",
        "calibration-series": series,
        "measurements": "/measurements",
        "models": "/models",
        "model": "/models/llama-3-70b",
        "gpus": "/gpus",
        "gpu": "/gpus/h100-sxm-80gb",
        "clusters": "/clusters",
        "cluster": "/clusters/dgx-h100",
        "watches": "/watches",
        "watch": f"/watches/{_watch(http)}?lost_nodes=1",
        "workers": "/workers",
        "sample": "/searches/sample",
        "keys": "/keys",
        "guide": "/guide",
        "guide-page": "/guide/calibration",
        "audit": "/audit",
    }


def html_routes() -> list[APIRoute]:
    """Every route of the dashboard that answers a GET with a page."""
    routes = [
        route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)
    ]
    return [route for route in routes if "GET" in route.methods and _is_html(route)]


def without_a_page(pages: dict[str, str]) -> list[str]:
    """Routes that no page of the list reaches."""
    addresses = [address.partition("?")[0] for address in pages.values()]
    return [
        route.path
        for route in html_routes()
        if not any(re.fullmatch(route.path_regex, address) for address in addresses)
    ]


def _is_html(route: APIRoute) -> bool:
    kind = getattr(route.response_class, "value", route.response_class)
    return isinstance(kind, type) and issubclass(kind, HTMLResponse)


def _asked(path: str, **queries: dict[str, Any]) -> str:
    return f"{path}?{urlencode({name: json.dumps(query) for name, query in queries.items()})}"


def _search(store: Store, http: TestClient, query: dict[str, Any], *, ended: bool) -> str:
    search = _submitted(http, query)
    lease = claim(store, search)
    one_run(store, lease, DONE)
    one_run(store, lease, Measurement(status="crashed", cause=EVIL, log_tail=EVIL), OTHER)
    if ended:
        finish(store, lease)
    return search


def _failed(store: Store, http: TestClient, query: dict[str, Any]) -> str:
    """A search whose only run was cut off by its limit."""
    lease = claim(
        store, _submitted(http, query | {"search": query["search"] | {"run_timeout_s": 3.0}})
    )
    one_run(
        store,
        lease,
        Measurement(status="timeout", cause="not done after 3 s"),
        predicted={"step_s": 3.8},
    )
    message = "no profile run succeeded (1 timeout); the last: not done after 3 s"
    error = HpToolError(message, code="all_runs_failed").as_dict()
    store.finish_search(
        lease=lease, state=SearchState.FAILED, stopped_because="all_runs_failed", error=error
    )
    return lease.search_id


def _cancelled(store: Store, http: TestClient, query: dict[str, Any]) -> str:
    lease = claim(store, _submitted(http, query))
    one_run(store, lease, DONE)
    store.request_cancel(search_id=lease.search_id)
    store.finish_search(lease=lease, state=SearchState.CANCELLED, stopped_because="cancelled")
    return lease.search_id


def _live(store: Store, http: TestClient, query: dict[str, Any]) -> str:
    """A search with a run that measures its steps."""
    lease = claim(store, _submitted(http, query))
    one_run(store, lease, DONE)
    run = store.intend_run(
        lease=lease, parallel=OTHER, fidelity=Fidelity(), predicted={"chosen_by": "coverage"}
    )
    store.mark_submitted(lease=lease, run_id=run.id, handle="43")
    seen = Underway(
        phase="steps", warmup_steps=2, steps=1, step_s=60.0, log_tail=f"{EVIL}\nhp-tool step 3"
    )
    progress = store.get_search(search_id=lease.search_id).progress
    store.set_progress(lease=lease, progress=progress | {"underway": {run.id: asdict(seen)}})
    return lease.search_id


def _submitted(http: TestClient, query: dict[str, Any]) -> str:
    search: str = http.post("/v1/searches", json=query).json()["id"]
    return search


def _watch(http: TestClient) -> str:
    """A job that became slower; its id."""
    query = LLAMA | {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4}}
    watch: str = http.post("/v1/watches", json={"name": EVIL, "query": query}).json()["id"]
    reports = [{"seq": n, "step_s": 30.0 + 0.01 * (n % 7) + 9.0 * (n > 100)} for n in range(1, 161)]
    http.post(
        f"/v1/watches/{watch}/steps", json={"source": EVIL[:60], "host": EVIL, "reports": reports}
    )
    return watch


def _calibration(store: Store, http: TestClient) -> str:
    """A series with runs 30% slower than predicted and one that stands out; the address of its
    page.
    """
    for slower, stages, micro_batch in (
        (1.3, 2, 1),
        (1.25, 4, 1),
        (1.35, 8, 1),
        (1.3, 2, 2),
        (4.0, 4, 2),
    ):
        parallel = {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": stages,
            "micro_batch_size": micro_batch,
        }
        step_s = http.post("/v1/estimates", json=LLAMA | {"parallel": parallel}).json()["estimate"][
            "time"
        ]["step_s"]
        measurement = {"status": "ok", "step_s": slower * step_s}
        http.post(
            "/v1/measurements",
            json={"query": LLAMA, "parallel": parallel, "measurement": measurement},
        )
    slow = {"query": LLAMA, "parallel": parallel, "measurement": {"step_s": 25.0 * step_s}}
    assert http.post("/v1/measurements", json=slow).json()["state"] == "held"
    http.post("/v1/calibrations", params={"gpu": "h100-sxm-80gb"})
    store.add_measurement(
        measurement=NewMeasurement(
            source="file",
            cluster_key=EVIL,
            gpu=EVIL,
            framework=EVIL,
            model=EVIL,
            query={},
            parallel=ParallelConfig(),
            measurement=Measurement(status="crashed", cause=EVIL),
        )
    )
    href: str = http.get("/calibration.json").json()["series"][0]["href"]
    return href
