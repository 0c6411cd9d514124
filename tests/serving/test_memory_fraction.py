"""`inference.memory_fraction`: the share of device memory that the user gives the engine, from
import to export.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from hp_tool.catalog import model as catalogue_model
from hp_tool.catalog.hardware import gpu
from hp_tool.domain.profiling import unsupported_serving
from hp_tool.domain.query import Query
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import export, read_query
from hp_tool.questions import schema, serving

LOAD = {
    "inference.input_length": 4000,
    "inference.output_length": 1000,
    "inference.concurrency": 64,
    "cluster.gpu": "h200",
}
FLAGS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
COMMANDS = {
    "vllm": "vllm serve Qwen/Qwen3-32B -tp 2 --gpu-memory-utilization {}",
    "sglang": "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 "
    "--mem-fraction-static {}",
}
DEVICE_BYTES = gpu("h200").memory_bytes


def served(**inference: Any) -> dict[str, Any]:
    load = {
        "input_length": 4000,
        "output_length": 1000,
        "concurrency": 64,
        "engine": "vllm",
        "precision": "bf16",
    }
    return {
        "kind": "inference",
        "model": "qwen3-32b",
        "cluster": {"gpu": "h200", "num_gpus": 2},
        "inference": load | inference,
        "parallel": {"tensor_parallel_size": 2},
    }


def asked(data: dict[str, Any]) -> Query:
    return schema.parse_query(data)


@pytest.mark.parametrize("engine", FLAGS)
@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.93, 0.95])
def test_a_command_s_fraction_is_the_one_that_is_predicted_and_exported(
    engine: str, fraction: float
) -> None:
    query = read_query(COMMANDS[engine].format(fraction), overrides=LOAD)
    assert query["inference"]["memory_fraction"] == fraction and "constraints" not in query
    estimate = serving.estimate(query=asked(query))
    assert estimate.memory is not None and estimate.memory.capacity_bytes == pytest.approx(
        fraction * DEVICE_BYTES
    )
    script = export(result=query | {"parallel": schema.to_dict(estimate.parallel)}, format=engine)
    assert re.search(rf"{FLAGS[engine]} (\S+)", script)[1] == str(fraction)  # type: ignore[index]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_more_memory_holds_more_requests(engine: str) -> None:
    room = [
        serving.estimate(query=asked(served(engine=engine, memory_fraction=fraction))).memory
        for fraction in (0.7, 0.9, 0.97)
    ]
    capacities = [each.kv_cache_capacity_bytes for each in room if each is not None]
    assert capacities == sorted(set(capacities)) and len(capacities) == 3


def test_a_stated_fraction_replaces_the_headroom() -> None:
    query = served(memory_fraction=0.95)
    alone = serving.estimate(query=asked(query))
    both = serving.estimate(query=asked(query | {"constraints": {"memory_headroom_fraction": 0.3}}))
    assert both.memory == alone.memory
    unstated = serving.estimate(
        query=asked(served() | {"constraints": {"memory_headroom_fraction": 0.3}})
    )
    assert unstated.memory is not None and unstated.memory.capacity_bytes == pytest.approx(
        0.7 * DEVICE_BYTES
    )


def test_a_trace_and_pools_have_the_stated_memory_too() -> None:
    def preempted(fraction: float) -> float:
        trace = {"input_tokens": [30_000] * 40, "output_tokens": [400] * 40}
        data = served(memory_fraction=fraction, trace=trace, concurrency=40)
        del data["inference"]["input_length"], data["inference"]["output_length"]
        return serving.estimate(query=asked(data)).ttft_s or 0.0

    assert preempted(0.5) > preempted(0.95)
    most = []
    for fraction in (0.5, 0.95):
        data = served(memory_fraction=fraction, disaggregated={}, concurrency=None)
        data["cluster"]["num_gpus"] = 4
        del data["parallel"], data["inference"]["concurrency"]
        most.append(max(row.estimate.concurrency for row in serving.rank_pools(query=asked(data))))
    assert most[0] < most[1]


def test_tensorrt_llm_is_told_its_share_of_free_memory() -> None:
    query = served(engine="trtllm", memory_fraction=0.8)
    script = export(result=query | {"parallel": {"tensor_parallel_size": 2}}, format="trtllm")
    assert "--kv_cache_free_gpu_memory_fraction 0.8" in script
    silent = export(
        result=served(engine="trtllm") | {"parallel": {"tensor_parallel_size": 2}}, format="trtllm"
    )
    assert "free_gpu_memory_fraction" not in silent


def test_no_headroom_is_written_where_tensorrt_llm_has_no_word_for_it() -> None:
    headroom = {"constraints": {"memory_headroom_fraction": 0.3}}
    with pytest.raises(UnsupportedError):
        export(result=served(engine="trtllm") | headroom, format="trtllm")
    assert "0.8" in export(
        result=served(engine="trtllm", memory_fraction=0.8) | headroom, format="trtllm"
    )


@pytest.mark.parametrize("fraction", [0, 1.5, -0.1])
def test_a_fraction_out_of_bounds_is_an_error_of_its_field(fraction: float) -> None:
    with pytest.raises(InputError) as error:
        asked(served(memory_fraction=fraction))
    assert error.value.field == "inference.memory_fraction"


def test_an_endpoint_may_have_been_started_with_a_fraction_and_no_profiler_starts_one() -> None:
    query = asked(served(memory_fraction=0.95))
    assert query.inference is not None
    model = catalogue_model("qwen3-32b")
    assert (
        list(unsupported_serving(model=model, inference=query.inference, runner="endpoint")) == []
    )
    refused = unsupported_serving(model=model, inference=query.inference, runner="vllm")
    assert [field for field, _ in refused] == ["inference.memory_fraction"]
