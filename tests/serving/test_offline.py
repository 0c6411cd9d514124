"""Offline loads: all requests queued at once, no front end."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions import serving
from hp_tool.questions.schema import parse_query

OFFLINE: dict[str, Any] = {"load": {"arrival": "offline"}}


def asked(inference: dict[str, Any], **changes: Any) -> Any:
    load = {"input_length": 1000, "output_length": 200, "precision": "fp8", **inference}
    base = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2},
    }
    return parse_query(
        base | {"inference": load, "parallel": {"tensor_parallel_size": 1}} | changes
    )


def estimate(inference: dict[str, Any], **changes: Any) -> InferenceEstimate:
    return serving.estimate(query=asked(inference, **changes))


def test_full_batches_without_a_front_end_beat_any_closed_load() -> None:
    offline = estimate(OFFLINE)
    assert (
        offline.feasible
        and offline.running_requests is not None
        and offline.max_concurrency is not None
    )
    assert offline.running_requests == pytest.approx(offline.max_concurrency, abs=2)
    assert (
        offline.parts_s is not None
        and offline.parts_s["front_end"] == offline.parts_s["queue"] == 0.0
    )
    closed = [estimate({"concurrency": load}) for load in (16, 256, 2048, 8192)]
    rates = [each.output_tokens_per_second_per_gpu or 0.0 for each in closed]
    assert (offline.output_tokens_per_second_per_gpu or 0.0) > 1.05 * max(rates)
    assert "offline" in str(offline.provenance["load"])


def test_fewer_prompts_than_run_at_once_are_fewer_running() -> None:
    few = estimate({"load": {"arrival": "offline", "num_prompts": 32}})
    assert few.running_requests == 32
    assert (few.output_tokens_per_second_per_gpu or 0.0) < (
        estimate(OFFLINE).output_tokens_per_second_per_gpu or 0.0
    )


def test_the_rate_times_the_latency_is_what_runs() -> None:
    found = estimate(OFFLINE)
    assert found.request_rate_per_second is not None and found.request_latency_s is not None
    assert found.request_rate_per_second * found.request_latency_s == pytest.approx(
        found.running_requests, rel=1e-9
    )


def test_recommend_ranks_by_offline_throughput() -> None:
    found = serving.recommend(query=asked(OFFLINE, parallel={}), top=5).recommendations
    rates = [row.estimate.output_tokens_per_second_per_gpu or 0.0 for row in found]
    assert rates == sorted(rates, reverse=True) and found[0].parallel.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("inference", "field"),
    [
        (OFFLINE | {"concurrency": 8}, "inference.concurrency"),
        (OFFLINE | {"request_rate_per_second": 8.0}, "inference.request_rate_per_second"),
        ({"load": {"arrival": "offline", "warmup": 3}}, "inference.load"),
        ({"load": {"arrival": "burst"}, "concurrency": 8}, "inference.concurrency"),
        (OFFLINE | {"disaggregated": {}}, "inference.load.arrival"),
        ({"load": {"arrival": "closed"}, "request_rate_per_second": 8.0}, "inference.load"),
    ],
)
def test_what_contradicts_an_offline_load_is_refused_by_name(
    inference: dict[str, Any], field: str
) -> None:
    with pytest.raises((InputError, UnsupportedError)) as refused:
        serving.recommend(query=asked(inference))
    assert refused.value.field == field
