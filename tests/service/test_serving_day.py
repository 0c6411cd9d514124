"""A day of somebody who serves a model: what to run, what growth takes, what yesterday's requests
say; each by both doors.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.command_line import hp_tool
from tests.formats.engine_parsers import parsed

TARGETS = {"ttft_p95_s": 1.0, "tpot_p95_s": 0.03}
LENGTHS = {
    "input_tokens": {"median": 2000, "sigma": 0.8},
    "output_tokens": {"median": 400, "sigma": 0.6},
}
RATES = [2.0, 5.0, 10.0, 20.0]
ENGINES = {
    "vllm": "--tensor-parallel-size",
    "sglang": "--tensor-parallel-size",
    "trtllm": "--tensor_parallel_size",
}


def question(**changes: Any) -> dict[str, Any]:
    """16 H100, 70B in fp8, 5 requests a second with log-normal lengths, 95% of them in time, 60%
    of prompts cached.
    """
    load = {
        "precision": "fp8",
        "prefix_cache_hit_rate": 0.6,
        "request_rate_per_second": 5.0,
        "trace": LENGTHS,
    }
    inference = load | changes.pop("inference", {})
    return {
        "kind": "inference",
        "model": "llama-3.3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "inference": {name: value for name, value in inference.items() if value is not None},
        "targets": TARGETS,
        **changes,
    }


def yesterday() -> dict[str, list[Any]]:
    """200 requests of forty seconds, in bursts."""
    rng = np.random.default_rng(0)
    n = 200
    arrival = np.cumsum(rng.gamma(0.5, 0.4, n))
    tokens = {
        "input_tokens": rng.lognormal(7.6, 0.8, n),
        "output_tokens": rng.lognormal(6.0, 0.6, n),
    }
    columns = {
        name: np.clip(np.rint(values), 1, 32_000).astype(int).tolist()
        for name, values in tokens.items()
    }
    return {"arrival_s": arrival.tolist(), **columns}


def both_doors(http: TestClient, folder: Path, query: dict[str, Any]) -> dict[str, Any]:
    """One command's answer, which is the service's."""
    file = folder / "query.json"
    file.write_text(json.dumps(query))
    ended = hp_tool("recommend", str(file), "--json", "--top", "4")
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    response = http.post("/v1/recommendations", params={"top": 4}, json=query)
    assert response.status_code == 200, response.text
    for name in ("recommendations", "nearest_misses"):
        assert response.json()[name] == answer[name]
    for row in answer["recommendations"]:
        tails = row["estimate"]["tails"]
        assert (
            tails["ttft_s"]["p95"] <= TARGETS["ttft_p95_s"]
            and tails["tpot_s"]["p95"] <= TARGETS["tpot_p95_s"]
        )
    return answer


def deployed(http: TestClient, folder: Path, answer: dict[str, Any], *, rank: int) -> None:
    """The row as each engine's own command, from both doors: its parser takes it, and the
    checkpoint is in the precision.
    """
    (folder / "answer.json").write_text(json.dumps(answer))
    row = answer["recommendations"][rank - 1]["parallel"]
    for engine, option in ENGINES.items():
        ended = hp_tool(
            "export", str(folder / "answer.json"), "--format", engine, "--rank", str(rank)
        )
        assert ended.returncode == 0, ended.stderr
        response = http.post("/v1/exports", json={"result": answer, "format": engine, "rank": rank})
        assert response.status_code == 200, response.text
        assert response.json()["text"] == ended.stdout
        words = [
            word
            for word in shlex.split(ended.stdout.replace("\\\n", " "), comments=True)
            if word != "$@"
        ]
        (checkpoint,) = [word for word in words if word.startswith("nvidia/")]
        assert checkpoint.upper().endswith("FP8")
        options = words[words.index(checkpoint) + 1 :]
        assert parsed(engine, options)[option] == row["tensor_parallel_size"]


@pytest.mark.long
def test_a_serving_engineers_day(http: TestClient, tmp_path: Path) -> None:
    now = both_doors(http, tmp_path, question())
    assert now["recommendations"]
    deployed(http, tmp_path, now, rank=1)

    fewest = both_doors(http, tmp_path, question(objective="min_gpus"))
    needed = fewest["recommendations"][0]["set"]["cluster.num_gpus"]

    growth = both_doors(
        http, tmp_path, question(objective="min_gpus", inference={"request_rate_per_second": RATES})
    )
    rows = growth["recommendations"] + growth["nearest_misses"]
    assert [row["set"]["inference.request_rate_per_second"] for row in rows] == RATES
    gpus = [row["estimate"]["provenance"]["num_gpus"] for row in growth["recommendations"]]
    assert gpus == sorted(gpus) and gpus[1] == needed
    for rank in range(1, len(gpus) + 1):
        deployed(http, tmp_path, growth, rank=rank)

    most = both_doors(
        http, tmp_path, question(inference={"request_rate_per_second": {"min": 2.0, "max": 40.0}})
    )
    borne = most["recommendations"][0]["estimate"]["request_rate_per_second"]
    assert max(rate for rate, _ in zip(RATES, gpus, strict=False)) < borne < 40.0
    deployed(http, tmp_path, most, rank=1)

    traced = question(inference={"trace": yesterday(), "request_rate_per_second": None})
    replayed = both_doors(http, tmp_path, traced)
    assert (
        "200 of 200 requests simulated"
        in replayed["recommendations"][0]["estimate"]["provenance"]["load"]
    )
    deployed(http, tmp_path, replayed, rank=1)
