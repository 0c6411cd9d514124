"""Whether a configuration fits is one probability and one word from it, by the interval that is
shown, wherever it is read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.command_line import hp_tool

GIB = 2**30
QUANTILE = 1.6449
CASES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"tensor_parallel_size": 2},
    "llama-3-70b": {"tensor_parallel_size": 8, "pipeline_parallel_size": 4},
    "mixtral-8x7b": {
        "tensor_parallel_size": 2,
        "expert_parallel_size": 8,
        "pipeline_parallel_size": 2,
    },
}
RESERVED = "allocator cache not counted"
WORDS = ("fits", "tight", "too little headroom", "unlikely to fit", "does not fit")


def query(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 8192, "global_batch_size": 128},
        "parallel": CASES[model],
    } | changes


def queries() -> list[dict[str, Any]]:
    """Configurations from those with half the memory free to those far too large, the ones about
    full among them.
    """
    lengths = (4096, 18432, 20480, 20992, 21504, 22528, 32768)
    dense = ("llama-3-8b", "llama-3-70b")
    long = [
        query(model, training={"sequence_length": s, "global_batch_size": 128})
        for model in dense
        for s in lengths
    ]
    free = [each | {"constraints": {"memory_headroom_fraction": 0.1}} for each in long]
    steps = [{"recompute": each, "micro_batch_size": 2} for each in ("none", "full")]
    return [
        *long,
        *free,
        *(query(model, parallel=CASES[model] | step) for model in CASES for step in steps),
    ]


def word(probability: float, *, feasible: bool) -> str:
    if probability > 0.99:
        return "does not fit"
    if probability > 0.5:
        return "unlikely to fit"
    if not feasible:
        return "too little headroom"
    return "tight" if probability > 0.01 else "fits"


def too_large(estimate: dict[str, Any]) -> bool:
    return any(reason["code"] == "memory" for reason in estimate["reasons"])


def test_the_word_is_of_the_probability_and_that_of_the_interval(shared_http: TestClient) -> None:
    seen = set()
    for asked in queries():
        estimate = shared_http.post("/v1/estimates", json=asked).json()["estimate"]
        total, (low, high) = (
            estimate["memory"]["total_bytes"],
            estimate["intervals"]["memory_total_bytes"],
        )
        log_sd, device = math.log(high / low) / (2 * QUANTILE), estimate["memory"]["device_bytes"]
        headroom = asked.get("constraints", {}).get("memory_headroom_fraction", 0.05)
        assert device == pytest.approx(estimate["memory"]["capacity_bytes"] / (1.0 - headroom))
        fails = 0.5 * math.erfc(math.log(0.95 * device / total) / log_sd / math.sqrt(2.0))
        assert estimate["out_of_memory_probability"] == pytest.approx(fails, rel=1e-6, abs=1e-12)
        assert estimate["fit"] == word(fails, feasible=not too_large(estimate)), asked
        assert (estimate["fit"] in ("fits", "tight")) is not too_large(estimate), (
            "feasible and the word never disagree"
        )
        held = estimate["intervals"]["memory_reserved_bytes"]
        assert held[0] == low and held[1] >= high, "blocks held in reserve come on top"
        page = shared_http.get("/configurations.json", params={"query": json.dumps(asked)}).json()[
            "view"
        ]
        assert page["verdict"] == estimate["fit"], asked
        seen.add(page["verdict"])
        metric = next(each for each in page["metrics"] if each["name"] == "Memory")
        assert [metric["low"], metric["high"]] == [low, high] and RESERVED in metric["note"]
        if page["verdict"] != "fits":
            assert f"{low / GIB:.1f}" in page["verdict_note"] and RESERVED in page["verdict_note"]
    assert seen == set(WORDS)


@pytest.mark.parametrize(
    "model",
    [
        model if model == "llama-3-8b" else pytest.param(model, marks=pytest.mark.long)
        for model in CASES
    ],
)
def test_rows_of_a_ranking_the_explorer_and_new_searches_agree_with_their_pages(
    shared_http: TestClient, model: str
) -> None:
    asked = query(model, parallel={})
    ranked = shared_http.post("/v1/recommendations", json=asked, params={"top": 3}).json()
    for row in ranked["recommendations"]:
        estimate = row["estimate"]
        assert row["out_of_memory_probability"] == estimate["out_of_memory_probability"]
        assert estimate["fit"] in ("fits", "tight")
    form = {
        "kind": "training",
        "model": model,
        "cluster.gpu": "h100-sxm-80gb",
        "cluster.num_gpus": "64",
        "training.sequence_length": "8192",
        "training.global_batch_size": "128",
    }
    started = shared_http.get("/searches/new.json", params=form).json()
    explored = shared_http.get(
        "/explorer.json",
        params={
            "model": model,
            "cluster.gpu": "h100-sxm-80gb",
            "cluster.num_gpus": 64,
            "training.sequence_length": 8192,
            "training.global_batch_size": 128,
        },
    ).json()
    for row in [started["best"], *explored["rows"][:3]]:
        page = shared_http.get(
            row["href"].replace("/configurations?", "/configurations.json?")
        ).json()["view"]
        assert row["fit"] == page["verdict"]
    assert explored["view"]["verdict"] == explored["rows"][0]["fit"]


def test_a_fix_says_how_it_fits_and_its_page_the_same(shared_http: TestClient) -> None:
    fixed = 0
    for asked in queries()[4::3]:
        estimate = shared_http.post("/v1/estimates", json=asked).json()["estimate"]
        page = shared_http.get("/configurations.json", params={"query": json.dumps(asked)}).json()[
            "view"
        ]
        for fix, row in zip(estimate["fixes"], page["fixes"], strict=True):
            after = shared_http.get(
                row["href"].replace("/configurations?", "/configurations.json?")
            ).json()["view"]
            assert fix["fit"] == row["fit"] == after["verdict"], (asked, fix["change"])
            fixed += 1
    assert fixed > 5


def test_tables_for_people_say_the_word_and_what_the_top_counts(
    shared_http: TestClient, tmp_path: Path
) -> None:
    answers = [
        (asked, shared_http.post("/v1/estimates", json=asked).json()["estimate"])
        for asked in queries()
    ]
    query_of_tight, tight = next(each for each in answers if each[1]["fit"] == "tight")
    said = _hp_tool(tmp_path, "estimate", query_of_tight)
    assert (
        f"tight: {100 * tight['out_of_memory_probability']:.1f}% chance of running out of memory"
        in said
    )
    assert RESERVED in said and " fit " in _hp_tool(
        tmp_path, "recommend", query_of_tight | {"parallel": {}}
    )
    query_of_large, large = next(each for each in answers if each[1]["fixes"])
    said = _hp_tool(tmp_path, "estimate", query_of_large)
    assert f"{large['fit']}: " in said
    fixes = said.partition("How to fix it")[2]
    assert all(fix["fit"] in fixes for fix in large["fixes"])


def _hp_tool(folder: Path, command: str, asked: dict[str, Any]) -> str:
    file = folder / "query.yaml"
    file.write_text(json.dumps(asked))
    done = hp_tool(command, str(file), XDG_DATA_HOME=str(folder), COLUMNS="300")
    assert done.returncode in (0, 3), done.stderr
    return done.stdout
