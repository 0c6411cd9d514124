"""A burst: so many requests at once, and no others."""

from typing import Any

import pytest

from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError
from hp_tool.questions import schema, serving


def asked(load: dict[str, Any], **inference: Any) -> Any:
    data = {
        "kind": "inference",
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100", "num_gpus": 1},
        "inference": {
            "input_length": 1000,
            "output_length": 100,
            "precision": "bf16",
            "load": load,
            **inference,
        },
        "parallel": {"tensor_parallel_size": 1},
    }
    return schema.parse_query(data)


def burst(num_prompts: int, **inference: Any) -> InferenceEstimate:
    load = {"arrival": "burst", "num_prompts": num_prompts}
    return serving.estimate(query=asked(load, **inference))


def test_first_tokens_wait_for_the_prompts_before_them() -> None:
    few, many = burst(8), burst(128)
    assert few.ttft_s is not None and many.ttft_s is not None and few.ttft_s < 0.3 * many.ttft_s
    assert many.concurrency == 128 and few.feasible and many.feasible
    assert many.tails is not None and many.tails.ttft_s.p99 > 1.5 * many.ttft_s


def test_it_is_the_trace_of_its_requests() -> None:
    trace = {"input_tokens": [1000] * 32, "output_tokens": [100] * 32}
    one = burst(32)
    query = asked(
        {"arrival": "closed"}, trace=trace, concurrency=32, input_length=0, output_length=0
    )
    other = serving.estimate(query=query)
    assert (one.ttft_s, one.tpot_s) == (other.ttft_s, other.tpot_s)


def test_a_burst_beyond_the_cache_queues() -> None:
    assert (burst(4000).ttft_s or 0.0) > 10 * (burst(100).ttft_s or 0.0)


def test_layouts_are_ranked_under_it() -> None:
    query = asked({"arrival": "burst", "num_prompts": 16})
    assert serving.recommend(query=query, top=1).recommendations


@pytest.mark.parametrize(
    ("load", "inference", "field"),
    [
        ({"arrival": "burst"}, {}, "inference.load.num_prompts"),
        ({"arrival": "burst", "num_prompts": 4}, {"concurrency": 4}, "inference.concurrency"),
        ({"arrival": "burst", "num_prompts": 4}, {"disaggregated": {}}, "inference.load.arrival"),
        ({"arrival": "burst", "num_prompts": 10**6}, {}, "inference.load.num_prompts"),
        ({"arrival": "burst", "num_prompts": 4, "warmup": 1}, {}, "inference.load"),
    ],
)
def test_what_no_burst_has_is_refused(
    load: dict[str, Any], inference: dict[str, Any], field: str
) -> None:
    with pytest.raises(HpToolError) as error:
        serving.recommend(query=asked(load, **inference))
    assert getattr(error.value, "field", "") == field
