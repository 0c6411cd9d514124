"""POST /v1/exports and /v1/imports over a socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from hp_tool.loop.tuning.training_result import baseline_config
from hp_tool.questions import schema
from hp_tool.questions.training.problem import resolve_training

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
}


def test_a_recommendation_becomes_a_command_and_comes_back(server: str) -> None:
    ranked = httpx.post(f"{server}/v1/recommendations?top=1", json=QUERY, timeout=60).json()
    exported = httpx.post(
        f"{server}/v1/exports", json={"result": ranked, "format": "megatron-lm"}, timeout=60
    )
    assert exported.status_code == 200
    command = exported.json()["text"]
    asked = {
        "command": command,
        "overrides": {"cluster.gpu": "h100-sxm-80gb"},
        "log": "elapsed time per iteration (ms): 4000.0",
    }
    imported = httpx.post(f"{server}/v1/imports", json=asked, timeout=60)
    assert imported.status_code == 200
    answer = imported.json()
    wanted = ranked["recommendations"][0]
    assert answer["estimate"]["parallel"] == wanted["parallel"]
    assert answer["estimate"]["time"]["step_s"] == pytest.approx(
        wanted["estimate"]["time"]["step_s"]
    )
    assert answer["better"] is None
    search = answer["search"]
    assert "parallel" not in search and search["search"]["baseline"] == answer["query"]["parallel"]
    problem = resolve_training(schema.parse_query(search))
    assert (
        schema.to_dict(baseline_config(schema.parse_query(search), problem)) == wanted["parallel"]
    )
    assert answer["logged"]["step_s"] == pytest.approx(4.0)


def test_what_a_tool_cannot_run_is_ranked_again_for_it(server: str) -> None:
    fixed = QUERY | {"parallel": {"tensor_parallel_size": 2, "zero_stage": 1}}
    body = {"result": fixed, "format": "torchtitan"}
    assert httpx.post(f"{server}/v1/exports", json=body, timeout=60).status_code == 422
    answer = httpx.post(f"{server}/v1/exports", json=body | {"rerank": True}, timeout=60).json()
    assert answer["framework"] == "torch-fsdp" and answer["parallel"]["zero_stage"] in (2, 3)
    assert answer["cost_fraction"] == pytest.approx(answer["step_s"] / answer["best_step_s"] - 1.0)
    assert "[parallelism]" in answer["text"]


def test_registered_names_are_known_both_ways(server: str) -> None:
    model = {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 51200,
    }
    lab = {
        "gpu": "a100-sxm-80gb",
        "gpus_per_node": 4,
        "num_gpus": 8,
        "fabric": "1 x 200 Gb/s",
        "inter_node_bandwidth_bytes_per_second": 25e9,
    }
    for kind, name, spec in (("models", "mine", model), ("clusters", "lab", lab)):
        assert (
            httpx.post(f"{server}/v1/{kind}", json={"name": name, "spec": spec}).status_code == 201
        )
    query = QUERY | {
        "model": "mine",
        "cluster": "lab",
        "parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1},
    }
    exported = httpx.post(
        f"{server}/v1/exports", json={"result": query, "format": "megatron-lm"}, timeout=60
    ).json()
    assert "--num-layers 24" in exported["text"] and "--nproc-per-node 4" in exported["text"]
    deepspeed = (
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'
    )
    told = {"model": "mine", "cluster": "lab", "training.sequence_length": 2048}
    imported = httpx.post(
        f"{server}/v1/imports", json={"command": deepspeed, "overrides": told}, timeout=60
    ).json()
    assert imported["query"]["model"]["num_hidden_layers"] == 24
    assert (
        imported["query"]["cluster"]["gpu"] == "a100-sxm-80gb"
        and imported["estimate"]["parallel"]["data_parallel_size"] == 8
    )


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("exports", {"result": QUERY, "format": "word"}, "format"),
        ("exports", {"result": QUERY, "format": "slurm", "rank": 0}, "rank"),
        ("imports", {"command": "hello"}, "format"),
        (
            "imports",
            {"command": "python pretrain_gpt.py --num-layers 2", "num_gpus": 1},
            "model.hidden_size",
        ),
    ],
)
def test_bad_requests_name_the_field(
    server: str, path: str, body: dict[str, Any], field: str
) -> None:
    answer = httpx.post(f"{server}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 422
    assert field in str(answer.json()["field"])
