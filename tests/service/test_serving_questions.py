"""Ten questions of an engineer who serves models: each is one command and one request, with the
same answer, and its configuration is one that engines accept.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fastapi.testclient import TestClient

from tests.command_line import hp_tool
from tests.formats.engine_parsers import parsed
from tests.formats.test_llm_d import SCHEMA

pytestmark = pytest.mark.components
LENGTHS = {"input_length": 2000, "output_length": 300}
TARGETS = {"ttft_p95_s": 2.0, "tpot_p95_s": 0.04}
SERVER = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 128 --max-model-len 16384"


def asked(
    *, model: str = "llama-3.3-70b", num_gpus: int | None = 8, **changes: Any
) -> dict[str, Any]:
    """A 70B model in fp8 on eight H100."""
    cluster: Any = changes.pop("cluster", {"gpu": "h100-sxm-80gb"})
    if num_gpus is not None and isinstance(cluster, dict):
        cluster = cluster | {"num_gpus": num_gpus}
    inference = LENGTHS | {"precision": "fp8"} | changes.pop("inference", {})
    return {
        "kind": "inference",
        "model": model,
        "cluster": cluster,
        "inference": {name: value for name, value in inference.items() if value is not None},
        **changes,
    }


def most_users(answer: dict[str, Any]) -> None:
    best = answer["recommendations"][0]["estimate"]
    assert best["concurrency"] > 1 and best["tails"]["ttft_s"]["p95"] <= 2.0


def fewest_gpus(answer: dict[str, Any]) -> None:
    rows = answer["recommendations"]
    used = [row["estimate"]["provenance"]["num_gpus"] for row in rows]
    assert used[0] == min(used) < 8
    assert rows[0]["estimate"]["request_rate_per_second"] == pytest.approx(5.0, rel=1e-3)


def cheapest_machine(answer: dict[str, Any]) -> None:
    rows = answer["recommendations"]
    dollars = [row["estimate"]["cost_per_million_output_tokens"] for row in rows]
    assert len({row["cluster"] for row in rows}) > 1 and dollars[0] == min(dollars) > 0


def longest_context(answer: dict[str, Any]) -> None:
    cache = answer["estimate"]["kv_cache"]
    assert cache["max_context"] == 65_536 <= cache["tokens"]["low"] < cache["tokens"]["high"]


def too_long_for_one_gpu(answer: dict[str, Any]) -> None:
    estimate = answer["estimate"]
    assert not estimate["feasible"] and estimate["fixes"]
    assert "inference.max_model_len" in estimate["reasons"][0]["message"]


def drafting(answer: dict[str, Any]) -> None:
    estimate = answer["estimate"]
    assert estimate["feasible"] and "drafter" not in estimate["provenance"]


def shared_prompt(answer: dict[str, Any]) -> None:
    estimate = answer["estimate"]
    alone = estimate["kv_cache"]["tokens"]["expected"] / (LENGTHS["input_length"] + 300)
    assert estimate["kv_cache"]["requests"] > 3 * alone


def night_job(answer: dict[str, Any]) -> None:
    best = answer["recommendations"][0]["estimate"]
    assert best["output_tokens_per_second_per_gpu"] > 100 and best["ttft_s"] > 0


def pools(answer: dict[str, Any]) -> None:
    best = answer["disaggregated"][0]
    assert best["prefill"]["replicas"] >= 1 and best["estimate"]["ttft_s"] > 0


def replayed(answer: dict[str, Any]) -> None:
    best = answer["recommendations"][0]["estimate"]
    assert "40 of 40 requests simulated" in best["provenance"]["load"]


TRACE = {
    "arrival_s": [0.25 * place for place in range(40)],
    "input_tokens": [500 + 97 * (place % 11) for place in range(40)],
    "output_tokens": [100 + 13 * (place % 7) for place in range(40)],
}
LAYOUT = {"tensor_parallel_size": 4}
DRAFTS = {
    "num_speculative_tokens": 3,
    "acceptance_rate": 0.7,
    "draft_cost_fraction": 0.05,
    "draft_model": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
}
QUESTIONS: Mapping[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], None]]] = {
    "how many users at once": ("recommend", asked(targets=TARGETS), most_users),
    "how few GPUs for a rate": (
        "recommend",
        asked(objective="min_gpus", targets=TARGETS, inference={"request_rate_per_second": 5.0}),
        fewest_gpus,
    ),
    "which GPU is cheapest": (
        "recommend",
        asked(
            cluster={"gpu": ["h100-sxm-80gb", "h200-sxm-141gb", "l40s-48gb"]},
            objective="cost",
            targets=TARGETS,
            inference={"concurrency": 32},
        ),
        cheapest_machine,
    ),
    "how long a context": (
        "estimate",
        asked(parallel=LAYOUT, inference={"concurrency": 4, "max_model_len": 65_536}),
        longest_context,
    ),
    "why the server does not start": (
        "estimate",
        asked(
            model="llama-3.1-8b",
            cluster={"gpu": "l4-24gb"},
            num_gpus=1,
            parallel={"tensor_parallel_size": 1},
            inference={"precision": "bf16", "concurrency": 1, "max_model_len": 131_072},
        ),
        too_long_for_one_gpu,
    ),
    "what a drafter takes": (
        "estimate",
        asked(parallel=LAYOUT, inference={"concurrency": 4, "speculative": DRAFTS}),
        drafting,
    ),
    "what a system prompt saves": (
        "estimate",
        asked(parallel=LAYOUT, inference={"concurrency": 64, "prefix_cache_hit_rate": 0.9}),
        shared_prompt,
    ),
    "how fast a job overnight": (
        "recommend",
        asked(inference={"load": {"arrival": "offline", "num_prompts": 5000}}),
        night_job,
    ),
    "are pools worth it": (
        "recommend",
        asked(inference={"concurrency": 64, "disaggregated": {}}, num_gpus=8),
        pools,
    ),
    "does it bear yesterday's requests": (
        "recommend",
        asked(inference={"input_length": None, "output_length": None, "trace": TRACE}),
        replayed,
    ),
}


def flags(query: dict[str, Any], *, path: str = "") -> Iterator[str]:
    """Write a query as `--set` flags."""
    for name, value in query.items():
        if isinstance(value, dict) and value and name != "trace":
            yield from flags(value, path=f"{path}{name}.")
        else:
            yield from ("--set", f"{path}{name}={json.dumps(value)}")


ROUTES = {"estimate": "/v1/estimates", "recommend": "/v1/recommendations"}


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_command_and_one_request_answer_it(question: str, shared_http: TestClient) -> None:
    task, query, holds = QUESTIONS[question]
    ended = hp_tool(task, "--json", *flags(query))
    assert ended.returncode in (0, 3), ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    holds(answer)
    response = shared_http.post(ROUTES[task], json=query)
    assert response.status_code == 200, response.text
    rows = "recommendations" if task == "recommend" else "estimate"
    assert response.json()[rows] == answer[rows]


@pytest.mark.parametrize("question", QUESTIONS)
def test_engines_accept_the_answer(question: str, shared_http: TestClient, tmp_path: Path) -> None:
    task, query, _ = QUESTIONS[question]
    if question == "why the server does not start":
        query = query | {"inference": query["inference"] | {"max_model_len": 16_384}}
    answer = shared_http.post(ROUTES[task], json=query).json()
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    for engine in ("vllm", "sglang", "trtllm", "llm-d"):
        ended = hp_tool("export", str(tmp_path / "answer.json"), "--format", engine)
        response = shared_http.post("/v1/exports", json={"result": answer, "format": engine})
        if engine == "trtllm" and query["inference"].keys() & {"speculative", "disaggregated"}:
            assert ended.returncode == 2 and response.status_code == 422
            continue
        assert ended.returncode == 0, (engine, ended.stderr)
        assert response.json()["text"] == ended.stdout
        accept(engine, ended.stdout)


def accept(engine: str, text: str) -> None:
    """Check an exported file by the engine's recorded parser, or by KServe's schema.

    Raises:
        AssertionError: The parser refuses it.
    """
    if engine == "llm-d":
        manifest = yaml.safe_load(text)
        jsonschema.validate(manifest, SCHEMA)
        (container,) = manifest["spec"]["template"]["containers"]
        assert parsed("vllm", container["args"])
        return
    started = STARTS[engine]
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line[line.index(started) :] for line in lines if f" {started} " in f" {line}"]
    assert commands
    for command in commands:
        words = [word for word in shlex.split(command) if word != "$@"]
        assert len(parsed(engine, words[len(started.split()) :])) >= 4


STARTS = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server",
    "trtllm": "trtllm-serve",
}


def test_a_running_server_is_read_in_one_command(shared_http: TestClient, tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text(SERVER)
    load = {"inference.input_length": 2000, "inference.output_length": 300}
    load |= {"inference.concurrency": 16, "cluster.gpu": "h100-sxm-80gb"}
    words = [word for path, value in load.items() for word in ("--set", f"{path}={value}")]
    ended = hp_tool("import", str(tmp_path / "serve.sh"), "--json", *words)
    assert ended.returncode == 0, ended.stderr
    query = json.loads(ended.stdout)["query"]
    assert query["inference"]["max_model_len"] == 16_384
    response = shared_http.post("/v1/imports", json={"command": SERVER, "overrides": load})
    assert response.status_code == 200 and response.json()["query"] == query
    answer = shared_http.post("/v1/estimates", json=query).json()["estimate"]
    assert answer["feasible"] and answer["kv_cache"]["max_context"] == 16_384
