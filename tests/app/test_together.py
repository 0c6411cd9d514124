"""Lines of a batch answered together get what each gets alone, to the byte."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest

from hp_tool.errors import InputError
from hp_tool.questions import schema
from hp_tool.questions.answers import MIN_BATCH_CONFIGURATIONS, answer_lines, cost_together
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem

DENSE: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-22b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 32},
    "training": {"sequence_length": 2048, "global_batch_size": 256, "total_tokens": 300e9},
}
PROBLEMS = {
    "dense": DENSE | {"constraints": {"max_days": 60.0}},
    "experts": DENSE
    | {"model": "mixtral-8x7b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32}},
    "two sides": DENSE | {"model": "nemo-t5-3b"},
    "packed": DENSE
    | {"training": DENSE["training"] | {"sequence_lengths": "synthetic-web-text", "packed": True}},
    "sharded": DENSE
    | {"model": "llama-3-8b", "training": DENSE["training"] | {"framework": "torch-fsdp"}},
    "offloaded": DENSE | {"training": DENSE["training"] | {"offload": "optimizer"}},
}
CONFIGURATIONS = [
    {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "recompute": again,
        "zero_stage": stage,
    }
    for t, p, again, stage in itertools.product(
        (1, 4, 3), (1, 2), ("none", "selective", "full"), (1, 2)
    )
]


def lines_of(problem: dict[str, Any]) -> list[bytes]:
    queries = (
        problem | {"id": str(n), "parallel": parallel} for n, parallel in enumerate(CONFIGURATIONS)
    )
    return [json.dumps(query).encode() for query in queries]


def alone(lines: list[Any]) -> list[str]:
    return [answer_lines([line], task="estimate", top=1)[0] for line in lines]


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_gets_what_it_gets_alone(name: str) -> None:
    lines = lines_of(PROBLEMS[name])
    answers = answer_lines(lines, task="estimate", top=1)
    assert answers == alone(lines)
    assert (
        sum('"memory":{' in answer for answer in answers) >= MIN_BATCH_CONFIGURATIONS
    )  # so they were costed together


def test_of_many_problems_and_mistakes_each_gets_its_own() -> None:
    inference = DENSE | {
        "kind": "inference",
        "training": None,
        "inference": {"input_length": 512, "output_length": 64},
    }
    described = DENSE | {
        "model": {
            "num_hidden_layers": 8,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "vocab_size": 32000,
        }
    }
    others = [
        b"{",
        json.dumps(inference | {"parallel": {"tensor_parallel_size": 8}}).encode(),
        json.dumps(described).encode(),
    ]
    mixed = [
        *itertools.chain(*zip(*(lines_of(problem) for problem in PROBLEMS.values()), strict=True)),
        *others,
    ]
    mixed.insert(7, InputError("too long", code="too_large"))
    assert answer_lines(mixed, task="estimate", top=1) == alone(mixed)


def test_queries_that_differ_in_more_than_their_configuration_are_not_costed_together() -> None:
    def places(*problems: dict[str, Any]) -> list[bool]:
        queries = [
            schema.parse_query(problem | {"parallel": {"tensor_parallel_size": t}})
            for t in (1, 2)
            for problem in problems * 3
        ]
        return [
            each.row is not None
            for each in cost_together([resolve_configuration(query) for query in queries])
        ]

    longer = DENSE | {"training": DENSE["training"] | {"sequence_length": 4096}}
    ordered = DENSE | {"parallel": {"rank_order": "tp-cp-ep-pp-dp"}}
    assert places(DENSE, DENSE) == [True] * 12
    assert places(DENSE, longer) == [False] * 12
    keys = [
        resolve_configuration(schema.parse_query(query)).problem_key()
        for query in (DENSE, DENSE | {"id": "a"}, ordered)
    ]
    assert keys[0] == keys[1] != keys[2]


def test_what_breaks_the_costs_of_all_harms_only_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = lines_of(DENSE)
    expected, costs = alone(lines), TrainingProblem.costs

    def broken(self: TrainingProblem, candidates: Any) -> Any:
        if (
            (candidates.recompute_method == 0).any()
            if candidates.shape
            else candidates.tensor_parallel_size == 4
        ):
            raise ZeroDivisionError
        return costs(self, candidates)

    monkeypatch.setattr(TrainingProblem, "costs", broken)
    with caplog.at_level(logging.ERROR):
        answers = answer_lines(lines, task="estimate", top=1)
    for answer, usual, configuration in zip(answers, expected, CONFIGURATIONS, strict=True):
        harmed = configuration["tensor_parallel_size"] == 4
        assert (json.loads(answer)["status"] == "error") if harmed else (answer == usual)
