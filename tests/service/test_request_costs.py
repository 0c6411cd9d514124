"""No request costs more than it may, whatever it holds: by the processor time of the service as a
process of its own.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import psutil
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from hp_tool.domain.access import Scope
from hp_tool.errors import InputError
from hp_tool.store import SqlStore
from service import keys
from service.api.bodies import read_body
from service.app import create_app
from service.settings import Settings, from_environment
from tests.service.processes import api_process, served, wait_for

pytestmark = pytest.mark.components

CHEAP_S = 2.0
"""Processor seconds that no refusal takes."""
TRAINING: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 2048, "global_batch_size": 720_720},
}
SERVING: dict[str, Any] = {
    "kind": "inference",
    "model": "llama-3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "inference": {"input_length": 1024, "output_length": 256, "concurrency": 64},
}
MANY = list(range(1, 129))
LONGEST = TRAINING | {"parallel": {"micro_batch_size": list(range(1, 120_001))}}
WIDE = TRAINING | {
    "parallel": {
        "micro_batch_size": MANY,
        "virtual_pipeline_parallel_size": MANY,
        "data_parallel_shard_size": MANY[:32],
    }
}
ENDLESS = TRAINING | {
    "objective": "min_gpus",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1 << 20},
    "constraints": {"memory_headroom_fraction": 0.99},
    "parallel": {
        "tensor_parallel_size": MANY,
        "micro_batch_size": MANY[:16],
        "zero_stage": [1, 2, 3],
    },
}
"""Fits on no number of devices, and there are thousands of them."""
NESTED = "\n".join(f"A{i}=" + f"$A{i + 1}" * 100 for i in range(14)) + "\nA14=x\n--num-layers $A0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service and the process that it is."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def costs_little(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer; AssertionError where it took the service more than CHEAP_S."""
        before_s = self.cpu_s()
        answer = httpx.request(method, self.url + path, timeout=120, **options)
        assert self.cpu_s() - before_s < CHEAP_S, path
        return answer


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that allows a processor second."""
    home = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HP_MAX_CPU_SECONDS_PER_REQUEST", "1")
        with api_process(database_url=f"sqlite:///{home / 'hp.sqlite3'}", home=home) as (
            url,
            process,
        ):
            httpx.post(
                f"{url}/v1/recommendations", json=TRAINING, timeout=60
            )  # what is loaded once is loaded
            yield Service(url=url, process=process)


YAML = b"".join(b"key%d: value\n" % number for number in range(50_000))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            ("POST", f"/v1/{route}")
            for route in ("estimates", "recommendations", "sizings", "measurements", "searches")
        ),
        *(("POST", f"/v1/{route}") for route in ("models", "clusters", "keys")),
        ("PATCH", "/v1/searches/0"),
    ],
)
def test_long_yaml_is_refused_and_told_what_is_not(
    service: Service, method: str, path: str
) -> None:
    answer = service.costs_little(method, path, content=YAML)
    assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
    assert "exceed the maximum of 65,536; send JSON" in answer.json()["detail"]


def test_long_yaml_in_a_line_or_a_field_is_refused(service: Service) -> None:
    flow = b"{" + YAML.replace(b"\n", b", ") + b"}"
    lines = service.costs_little(
        "POST", "/v1/batch?task=recommend", content=flow + b"\n" + json.dumps(TRAINING).encode()
    )
    refused, answered = map(json.loads, lines.text.splitlines())
    assert (refused["error"]["code"], answered["status"]) == ("payload_too_large", "ok")
    page = service.costs_little(
        "POST",
        "/searches/new",
        data={"kind": "training", "extra": YAML[:500_000].decode()},
    )
    assert page.status_code == 422 and "exceed the maximum of 65,536" in page.text


def test_yaml_up_to_its_limit_is_read(service: Service) -> None:
    text = json.dumps(TRAINING) + "\n# " + "x" * 60_000
    assert (
        httpx.post(f"{service.url}/v1/recommendations", content=text, timeout=60).status_code == 200
    )


@pytest.mark.parametrize(
    ("path", "query", "field"),
    [
        ("recommendations", LONGEST, "parallel.micro_batch_size"),
        ("estimates", LONGEST, "parallel.micro_batch_size"),
        ("searches", LONGEST, "parallel.micro_batch_size"),
        ("recommendations", WIDE, "parallel.virtual_pipeline_parallel_size"),
        (
            "recommendations?pareto=gpus",
            TRAINING
            | {
                "parallel": {
                    f"{axis}_parallel_size": MANY * 4 for axis in ("tensor", "pipeline", "context")
                }
            },
            "parallel.tensor_parallel_size",
        ),
        (
            "recommendations",
            TRAINING
            | {
                "parallel": {
                    "recompute": [{"granularity": "full", "num_layers": k} for k in range(1, 9_000)]
                }
            },
            "parallel.recompute",
        ),
        (
            "recommendations",
            SERVING
            | {
                "parallel": {
                    "max_num_seqs": list(range(1, 2_000)),
                    "max_num_batched_tokens": list(range(1, 2_000)),
                }
            },
            "parallel.max_num_seqs",
        ),
        (
            "recommendations",
            SERVING
            | {
                "inference": SERVING["inference"]
                | {"disaggregated": {"prefill_tensor_parallel_size": [8] * 150_000}}
            },
            "inference.disaggregated.prefill_tensor_parallel_size",
        ),
        (
            "recommendations",
            TRAINING | {"cluster": {"gpu": "cpu", "num_gpus": list(range(1, 4_097))}},
            "cluster.num_gpus",
        ),
        (
            "recommendations",
            TRAINING | {"cluster": [{"gpu": "cpu", "num_gpus": n} for n in range(1, 4_097)]},
            "cluster",
        ),
    ],
)
def test_requests_are_bounded(
    service: Service, path: str, query: dict[str, Any], field: str
) -> None:
    answer = service.costs_little("POST", f"/v1/{path}", json=query)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (
        422,
        "request_too_costly",
        field,
    )
    assert re.search("the maximum|more than 5,000,000", answer.json()["detail"])


def test_what_would_fit_is_told_and_fits(service: Service) -> None:
    told = httpx.post(f"{service.url}/v1/recommendations", json=WIDE, timeout=60).json()["detail"]
    narrowed = {name: list(values) for name, values in WIDE["parallel"].items()}
    for name in narrowed:
        path = f"parallel.{name} to "
        if path in told:
            narrowed[name] = narrowed[name][
                : int(told.split(path)[1].split(" ")[0].replace(",", ""))
            ]
    assert narrowed != WIDE["parallel"]
    answer = httpx.post(
        f"{service.url}/v1/recommendations", json=TRAINING | {"parallel": narrowed}, timeout=60
    )
    assert "combinations are more than" not in answer.text


def test_processor_time_ends_what_its_size_did_not_tell(service: Service) -> None:
    """The fewest devices are looked for on one number of them after the other, each a space of its
    own.
    """
    parallel = {**ENDLESS["parallel"], "micro_batch_size": 7, "virtual_pipeline_parallel_size": 1}
    answer = service.costs_little(
        "POST", "/v1/recommendations", json=ENDLESS | {"parallel": parallel}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "request_too_costly")
    assert "1 s of CPU time" in answer.json()["detail"]


def test_a_silly_line_of_a_batch_harms_no_other(service: Service) -> None:
    lines = "\n".join(map(json.dumps, (TRAINING, WIDE, LONGEST, TRAINING)))
    answers = service.costs_little(
        "POST", "/v1/batch?task=recommend", content=lines
    ).text.splitlines()
    assert [json.loads(line)["status"] for line in answers] == ["ok", "error", "error", "ok"]
    assert {json.loads(line)["error"]["code"] for line in answers[1:3]} == {"request_too_costly"}


def test_forms_and_exports_have_the_same_bounds(service: Service) -> None:
    answer = service.costs_little(
        "POST", "/v1/exports", json={"result": WIDE, "format": "megatron-lm"}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "request_too_costly")
    extra = "\n".join(f"{name}: {values}" for name, values in WIDE["parallel"].items()).replace(
        "\n", "\n  "
    )
    form = {
        "model": "gpt3-175b",
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "1024",
        "training.sequence_length": "2048",
        "training.global_batch_size": "1536",
        "extra": f"parallel:\n  {extra}",
    }
    page = service.costs_little("GET", f"/searches/new.json?{urlencode(form)}")
    assert page.json()["error"]["code"] == "request_too_costly"


@pytest.mark.parametrize(
    "body",
    [
        {"command": "a" + ".a" * 50_000 + "=1", "format": "torchtitan"},
        {"command": "[" + "a" + ".a" * 50_000 + "]", "format": "torchtitan"},
        {"command": "a=" + "[" * 50_000, "format": "torchtitan"},
        {"command": "\n" * 100_000},
        {"command": "\n" * 100_000, "format": "megatron-lm"},
        {"command": "#SBATCH" + "\n" * 100_000, "format": "megatron-lm"},
        {"command": "---- " * 20_000},
        {"command": "pretrain_gpt.py " + "a" * 100_000, "format": "megatron-lm"},
        {"command": "".join(f"key{number}: 1\n" for number in range(9_000)), "format": "nemo"},
        {
            "command": "pretrain_gpt.py "
            + " ".join(f"--flag{number} 1" for number in range(6_000)),
            "format": "megatron-lm",
        },
        {
            "command": "A=" + "x" * 50_000 + "\n--num-layers " + "$A " * 16_000,
            "format": "megatron-lm",
        },
        {"command": "A=$((\n" * 30_000, "format": "megatron-lm"},
        {"command": NESTED, "format": "megatron-lm"},
    ],
    ids=[
        "dotted key",
        "dotted table",
        "nested lists",
        "blank",
        "blank lines",
        "blank batch",
        "dashes",
        "letters",
        "keys",
        "flags",
        "long value",
        "sums",
        "nested",
    ],
)
def test_a_strange_import_is_refused_in_time_linear_in_its_length(
    service: Service, body: dict[str, Any]
) -> None:
    answer = service.costs_little("POST", "/v1/imports", json=body | {"num_gpus": 8})
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("line", ["step:1 " * 2_800, "step:" + "1" * 19_900])
def test_a_strange_log_is_read_in_time_linear_in_its_length(service: Service, line: str) -> None:
    command = (
        """[model]\nname = "llama3"\nflavor = "8B"\n[activation_checkpoint]\nmode = "none"\n"""
    )
    body = {
        "command": command,
        "num_gpus": 8,
        "overrides": {"cluster.gpu": "h100-sxm-80gb"},
        "log": (line + "\n") * 50,
    }
    answer = service.costs_little("POST", "/v1/imports", json=body)
    assert (answer.status_code, answer.json()["logged"]["steps"]) == (200, 0)


def test_work_ends_when_its_asker_hangs_up(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it takes minutes."""
    for name, amount in (("COMBINATIONS", "1000000000000"), ("CPU_SECONDS", "1000")):
        monkeypatch.setenv(f"HP_MAX_{name}_PER_REQUEST", amount)
    body = json.dumps(ENDLESS).encode()
    with api_process(database_url=f"sqlite:///{tmp_path / 'hp.sqlite3'}", home=tmp_path) as (
        url,
        process,
    ):
        service = Service(url=url, process=process)
        port = urlsplit(url).port
        assert port is not None
        for path in ("/v1/recommendations", "/v1/batch?task=recommend"):
            begun_s = service.cpu_s()
            with socket.create_connection(("127.0.0.1", port), timeout=10) as asker:
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: "
                    f"{len(body) + 1}\r\n\r\n"
                )
                asker.sendall(head.encode() + body + b"\n")
                wait_for(lambda since_s=begun_s: service.cpu_s() - since_s > 1.0)  # type: ignore[misc]
            hung_up_s = service.cpu_s()
            wait_for(lambda: _idle(service))
            assert service.cpu_s() - hung_up_s < 3.0


def _idle(service: Service) -> bool:
    before_s = service.cpu_s()
    time.sleep(1.0)
    return service.cpu_s() - before_s < 0.05


def test_a_key_has_so_many_requests_under_way(store: SqlStore) -> None:
    tokens = [keys.issue(store=store, owner=owner, scope=Scope.READ)[1] for owner in ("ada", "bob")]
    ada, bob = ({"Authorization": f"Bearer {token}"} for token in tokens)
    with served(
        create_app(Settings(api_key="operator", max_requests_at_once=2), store=store)
    ) as url:
        port = urlsplit(url).port
        assert port is not None

        def listing(mine: dict[str, str]) -> httpx.Response:
            return httpx.get(f"{url}/v1/searches", headers=mine, timeout=10)

        assert listing(ada).status_code == 200
        slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2)]
        for connection in slow:  # the rest of the body never comes
            head = f"POST /v1/batch HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 9\r\n"
            connection.sendall(f"{head}Authorization: {ada['Authorization']}\r\n\r\n{{".encode())
        wait_for(lambda: listing(ada).status_code == 429)
        refused = listing(ada)
        assert (refused.json()["code"], refused.headers["Retry-After"]) == ("too_many_at_once", "1")
        assert listing(bob).status_code == 200
        for connection in slow:
            connection.close()
        wait_for(lambda: listing(ada).status_code == 200)


@pytest.mark.parametrize(
    "variable", ["COMBINATIONS_PER_REQUEST", "CPU_SECONDS_PER_REQUEST", "REQUESTS_AT_ONCE"]
)
@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_limits_are_numbers_above_zero(variable: str, text: str) -> None:
    with pytest.raises(InputError):
        from_environment({f"HP_MAX_{variable}": text})
    from_environment({f"HP_MAX_{variable}": "3"})


@pytest.mark.parametrize(
    ("body", "on_the_spot"),
    [
        (b'{"a": 1}', True),
        (b"a: 1", False),
        (b"{a: 1}", False),
        (b'"' + b"x" * 5_000 + b'"', False),
    ],
)
def test_only_short_json_is_read_on_the_event_loop(body: bytes, on_the_spot: bool) -> None:
    app = FastAPI()

    @app.post("/")
    async def where(request: Request) -> bool:
        here = threading.get_ident()
        return await read_body(request, lambda data: threading.get_ident() == here)

    with TestClient(app) as client:
        assert client.post("/", content=body).json() is on_the_spot
