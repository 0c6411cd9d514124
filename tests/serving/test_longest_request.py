"""Requests longer than the positions that the model knows are rejected: an engine refuses to start,
or refuses the request.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import hp_tool
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError, InputError
from hp_tool.formats.exchange.reading import read_query
from hp_tool.questions import schema
from tests.command_line import hp_tool as command_line

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def served(
    model: Any = "llama-3.1-8b", *, tokens: tuple[int, int] = (130_000, 1_000), **inference: Any
) -> dict[str, Any]:
    load = {"input_length": tokens[0], "output_length": tokens[1], "concurrency": 1}
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": "h200", "num_gpus": 1},
        "inference": load | inference,
    }


def codes(query: dict[str, Any]) -> list[str]:
    return [
        reason.code
        for reason in hp_tool.estimate(
            query | {"parallel": {"tensor_parallel_size": 1}}
        ).estimate.reasons
    ]


def test_the_last_position_is_the_longest_request() -> None:
    assert codes(served(tokens=(130_072, 1_000))) == []
    estimate = hp_tool.estimate(
        served(tokens=(130_073, 1_000)) | {"parallel": {"tensor_parallel_size": 1}}
    ).estimate
    assert not estimate.feasible and estimate.ttft_s is None
    (reason,) = estimate.reasons
    assert (reason.code, reason.needed, reason.available) == ("request_too_long", 131_073, 131_072)
    assert "max_position_embeddings" in reason.message and "RoPE scaling" in reason.message


def test_no_ranking_no_pools_and_no_export_answer_it() -> None:
    long = served(tokens=(1_000_000, 1_000), disaggregated={})
    long["cluster"]["num_gpus"] = 8
    answer = hp_tool.recommend(long)
    assert (
        answer.recommendations == ()
        and answer.rejections["request_too_long"] > 0
        and not answer.disaggregated
    )
    for format in ("vllm", "sglang", "trtllm"):
        with pytest.raises(HpToolError):
            hp_tool.export(served(tokens=(1_000_000, 1_000), engine=format), format=format)
    for changes in (
        {"objective": "min_gpus"},
        {"inference": {"input_length": 1_000_000, "output_length": 1_000}},
    ):
        assert (
            hp_tool.recommend(served(tokens=(1_000_000, 1_000)) | changes)
            .nearest_misses[0]
            .estimate.reasons
        )
    run = command_line("recommend", "-", stdin=json.dumps(served(tokens=(1_000_000, 1_000))))
    assert run.returncode == 3 and "request_too_long" in run.stdout and "131,072" in run.stdout, (
        run.stdout
    )


def test_a_stated_length_bounds_requests_and_context() -> None:
    layout = {"parallel": {"tensor_parallel_size": 1}}
    stated = served(tokens=(4_000, 1_000), max_model_len=8192)
    found = hp_tool.estimate(stated | layout).estimate
    assert found.feasible and found.kv_cache is not None and found.kv_cache.max_context == 8192
    assert codes(served(tokens=(8_000, 193), max_model_len=8192)) == ["request_too_long"]
    with pytest.raises(InputError, match="131,072 positions") as refused:
        hp_tool.estimate(served(tokens=(4_000, 1_000), max_model_len=200_000) | layout)
    assert refused.value.field == "inference.max_model_len"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_vllm_alone_does_not_start_without_room_for_the_longest_request(engine: str) -> None:
    """Llama 3.1 70B in fp8 leaves 20 to 70 thousand tokens on one H100 x 2 at 0.6."""

    def found(longest: int | None) -> InferenceEstimate:
        query = served("llama-3.1-70b", tokens=(2_000, 200), engine=engine, precision="fp8")
        query["inference"] |= {"memory_fraction": 0.6, "max_model_len": longest}
        query["cluster"] = {"gpu": "h100", "num_gpus": 2}
        query["parallel"] = {"tensor_parallel_size": 2}
        estimate = hp_tool.estimate(query).estimate
        assert isinstance(estimate, InferenceEstimate)
        return estimate

    assert found(None).feasible and found(16_384).feasible
    long = found(131_072)
    assert long.feasible == (engine != "vllm")
    if engine == "vllm":
        (reason,) = long.reasons
        assert (
            reason.code == "memory" and "131,072 tokens (inference.max_model_len)" in reason.message
        )


@pytest.mark.parametrize(
    ("engine", "command", "longest"),
    [
        ("vllm", "vllm serve Qwen/Qwen3-32B --max-model-len 32k", 32_000),
        ("vllm", "vllm serve Qwen/Qwen3-32B --max-model-len 32K", 32_768),
        ("vllm", "vllm serve Qwen/Qwen3-32B --max-model-len auto", None),
        (
            "sglang",
            "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --context-length 8192",
            8192,
        ),
        ("trtllm", "trtllm-serve Qwen/Qwen3-32B --max_seq_len 8192", 8192),
    ],
)
def test_commands_state_it(engine: str, command: str, longest: int | None) -> None:
    lengths = {"inference.input_length": 4000, "inference.output_length": 1000}
    load = lengths | {"inference.concurrency": 8, "cluster.gpu": "h200"}
    query = read_query(command, num_gpus=1, overrides=load)
    assert query["inference"].get("max_model_len") == longest
    assert query["inference"]["engine"] == engine


def test_an_export_writes_the_stated_length() -> None:
    layout = {"parallel": {"tensor_parallel_size": 1}}
    query = served(tokens=(4_000, 1_000), max_model_len=7777) | layout
    for engine, option in (
        ("vllm", "--max-model-len 7777"),
        ("sglang", "--context-length 7777"),
        ("trtllm", "--max_seq_len 7777"),
    ):
        query["inference"]["engine"] = engine
        assert option in hp_tool.export(query, format=engine).text


def test_the_longest_request_of_a_trace_counts() -> None:
    trace = {"input_tokens": [1_000, 200_000], "output_tokens": [100, 100]}
    query = served(trace=trace)
    del query["inference"]["input_length"], query["inference"]["output_length"]
    assert codes(query) == ["request_too_long"]


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({}, 40_960),
        ({"rope_scaling": YARN}, 131_072),
        ({"rope_parameters": YARN}, 131_072),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 81_920),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            40_960,
        ),
        ({"rope_scaling": {"rope_type": "default"}}, 40_960),
    ],
)
def test_stated_rope_scaling_lifts_it(scaling: dict[str, Any], longest: int) -> None:
    assert codes(served(CONFIG | scaling, tokens=(longest - 10, 10))) == []
    assert codes(served(CONFIG | scaling, tokens=(longest - 9, 10))) == ["request_too_long"]


def test_a_checkpoint_that_was_trained_further_for_longer_requests_takes_them() -> None:
    for name in (
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
    ):
        assert codes(served(name, tokens=(100_000, 1_000))) == []
    assert codes(served("qwen3-30b-a3b", tokens=(100_000, 1_000))) == ["request_too_long"]


def test_a_model_without_a_known_limit_takes_any() -> None:
    spec = schema.to_dict(hp_tool.catalog.model("llama-3.1-8b")) | {"max_position_embeddings": None}
    assert codes(served({name: value for name, value in spec.items() if value is not None})) == []


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (
            "vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size 8 --max-model-len",
            "--max-model-len",
        ),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B-Instruct --tp 8 "
            "--context-length",
            "--context-length",
        ),
    ],
)
def test_a_command_whose_server_would_not_start_is_refused(command: str, flag: str) -> None:
    load = {
        "inference.input_length": 1_000,
        "inference.output_length": 100,
        "cluster.gpu": "h100-sxm-80gb",
    }
    assert read_query(f"{command} 131072", overrides=load)["kind"] == "inference"
    with pytest.raises(HpToolError, match=r"131,072 positions") as caught:
        read_query(f"{command} 131073", overrides=load)
    assert caught.value.field == flag
