"""Serving of models whose layers differ: what they weigh, cache and take, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool import api, catalog
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import serving_costs
from hp_tool.cost.serving.legality import legality
from hp_tool.cost.serving.memory import activation_bytes
from hp_tool.cost.serving.operations import cached_tokens, state_block
from hp_tool.cost.serving.passes import pass_table
from hp_tool.domain.blocks import Block
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.schema import parse_query
from hp_tool.questions.serving import prefixes
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving

HYBRIDS = (
    "qwen3.6-27b",
    "qwen3.6-35b-a3b",
    "nemotron-3-nano-30b-a3b",
    "deepseek-v3.2",
    "gemma-4-31b",
    "llama-4-maverick",
)
ONE = ServingCandidates.from_configs([ServingConfig(max_num_seqs=64)], concurrency=[16.0])
MANY = ServingCandidates.from_configs([ServingConfig(max_num_seqs=1024)], concurrency=[1024.0])


def query(
    model: Any, *, num_gpus: int = 8, gpu: str = "h200-sxm-141gb", **load: Any
) -> dict[str, Any]:
    work = {"input_length": 2000, "output_length": 200, "concurrency": 16, **load}
    return {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": gpu, "num_gpus": num_gpus},
        "inference": work,
    }


def problem(model: Any, **load: Any) -> ServingProblem:
    return resolve_serving(parse_query(query(model, **load)))


def test_a_pattern_of_the_model_s_own_layers_is_the_model() -> None:
    plain = problem("qwen3-8b")
    same = replace(
        plain, model=replace(plain.model, blocks=(Block(count=2), Block(count=1), Block(count=1)))
    )
    costs, again = (serving_costs(case=case, candidates=ONE) for case in (plain, same))
    assert again.tpot_s == pytest.approx(costs.tpot_s, rel=1e-12) and again.ttft_s == pytest.approx(
        costs.ttft_s, rel=1e-12
    )
    assert again.bytes.weights == pytest.approx(costs.bytes.weights, rel=1e-12)
    assert again.max_running == pytest.approx(costs.max_running, rel=1e-12)


def test_a_pattern_of_one_kind_keeps_what_its_block_says() -> None:
    """A window of the model that no block has cuts no cache; nor does another width of its heads go
    unseen.
    """
    plain = problem("qwen3-8b", input_length=8_000)
    windowed = replace(plain.model, sliding_window=1024, blocks=(Block(),))
    wide = replace(plain.model, blocks=(Block(head_dim=256),))

    def room(model: Any) -> float:
        return float(
            serving_costs(case=replace(plain, model=model), candidates=MANY).max_running[0]
        )

    assert room(windowed) == room(plain.model)
    assert room(wide) < 0.6 * room(plain.model)


def test_the_widest_layer_sets_the_working_memory() -> None:
    """One layer is worked on at a time: a wide one among narrow ones takes as much as a model of
    wide ones.
    """
    plain = problem("qwen3-8b")
    width = plain.model.intermediate_size

    def working(*blocks: Block) -> float:
        return float(
            activation_bytes(replace(plain, model=replace(plain.model, blocks=blocks)), ONE)[0]
        )

    narrow, wide = Block(intermediate_size=width), Block(intermediate_size=3 * width)
    assert working(narrow, wide, narrow) == working(wide) > working(narrow)


def exact(case: ServingProblem) -> ServingProblem:
    """Return the case of an engine whose layers take what they cache."""
    return replace(case, engine=replace(case.engine, cache_layout="exact"))


def test_states_take_the_cache_of_a_published_run() -> None:
    """Qwen3.6-27B: four sequences of 262,144 tokens in all keep 16,384 MiB of keys and values and
    598.5 MiB of state.
    """
    case = exact(problem("qwen3.6-27b", precision="bf16"))
    per_token = serving_costs(case=case, candidates=ONE).bytes.kv_per_token
    each = np.ravel(cached_tokens(case, ONE.tensor_parallel_size, 262_144 / 4)) * per_token
    assert 4 * each == pytest.approx((16_384 + 598.5) * 2**20, rel=1e-12)


def test_a_prompt_resumes_where_a_state_was_kept() -> None:
    """Blocks as long as their keys and values are as large as a state: vLLM 0.19 prints 784 tokens
    for the shape of Qwen3.6-27B (vllm-project/vllm#40691), and 528 for that of the 4B.
    """
    trace = {
        "input_tokens": [2000] * 3,
        "output_tokens": [100] * 3,
        "prefix_tokens": [700, 1000, 1999],
    }
    case = problem("qwen3.6-27b", precision="bf16", input_length=0, output_length=0, trace=trace)
    assert case.trace is not None and case.trace.prefix_tokens.tolist() == [0, 784, 1568]
    assert case.prefix_cache_hit_rate == 2352 / 6000
    small = replace(case, model=replace(case.model, linear_num_value_heads=32))
    assert state_block(small) == 528
    plain = problem("qwen3-8b", input_length=0, output_length=0, trace=trace)
    assert plain.trace is not None and plain.trace.prefix_tokens.tolist() == trace["prefix_tokens"]


@pytest.mark.parametrize(
    ("engine", "version", "resumed", "words"),
    [
        ("vllm", None, [0, 784, 1568], "multiples of 784 tokens"),
        ("trtllm", "1.3", [512, 768, 1792], "multiples of 256 tokens"),
        ("trtllm", "1.1", [0, 0, 0], "before 1.3 stores no recurrent states"),
        ("sglang", None, [700, 1000, 1999], "are assumed to end"),
    ],
)
def test_each_engine_resumes_where_it_keeps_states(
    engine: str, version: str | None, resumed: list[int], words: str
) -> None:
    trace = {
        "input_tokens": [2000] * 3,
        "output_tokens": [100] * 3,
        "prefix_tokens": [700, 1000, 1999],
    }
    case = problem(
        "qwen3.6-27b",
        precision="bf16",
        input_length=0,
        output_length=0,
        trace=trace,
        engine=engine,
        engine_version=version,
    )
    assert case.trace is not None and case.trace.prefix_tokens.tolist() == resumed
    assert case.resumes is not None and words in prefixes.resume_sentence(case, case.resumes)


def test_a_replay_counts_states_in_the_cache() -> None:
    case = exact(problem("qwen3.6-27b", precision="bf16"))
    table = pass_table(case=case, candidates=ONE)
    per_token = serving_costs(case=case, candidates=ONE).bytes.kv_per_token[0]
    assert table.state_tokens * per_token == pytest.approx(598.5 / 4 * 2**20, rel=1e-3)
    assert pass_table(case=problem("qwen3-8b"), candidates=ONE).state_tokens == 0


def test_only_layers_with_keys_take_longer_over_long_contexts() -> None:
    """Behind 64 thousand tokens a quarter of Qwen3.6's layers reads them, of its twin with
    attention alone all.
    """
    hybrid = problem("qwen3.6-27b")
    whole = replace(hybrid, model=replace(hybrid.model, blocks=None))
    alone = ServingCandidates.from_configs([ServingConfig(max_num_seqs=1)], concurrency=[1.0])

    def longer(case: ServingProblem) -> float:
        long, short = (
            serving_costs(case=replace(case, input_length=length), candidates=alone).parts[
                "decode"
            ][0]
            for length in (64_000, 1_000)
        )
        return float(long - short)

    assert longer(hybrid) == pytest.approx(0.25 * longer(whole), rel=0.01)


def test_heads_of_every_kind_of_layer_are_divided() -> None:
    """16 key heads of the delta rule, of 24 query heads: three ranks divide the one, not the
    other.
    """
    configs = [ServingConfig(tensor_parallel_size=size, max_num_seqs=8) for size in (1, 2, 3, 4, 8)]
    sizes = ServingCandidates.from_configs(configs, concurrency=[8.0] * 5)
    codes = legality(
        model=catalog.model("qwen3.6-27b"), num_gpus=24, candidates=sizes, longest_request=1
    )
    assert (codes & 1).astype(bool).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_models_of_today_are_ranked(name: str) -> None:
    rows = api.recommend(query(name, precision="fp8"), top=3).recommendations
    for row in rows:
        estimate = row.estimate
        assert (
            estimate.tpot_s is not None
            and estimate.intervals is not None
            and estimate.memory is not None
        )
        low, high = estimate.intervals.tpot_s
        assert low < estimate.tpot_s < high
        assert sum(estimate.parts_s.values()) == pytest.approx(estimate.request_latency_s)
    assert rows


def test_kernels_that_no_served_run_had_widen_the_interval() -> None:
    def width(model: str) -> float:
        intervals = (
            api.recommend(query(model, num_gpus=1, precision="fp8"), top=1)
            .recommendations[0]
            .estimate.intervals
        )
        return intervals.tpot_s[1] / intervals.tpot_s[0]

    assert width("qwen3.6-27b") > 1.02 * width("qwen3-32b")


def test_a_tower_takes_room_and_no_time() -> None:
    """0.46 billion weights of Qwen3.6-27B's, in 16 bits over two ranks."""
    case = problem("qwen3.6-27b", precision="bf16")
    alone = replace(case, model=replace(case.model, tower_parameters=0))
    two = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=2)], concurrency=[1.0])
    both = [serving_costs(case=each, candidates=two) for each in (case, alone)]
    assert np.ravel(both[0].bytes.weights - both[1].bytes.weights)[0] == pytest.approx(460e6)
    assert np.ravel(both[0].parts["decode"])[0] == np.ravel(both[1].parts["decode"])[0]
