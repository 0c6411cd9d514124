"""Traces: four ways to write the same requests, played event by event."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hp_tool
from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import engine_profiles
from hp_tool.catalog.traces import request_trace
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload, TraceSpec
from hp_tool.domain.query import OwnFile
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.questions import answers, schema, serving
from hp_tool.questions.serving.prefixes import (
    ANYWHERE,
    NOWHERE,
    SNAPSHOT_TOKENS,
    resume_interval,
)
from hp_tool.questions.serving.problem import resolve_serving, serving_case
from hp_tool.questions.serving.ranked import cost_space
from hp_tool.questions.serving.replay import simulate_trace

ROWS = [(0.0, 1024, 40), (0.25, 600, 8), (0.5, 2048, 300), (1.75, 1536, 1)]
COLUMNS: dict[str, list[Any]] = {
    name: [row[place] for row in ROWS]
    for place, name in enumerate(("arrival_s", "input_tokens", "output_tokens"))
}
HASHES = [[1, 2], [9], [1, 2, 3, 4], [1, 8, 3]]
"""The third finds two blocks, the fourth one: a block behind a new one is new."""


def asked(**inference: Any) -> dict[str, Any]:
    return {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2},
        "inference": inference,
        "parallel": {"tensor_parallel_size": 1},
    }


def written(folder: Path) -> dict[str, Path]:
    """The requests in each format."""
    lines = [
        {"timestamp": 1000 * t, "input_length": i, "output_length": o, "hash_ids": h}
        for (t, i, o), h in zip(ROWS, HASHES, strict=False)
    ]
    texts = {
        "own.csv": "arrival_s,input_tokens,output_tokens\n"
        + "".join(f"{t},{i},{o}\n" for t, i, o in reversed(ROWS)),
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:{46.6805900 + t:.7f},{i},{o}\n" for t, i, o in ROWS),
        "mooncake.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "columns.json": json.dumps(COLUMNS),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def test_every_format_says_the_same_requests(tmp_path: Path) -> None:
    for name, path in written(tmp_path).items():
        trace = request_trace(OwnFile(path))
        assert trace.arrival_s is not None
        np.testing.assert_allclose(trace.arrival_s, COLUMNS["arrival_s"], atol=1e-6)
        assert (
            trace.input_tokens.tolist() == COLUMNS["input_tokens"]
            and trace.output_tokens.tolist() == COLUMNS["output_tokens"]
        )
        assert trace.prefix_tokens.tolist() == (
            [0, 0, 1024, 512] if name == "mooncake.jsonl" else [0] * 4
        )


def test_lengths_may_be_distributions() -> None:
    spread = {"median": 1000.0, "sigma": 0.5, "longest": 3000}
    trace = request_trace(
        schema.parse(
            TraceSpec, {"input_tokens": spread, "output_tokens": {"median": 100.0, "sigma": 0.0}}
        )
    )
    assert (
        np.median(trace.input_tokens) == pytest.approx(1000, rel=0.01)
        and trace.input_tokens.max() == 3000
    )
    logs = np.log(trace.input_tokens[trace.input_tokens < 3000])
    assert np.quantile(logs, 0.16) == pytest.approx(np.log(1000) - 0.5, abs=0.02) and set(
        trace.output_tokens
    ) == {100}
    beside = request_trace(
        schema.parse(TraceSpec, {"input_tokens": [10, 20, 30], "output_tokens": spread})
    )
    assert sorted(beside.output_tokens)[1] == 1000 and len(beside.output_tokens) == 3
    inputs = asked(trace={"input_tokens": spread, "output_tokens": spread}, concurrency=16)
    spreading, alike = (
        answers.answer_estimate(schema.parse_query(one)).estimate
        for one in (
            inputs,
            asked(
                input_length=trace.input_tokens.mean().round().astype(int).item(),
                output_length=1130,
                concurrency=16,
            ),
        )
    )
    assert isinstance(spreading, InferenceEstimate) and isinstance(alike, InferenceEstimate)
    assert spreading.tails is not None and alike.tails is not None
    assert spreading.tails.request_latency_s.p99 > 1.5 * alike.tails.request_latency_s.p99
    with pytest.raises(InputError) as caught:
        schema.parse_query(
            asked(
                trace={"input_tokens": {"median": 0.5, "sigma": 1}, "output_tokens": spread},
                concurrency=1,
            )
        )
    assert caught.value.field is not None and caught.value.field.startswith("inference.trace")


def test_a_trace_is_played_as_its_requests_came(tmp_path: Path) -> None:
    found = hp_tool.estimate(asked(trace=str(written(tmp_path)["own.csv"]))).estimate
    assert isinstance(found, InferenceEstimate) and found.feasible and found.tails and found.ttft_s
    assert "simulated" in str(found.provenance["load"]) and found.preemptions_per_request == 0.0
    assert found.tails.ttft_s.p50 <= found.tails.ttft_s.p99 and found.ttft_s < 0.2
    closed = hp_tool.estimate(
        asked(trace={k: v * 50 for k, v in COLUMNS.items() if k != "arrival_s"}, concurrency=32)
    ).estimate
    assert (
        isinstance(closed, InferenceEstimate)
        and closed.tpot_s
        and found.tpot_s
        and closed.tpot_s > found.tpot_s
    )
    best = hp_tool.recommend(
        asked(trace=COLUMNS) | {"parallel": {}, "targets": {"ttft_s": 0.5}}, top=2
    )
    assert best.recommendations and best.recommendations[0].rank == 1
    missed = hp_tool.recommend(asked(trace=COLUMNS) | {"targets": {"tpot_p99_s": 1e-5}})
    assert (
        not missed.recommendations
        and missed.nearest_misses[0].estimate.reasons[0].code == "target_missed"
    )


@settings(max_examples=15)
@given(
    st.sampled_from(("llama-3.1-8b", "qwen3-30b-a3b")),
    st.sampled_from((None, 4, 40)),
    st.integers(0, 5),
)
def test_requests_of_a_trace_obey_little_and_the_memory_bound(
    model: str, concurrency: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = {
        "input_tokens": rng.integers(1, 3000, 120).tolist(),
        "output_tokens": rng.integers(1, 200, 120).tolist(),
    }
    columns["arrival_s"] = np.cumsum(rng.exponential(0.05, 120)).tolist()
    e = hp_tool.estimate(asked(trace=columns, concurrency=concurrency) | {"model": model}).estimate
    assert (
        isinstance(e, InferenceEstimate)
        and e.memory
        and e.tpot_s
        and e.request_rate_per_second
        and e.request_latency_s
    )
    in_flight = e.request_rate_per_second * e.request_latency_s
    assert e.concurrency is not None and in_flight <= e.concurrency * (1 + 1e-9)
    if model == "llama-3.1-8b":
        assert e.tpot_s >= 0.85 * e.memory.weights_bytes / 3.35e12
    goodput = answers.answer_estimate(
        schema.parse_query(asked(trace=columns) | {"model": model, "targets": {"ttft_s": 0.2}})
    ).estimate.goodput  # type: ignore[union-attr]
    assert goodput is not None and 0.0 <= goodput.fraction <= 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"trace": {"input_tokens": [5, 6], "output_tokens": [5]}},
        {
            "trace": {"arrival_s": [0.0], "input_tokens": [5, 6], "output_tokens": [5, 7]},
            "concurrency": 2,
        },
        {"trace": "no/such/file.csv"},
        {"trace": "/etc/passwd"},
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_field(change: dict[str, Any]) -> None:
    with pytest.raises(HpToolError) as refused:
        hp_tool.estimate(asked(**change))
    assert refused.value.field == "inference.trace"


def test_what_a_trace_leaves_open_is_named() -> None:
    lengths = {name: COLUMNS[name] for name in ("input_tokens", "output_tokens")}
    for change, field in (
        ({"trace": lengths, "disaggregated": {}}, "inference.disaggregated"),
        ({"trace": COLUMNS, "load": {"arrival": "poisson"}}, "inference.load"),
        ({"trace": COLUMNS, "load": {"arrival": "offline"}}, "inference.load"),
        ({"output_length": 3}, "inference.input_length"),
    ):
        with pytest.raises(HpToolError) as refused:
            answers.answer_estimate(schema.parse_query(asked(**change)))
        assert refused.value.field == field
    with pytest.raises(InputError):
        request_trace(TraceSpec(input_tokens=(0,), output_tokens=(1,)))


SPREAD = {
    "input_tokens": {"median": 2000, "sigma": 0.8},
    "output_tokens": {"median": 400, "sigma": 0.6},
}
TARGETS = {"ttft_p95_s": 1.0, "tpot_p95_s": 0.03}


def dense(num_gpus: int = 8, **inference: Any) -> dict[str, Any]:
    """Lengths drawn for Llama 3.3 70B in fp8."""
    load = {"engine": "vllm", "precision": "fp8", "prefix_cache_hit_rate": 0.6, "trace": SPREAD}
    return {
        "kind": "inference",
        "model": "llama-3.3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus},
        "inference": load | inference,
        "targets": TARGETS,
    }


def feasible(query: dict[str, Any], sizes: dict[str, int]) -> bool:
    return hp_tool.estimate(query | {"parallel": sizes}).estimate.feasible


@pytest.mark.parametrize(
    "load", [{"load": {"arrival": "poisson"}}, {"concurrency": {"min": 1, "max": 1000}}, {}]
)
def test_the_highest_load_of_a_trace_is_the_last_that_its_requests_bear(
    load: dict[str, Any],
) -> None:
    sizes = {"tensor_parallel_size": 4}
    estimate = hp_tool.estimate(dense(4, **load) | {"parallel": sizes}).estimate
    assert (
        isinstance(estimate, InferenceEstimate) and estimate.feasible and estimate.tails is not None
    )
    assert estimate.tails.tpot_s.quantiles["p95"] > 0.9 * TARGETS["tpot_p95_s"]
    words = str(estimate.provenance["load"])
    name = "request_rate_per_second" if load.get("load") else "concurrency"
    borne = float(
        re.search(
            r"([\d.]+) requests(?:/s| in flight)",
            words,
        )[1]
    )  # type: ignore[index]
    lower, higher = (
        (0.97 * borne, 1.05 * borne) if load.get("load") else (int(borne), int(1.05 * borne) + 1)
    )
    assert feasible(dense(4, **{name: lower}), sizes) and not feasible(
        dense(4, **{name: higher}), sizes
    )


def test_a_list_of_rates_is_a_table_of_the_fewest_gpus() -> None:
    rates = [4.0, 1.0, 500.0]
    answer = hp_tool.recommend(dense(request_rate_per_second=rates) | {"objective": "min_gpus"})
    chosen = [row.set for row in answer.recommendations]
    assert [each["inference.request_rate_per_second"] for each in chosen] == [1.0, 4.0]
    (miss,) = answer.nearest_misses
    assert miss.set["inference.request_rate_per_second"] == 500.0 and miss.estimate.reasons
    devices = [row.estimate.provenance["num_gpus"] for row in answer.recommendations]
    assert devices == sorted(devices)
    for row, rate in zip(answer.recommendations, (1.0, 4.0), strict=True):
        alone = hp_tool.recommend(
            dense(request_rate_per_second=rate) | {"objective": "min_gpus"}, top=1
        )
        assert (
            alone.recommendations[0].estimate.provenance["num_gpus"]
            == row.estimate.provenance["num_gpus"]
        )
    equal = dense(request_rate_per_second=[1.0, 4.0]) | {"objective": "min_gpus"}
    del equal["inference"]["trace"]
    equal["inference"] |= {"input_length": 2000, "output_length": 400}
    assert len(hp_tool.recommend(equal).recommendations) == 2


def test_a_bursty_trace_is_played_on_what_bears_bursts() -> None:
    """The layout that is best when the trace is played, whatever is best by its means."""
    arrivals = np.concatenate([60.0 * burst + np.linspace(0.0, 10.0, 90) for burst in range(4)])
    trace = {
        "arrival_s": arrivals.tolist(),
        "input_tokens": [2000] * 360,
        "output_tokens": [400] * 360,
    }
    query = schema.parse_query(
        asked(trace=trace, precision="fp8")
        | {
            "model": "llama-3.3-70b",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
            "parallel": {"max_num_seqs": [8, 10, 12, 14, 16, 64, 128], "pipeline_parallel_size": 1},
        }
    )
    (best,) = serving.recommend(query=query, top=1).recommendations
    problem = resolve_serving(query)
    space = cost_space(query=query, problem=problem)
    latencies = [
        simulate_trace(
            problem.cost_candidates(space.candidates.take(slice(row, row + 1)))
        ).request_latency_s
        or np.inf
        for row in space.best(200)
    ]
    assert best.estimate.request_latency_s == pytest.approx(min(latencies))


@pytest.mark.parametrize(
    ("name", "engine", "release", "every"),
    [
        ("qwen3-32b", "trtllm", "1.2.0", ANYWHERE),  # keys and values are cut anywhere
        ("qwen3.6-27b", "trtllm", "1.2.0", NOWHERE),
        ("qwen3.6-27b", "trtllm", "1.3.0", SNAPSHOT_TOKENS),
        ("qwen3.6-27b", "trtllm", "2.0", SNAPSHOT_TOKENS),
        ("qwen3.6-27b", "sglang", "0.5.9", ANYWHERE),
    ],
)
def test_a_prefix_resumes_where_the_engine_kept_recurrent_states(
    name: str, engine: str, release: str, every: int
) -> None:
    case = serving_case(
        model=model(name),
        cluster=cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=2)),
        workload=InferenceWorkload(input_length=1024, output_length=512),
        engine=next(each for each in engine_profiles() if each.engine == engine),
    )
    assert resume_interval(case, release=release) == every
