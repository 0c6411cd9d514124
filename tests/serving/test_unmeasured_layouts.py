"""Layouts of a kind that nobody measured are first only where they are clearly better."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions import schema, serving
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.questions.serving.ranked import CostedSpace, cost_space
from hp_tool.wording.words import assumption_sentences


def asked(**parallel: Any) -> Any:
    return schema.parse_query(
        {
            "kind": "inference",
            "model": "llama-3.1-70b",
            "cluster": {"gpu": "h100", "num_gpus": 8},
            "inference": {
                "input_length": 2000,
                "output_length": 200,
                "concurrency": 64,
                "precision": "fp8",
            },
            "parallel": parallel,
        }
    )


def two(score: list[float]) -> CostedSpace:
    """A pipeline of these scores beside a layout without one."""
    query = asked()
    space = cost_space(query=query, problem=resolve_serving(query))
    configs = [
        ServingConfig(tensor_parallel_size=4, pipeline_parallel_size=2),
        ServingConfig(tensor_parallel_size=8),
    ]
    candidates = ServingCandidates.from_configs(configs, concurrency=[64, 64])
    every = np.ones(2, dtype=bool)
    return replace(space, candidates=candidates, score=np.array(score), acceptable=every)


@pytest.mark.parametrize(
    ("score", "first", "better"),
    [
        ([1.0, 1.09], 1, pytest.approx(1 - 1 / 1.09)),
        ([1.0, 1.11], 0, None),
        ([-1.09, -1.0], 1, pytest.approx(0.09)),
        ([-1.11, -1.0], 0, None),
        ([1.2, 1.0], 1, None),
    ],
)
def test_a_pipeline_needs_a_tenth(score: list[float], first: int, better: Any) -> None:
    space = two(score)
    assert space.best(1).tolist() == [first]
    passed = space.better_unmeasured(first)
    assert (passed[1] if passed else None) == better


def test_a_pipeline_that_is_asked_for_is_answered() -> None:
    rows = serving.recommend(query=asked(pipeline_parallel_size=2), top=1).recommendations
    assert rows[0].parallel.pipeline_parallel_size == 2


def test_the_answer_says_what_it_would_win() -> None:
    row = serving.recommend(query=asked(), top=1).recommendations[0]
    better = ServingConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    said = {"passed_over": {"parallel": better, "better_by_fraction": 0.042}}
    sentence = (
        "TP 4 x PP 2 is predicted 4.2% better than rank 1, but no measured run has a pipeline "
        "inside a replica."
    )
    assert sentence in assumption_sentences({**row.estimate.provenance, **said})
