"""The API's description: a change of its shape is seen, and the application does what it says."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from fastapi.testclient import TestClient
from schemathesis.config import SchemathesisConfig

from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.store import SqlStore
from service.app import create_app
from service.settings import Settings
from tests.service import (
    api_shape,
    schemathesis_hooks,  # noqa: F401  registers what it holds
)
from tests.service.processes import served

ROOT = Path(__file__).parents[2]
KEY = "the operator's"
HEADERS = {"Authorization": f"Bearer {KEY}"}
EXAMPLES = 2
"""Valid and as many invalid requests to each operation; the long test below sends thousands."""


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """The description by a process of its own: which schemas FastAPI splits into input and output
    depends on the models that a process described before.
    """
    command = [sys.executable, "-m", "service.describe"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_change_of_the_apis_shape_is_seen(described: dict[str, Any]) -> None:
    stored = json.loads(api_shape.FILE.read_text(encoding="utf-8"))
    now = api_shape.digests(described)
    changed = [name for name in sorted({**stored, **now}) if stored.get(name) != now.get(name)]
    assert not changed, f"the API's shape changed; if that is meant: {api_shape.RENEW}"


def test_words_may_change_but_no_path_schema_or_bound(described: dict[str, Any]) -> None:
    described = copy.deepcopy(described)
    before = api_shape.digests(described)
    described["paths"]["/v1/estimates"]["post"]["description"] = "Other words."
    assert api_shape.digests(described) == before
    described["components"]["schemas"]["TrainingWorkload-Input"]["properties"]["sequence_length"][
        "maximum"
    ] = 1
    del described["paths"]["/v1/audit"]
    after = api_shape.digests(described)
    changed = [name for name in before if before[name] != after.get(name)]
    assert changed == ["path /v1/audit", "schemas TrainingWorkload-Input"]


def unbounded(node: Any, *path: str) -> Iterator[str]:
    """The paths of numbers without a minimum or a maximum."""
    if (
        isinstance(node, dict)
        and node.get("type") in ("integer", "number")
        and not {"minimum", "maximum"} <= node.keys()
    ):
        yield ".".join(path)
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for name, child in children:
        yield from unbounded(child, *path, str(name))


def test_every_number_of_a_query_has_bounds(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    measured = (
        "Fidelity",
        "Hardware",
        "LoadLatencies",
        "Measurement",
        "Operation",
        "OperationTimes",
        "ServingTimes",
        "NewKey",
    )
    bodies = {name: body for name, body in schemas.items() if name.endswith("-Input")}
    asked = {
        name: body for name, body in bodies.items() if name.removesuffix("-Input") not in measured
    }
    assert {
        "Query-Input",
        "ParallelQuery-Input",
        "SizingQuery-Input",
        "ModelSpec-Input",
        "BudgetChange-Input",
    } <= asked.keys()
    assert not list(unbounded(asked))
    batch, several = asked["TrainingWorkload-Input"]["properties"]["global_batch_size"]["oneOf"]
    assert (batch["minimum"], batch["maximum"]) == (1, 1 << 31) and several["items"] == batch
    with pytest.raises(InputError, match="from 1 to 2,147,483,648, got 0"):
        schema.parse(TrainingWorkload, {"sequence_length": 1, "global_batch_size": 0})


def test_every_body_has_an_example_that_is_taken(
    http: TestClient, query: dict[str, Any], described: dict[str, Any]
) -> None:
    search = http.post("/v1/searches", json=query).json()["id"]
    told = {
        "query": query,
        "parallel": {"tensor_parallel_size": 2},
        "measurement": {"step_s": 0.25},
    }
    measured = http.post("/v1/measurements", json=told).json()["id"]
    watched = http.post("/v1/watches", json={}).json()["id"]
    sent = 0
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if "requestBody" not in operation or path.startswith(
                "/searches/"
            ):  # a page's form is not described
                continue
            ((media_type, content),) = operation["requestBody"]["content"].items()
            named = content["schema"].get("$ref", "").rpartition("/")[2]
            example = content.get("example") or described["components"]["schemas"][named]["example"]
            address = path.format(search_id=search, measurement_id=measured, watch_id=watched)
            if media_type == "multipart/form-data":
                sent_as: dict[str, Any] = {
                    "files": [("trace", each.encode()) for each in example["trace"]]
                }
            else:
                body = example if isinstance(example, str) else json.dumps(example)
                sent_as = {"content": body, "headers": {"Content-Type": media_type}}
            answer = http.request(method, address, **sent_as)
            assert answer.status_code < 300, (path, answer.text)
            assert '"status":"error"' not in answer.text.replace(" ", ""), (path, answer.text)
            sent += 1
    assert sent == 21


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/searches", "GET, POST"),
        ("/v1/models/x", "DELETE, GET"),
        ("/keys", "GET, POST"),
        ("/searches/x/export", "GET"),
        ("/healthz", "GET"),
    ],
)
def test_a_method_that_a_path_has_not_is_answered_with_those_it_has(
    shared_http: TestClient, path: str, methods: str
) -> None:
    answer = shared_http.put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.fixture
def operations(store: SqlStore) -> list[schemathesis.APIOperation]:
    """Every operation of a service over an empty database, behind a key."""
    bounds = {
        "max_body_bytes": 100_000,
        "poll_s": 0.01,
        "max_wait_s": 0.05,
        "wrong_keys_per_second": 1e4,
    }
    settings = Settings(api_key=KEY, allowed_hosts=("testserver",), **bounds)
    api = schemathesis.openapi.from_asgi(
        "/openapi.json",
        create_app(settings, store=store),
        headers=HEADERS,
        config=SchemathesisConfig.from_path(ROOT / "schemathesis.toml"),
    )
    return [found.ok() for found in api.get_all_operations()]


@pytest.mark.components
def test_every_operation_answers_what_it_declares(
    operations: list[schemathesis.APIOperation],
) -> None:
    assert len(operations) > 30
    for operation in operations:
        check(operation, schemathesis.GenerationMode.POSITIVE)
        if operation.path.startswith(
            "/v1/"
        ):  # pages pass over what they do not know in an address, as pages do
            check(operation, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.long
def test_schemathesis_finds_nothing(store: SqlStore, tmp_path: Path) -> None:
    """Its own command: every check, and the phases that the test above has no time for (examples,
    coverage, sequences).
    """
    settings = Settings(
        api_key=KEY, max_body_bytes=100_000, poll_s=0.05, max_wait_s=0.05, wrong_keys_per_second=1e4
    )
    with served(create_app(settings, store=store)) as url:
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{url}/openapi.json",
            "-H",
            f"Authorization: Bearer {KEY}",
        ]
        done = subprocess.run(
            [
                *command,
                "--generation-deterministic",
                "--max-examples",
                "10",
                "--suppress-health-check",
                "all",
                "--no-color",
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    for phase in ("Examples", "Coverage", "Fuzzing", "Stateful"):
        assert f"✅  {phase}" in done.stdout, done.stdout[-20_000:]


def check(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode) -> None:
    """Send generated requests to one operation and hold the answers against the description, by
    every check there is.
    """

    @hypothesis.given(case=operation.as_strategy(mode))
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    def test(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=HEADERS)

    with contextlib.suppress(
        hypothesis.errors.Unsatisfiable
    ):  # nothing invalid can be sent to what takes nothing
        test()
