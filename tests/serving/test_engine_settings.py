"""Engines with default settings are slower than tuned ones, and less sure."""

from typing import Any

import pytest

from hp_tool.catalog.efficiency import defaults_efficiency
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.questions import schema, serving


def estimated(model: str, **inference: Any) -> InferenceEstimate:
    query = {
        "kind": "inference",
        "model": model,
        "cluster": {"gpu": "h200", "num_gpus": 8},
        "inference": {
            "input_length": 2000,
            "output_length": 500,
            "concurrency": 16,
            "engine": "sglang",
            **inference,
        },
        "parallel": {"tensor_parallel_size": 8},
    }
    return serving.estimate(query=schema.parse_query(query))


@pytest.mark.parametrize("model", ["llama-3.1-70b", "deepseek-v3"])
def test_passes_take_longer_and_intervals_are_no_narrower(model: str) -> None:
    tuned, plain = estimated(model), estimated(model, engine_settings="defaults")
    assert tuned.tpot_s and plain.tpot_s and tuned.intervals and plain.intervals
    slowdown = defaults_efficiency(engine="sglang", silicon="h100").slowdown
    assert 1.0 + 0.7 * (slowdown - 1.0) < plain.tpot_s / tuned.tpot_s < slowdown + 1e-9
    ratios = [ends[1] / ends[0] for ends in (tuned.intervals.tpot_s, plain.intervals.tpot_s)]
    assert ratios[1] >= ratios[0] * (1 - 1e-9)
    assert estimated(model, engine_settings="tuned") == tuned


def test_builds_for_rocm_have_the_doubt_of_all_engines() -> None:
    own, rocm = (
        defaults_efficiency(engine="sglang", silicon=die).tpot_log_sd for die in ("h100", "mi300x")
    )
    assert own < rocm == defaults_efficiency(engine="vllm", silicon="h100").tpot_log_sd
