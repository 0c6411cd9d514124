"""Caches of layers that need different amounts of memory: hand arithmetic beside what engines
print, and laws.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.serving.cache import (
    block_tokens,
    cached_layers,
    group_size,
    grouped_bytes,
    laid_out_bytes,
    shared_page,
)
from hp_tool.cost.serving.operations import cached_tokens, requests_in_cache
from hp_tool.questions import schema
from hp_tool.questions.serving.problem import ServingProblem, resolve_serving

MIB = 1 << 20
ONE = np.ones(1, dtype=np.int64)
UNLIKE = ["qwen3.6-27b", "gemma-4-31b", "gpt-oss-120b", "gemma-4-26b-a4b", "qwen3.5-397b-a17b"]


def case(model: str, **inference: Any) -> ServingProblem:
    engine = {"engine": "vllm", "input_length": 1000, "output_length": 100, "concurrency": 1}
    return resolve_serving(
        schema.parse_query(
            {
                "kind": "inference",
                "model": model,
                "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
                "inference": engine | {"precision": "bf16"} | inference,
            }
        )
    )


def test_states_and_keys_share_pages_as_vllm_prints() -> None:
    """Qwen3.5-27B has the layers of Qwen3.6-27B. vLLM 0.19 printed 290,864 tokens by its old rule
    (blocks / 4 groups x 784) and 33.04 requests of 32,768 tokens: 1,487 blocks of 42 + 3 pages
    (vllm-project/vllm#40691).
    """
    each = case("qwen3.6-27b")
    layers = cached_layers(each, ONE)
    page = shared_page(layers)
    recurrent, attention = layers
    # 48 heads x 128 x 128 in fp32, and 3 inputs of 48 x 128 + 2 x 16 x 128 channels in 16 bits.
    assert recurrent.state_bytes[0] == 48 * 128 * 128 * 4 + 3 * (6144 + 4096) * 2
    assert attention.token_bytes[0] == 2 * 4 * 256 * 2
    assert block_tokens(attention, page)[0] == 784 == math.ceil(3_207_168 / 4096 / 16) * 16
    assert (recurrent.count, attention.count) == (48, 16)
    request = grouped_bytes(layers, 32_768)[0]
    assert request == 16 * 784 * 4096 * (math.ceil(32_768 / 784) + 3)
    pool = 1_487 * 16 * 784 * 4096
    assert pool / request == pytest.approx(33.04, abs=0.005)
    assert 1_487 // 4 * 784 == 290_864


def test_a_narrow_cache_has_longer_blocks() -> None:
    """vLLM prints an attention block size of 1,568 tokens for Qwen3.6-27B with keys in 8 bits, and
    a Mamba page padded by 0.13%.
    """
    layers = cached_layers(case("qwen3.6-27b", kv_cache_precision="fp8"), ONE)
    page, state = shared_page(layers)[0], layers[0].state_bytes[0]
    assert block_tokens(layers[1], np.array([page]))[0] == 1568
    assert page / state - 1 == pytest.approx(0.0013, abs=5e-5)


def test_drafting_layers_lengthen_every_group() -> None:
    """With its own layer for drafts, 17 layers with keys: vLLM 0.25 printed 3.21 requests of
    262,144 tokens in 14.68 GiB on each of two RTX 5090 with keys in 8 bits and three drafted
    tokens: groups of 17 layers, and 168 + 3 x (1 + 3) blocks of 1,568 tokens.
    """
    drafts = {"num_speculative_tokens": 3, "acceptance_rate": 0.7, "draft_cost_fraction": 0.1}
    two = case("qwen3.6-27b", kv_cache_precision="fp8", speculative=drafts)
    taken = laid_out_bytes(two, 2 * ONE, 262_144, chunk=8192, shared=False)
    assert taken is not None
    assert taken[0] == 17 * 1568 * 1024 * (math.ceil(262_144 / 1568) + 3 * (1 + 3))
    assert 14.68 * 2**30 / taken[0] == pytest.approx(3.21, abs=0.005)


def test_windows_take_blocks_of_another_length() -> None:
    """Gemma 4 31B on two ranks: a windowed layer's page of 16 tokens is 128 KiB, and 32 tokens of
    the others; six groups of ten layers. 131,072 tokens with passes of 4,096 take 4,096 blocks,
    and five times (1,023 + 4,096) / 16 + 1.
    """
    each = case("gemma-4-31b")
    layers = cached_layers(each, 2 * ONE)
    page = shared_page(layers)
    assert page[0] == 128 * 1024
    assert [(it.count, it.window, block_tokens(it, page)[0]) for it in layers] == [
        (50, 1024, 16),
        (10, None, 32),
    ]
    taken = grouped_bytes(layers, 131_072, chunk=4096)[0]
    assert taken == 10 * 128 * 1024 * (4096 + 5 * (320 + 1))


@pytest.mark.parametrize(
    ("counts", "size"), [([50, 10], 10), ([52, 10], 10), ([12, 13], 13), ([20, 30], 20), ([7], 7)]
)
def test_groups_have_the_layers_of_the_rarest_kind(counts: list[int], size: int) -> None:
    assert group_size(counts) == size


def test_the_last_group_is_padded() -> None:
    """52 layers in groups of ten take six groups, as 60 would."""
    layers = cached_layers(case("gemma-4-31b"), ONE)
    uneven = (replace(layers[0], count=52), layers[1])
    even = (replace(layers[0], count=60), layers[1])
    assert grouped_bytes(uneven, 50_000)[0] == grouped_bytes(even, 50_000)[0]


def test_early_releases_keep_all_tokens_of_windowed_layers() -> None:
    old, new = (case("gemma-4-31b", engine_version=release) for release in ("0.9.0", "0.9.1"))
    taken = [
        float(np.ravel(cached_tokens(each, ONE, 65_536, chunk=2048))[0]) for each in (old, new)
    ]
    assert taken[0] == pytest.approx(65_536, rel=1e-3)
    # A sixth of the layers, with half of the numbers, and five sixths up to 3,072 tokens.
    kept = (10 * 4096 * 65_536 + 50 * 8192 * (3072 + 16)) / (10 * 4096 + 50 * 8192)
    assert taken[1] == pytest.approx(kept, rel=1e-3)


def test_sglang_divides_the_cache_between_windows_and_the_rest() -> None:
    """GPT-OSS 120B: 18 layers of each kind and 0.8 windowed tokens for each of the others: a long
    request takes 1.8 / 2 of its tokens, one within the window 1 / 0.8 of that.
    """
    each = case("gpt-oss-120b", engine="sglang", precision="mxfp4")
    long, short = (
        float(np.ravel(cached_tokens(each, ONE, tokens))[0]) for tokens in (100_000, 100)
    )
    assert long == pytest.approx(0.9 * 100_000, rel=1e-12)
    assert short == pytest.approx(0.9 * 100 / 0.8, rel=1e-12)


def test_sglang_divides_the_cache_between_states_and_keys() -> None:
    """Keys get 1 / 1.9 of the cache; three states per request fill the rest of short ones."""
    each = case("qwen3.6-27b", engine="sglang")
    long, short = (
        float(np.ravel(cached_tokens(each, ONE, tokens))[0]) for tokens in (200_000, 100)
    )
    assert long == pytest.approx(1.9 * 200_000, rel=1e-12)
    states, per_token = 3 * 48 * 3_207_168, 16 * 4096
    assert short == pytest.approx(1.9 / 0.9 * states / per_token, rel=1e-12)


@given(
    model=st.sampled_from(UNLIKE),
    engine=st.sampled_from(["vllm", "sglang", "trtllm"]),
    length=st.integers(1, 200_000),
    more=st.integers(0, 50_000),
    ranks=st.sampled_from([1, 2, 4, 8]),
)
def test_longer_requests_never_take_less(
    model: str, engine: str, length: int, more: int, ranks: int
) -> None:
    """Padding and pools only add to what layers cache."""
    each = case(model, engine=engine)
    exact = replace(each, engine=replace(each.engine, cache_layout="exact"))
    taken = [
        float(np.ravel(cached_tokens(each, ranks * ONE, tokens))[0])
        for tokens in (length, length + more)
    ]
    assert 0.0 < taken[0] <= taken[1]
    least = float(np.ravel(cached_tokens(exact, ranks * ONE, length))[0])
    # States of 16-bit convolutions are smaller than those in fp32 by less than this.
    assert taken[0] >= 0.95 * least


@given(
    model=st.sampled_from([*UNLIKE, "qwen3-8b", "llama-3.1-70b", "deepseek-v3", "glm-5"]),
    engine=st.sampled_from(["vllm", "sglang", "trtllm"]),
    length=st.integers(16, 100_000),
    shares=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    groups=st.integers(1, 64),
    room=st.floats(1e3, 1e8),
)
def test_a_larger_shared_prefix_never_takes_more_memory(
    model: str, engine: str, length: int, shares: tuple[float, float], groups: int, room: float
) -> None:
    less, more = sorted(shares)
    each = replace(case(model, engine=engine), input_length=length, prefix_groups=groups)
    fewer, others = (
        float(
            np.ravel(
                requests_in_cache(
                    replace(each, prefix_cache_hit_rate=share), ONE, room, float(length + 100)
                )
            )[0]
        )
        for share in (less, more)
    )
    assert fewer <= others * (1 + 1e-9)
