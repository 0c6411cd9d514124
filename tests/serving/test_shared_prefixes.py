"""Prefixes that requests share lie in the cache once."""

from typing import Any

import pytest

from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError
from hp_tool.questions import schema, serving

A_TOKEN = 2 * 32 * 8 * 128 * 2
"""Bytes of a token's keys and values in Llama 3.1 8B."""


def estimated(share: float, concurrency: int = 64, **inference: Any) -> InferenceEstimate:
    query = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100", "num_gpus": 1},
        "inference": {
            "input_length": 10_000,
            "output_length": 200,
            "concurrency": concurrency,
            "precision": "bf16",
            "prefix_cache_hit_rate": share,
            **inference,
        },
        "parallel": {"tensor_parallel_size": 1},
    }
    return serving.estimate(query=schema.parse_query(query))


def test_memory_falls_and_room_rises_with_the_share() -> None:
    shares = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99]
    found = [estimated(share, concurrency=16) for share in shares]
    used = [each.memory.kv_cache_bytes for each in found if each.memory is not None]
    assert used == sorted(used, reverse=True) and used[0] > 5 * used[-1]
    room = [each.kv_cache.requests for each in found if each.kv_cache is not None]
    assert room == sorted(room) and room[-1] > 9 * room[0]
    most = [each.max_concurrency or 0 for each in found]
    assert most == sorted(most)


def test_a_cache_holds_a_prefix_once_and_the_rest_of_each_request() -> None:
    found = estimated(0.9).kv_cache
    assert found is not None
    tokens = found.bytes_per_device / A_TOKEN
    assert found.requests == int((tokens - 9000) / (1000 + 200))
    grouped = estimated(0.9, prefix_groups=20).kv_cache
    assert grouped is not None
    assert grouped.requests == int((tokens - 20 * 9000) / 1200)


def test_requests_with_prefixes_of_their_own_share_nothing() -> None:
    apart = estimated(0.9, prefix_groups=10_000)
    none = estimated(0.0)
    assert apart.kv_cache is not None and none.kv_cache is not None
    assert apart.kv_cache.requests == none.kv_cache.requests
    assert apart.max_concurrency == none.max_concurrency


@pytest.mark.parametrize(
    "inference",
    [
        {"prefix_cache_hit_rate": 0.0, "prefix_groups": 4},
        {"prefix_groups": 4, "concurrency": None, "load": {"arrival": "burst", "num_prompts": 8}},
    ],
)
def test_groups_that_say_nothing_are_refused(inference: dict[str, Any]) -> None:
    with pytest.raises(HpToolError) as error:
        estimated(0.5, **inference)
    assert getattr(error.value, "field", "") == "inference.prefix_groups"
