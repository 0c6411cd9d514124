"""POST /v1/exports and /v1/imports over a socket."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 8192, "global_batch_size": 64},
}


def test_a_recommendation_becomes_a_command_and_comes_back(server: str) -> None:
    ranked = httpx.post(f"{server}/v1/recommendations?top=1", json=QUERY, timeout=60).json()
    exported = httpx.post(f"{server}/v1/exports", json={"result": ranked, "format": "megatron-lm"}, timeout=60)
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
    assert answer["estimate"]["time"]["step_s"] == pytest.approx(wanted["estimate"]["time"]["step_s"])
    assert answer["better"] is None
    assert answer["logged"]["step_s"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("exports", {"result": QUERY, "format": "word"}, "format"),
        ("exports", {"result": QUERY, "format": "slurm", "rank": 0}, "rank"),
        ("imports", {"command": "hello"}, "format"),
        ("imports", {"command": "python pretrain_gpt.py --num-layers 2", "num_gpus": 1}, "model.hidden_size"),
    ],
)
def test_bad_requests_name_the_field(server: str, path: str, body: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{server}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 422
    assert field in str(answer.json()["field"])
