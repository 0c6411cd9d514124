"""Mutated query files through every door: answers or errors, never a traceback, never late."""

from __future__ import annotations

import json
import secrets

import pytest

from hp_tool.questions.answers import answer_lines
from tests.service.fuzzing import fuzz
from tests.service.mutations import SEEDS, mutated


def test_what_is_mutated_was_valid_before() -> None:
    for query in SEEDS:
        assert (
            json.loads(answer_lines([json.dumps(query).encode()], task="estimate", top=1)[0])[
                "status"
            ]
            == "ok"
        ), query


def test_no_mutation_is_answered_with_a_fault() -> None:
    told = fuzz(queries=400, seed=1)
    assert told["faults"] == []
    assert len(set(mutated(count=400, seed=1))) > 300
    assert told["outcomes"]["line"]["ok"] > 10  # not everything is refused at the door
    assert {"unknown_key", "invalid_value", "syntax"} <= set(told["outcomes"]["line"])
    assert set(told["outcomes"]["http"]) == {"200", "422"}


@pytest.mark.components
def test_generated_requests_of_a_fresh_seed_are_answered_without_a_server_error() -> None:
    """Run `benchmarks.service.fuzz` for 20 s; a failure prints the seed and each request as a curl
    command.
    """
    from benchmarks.service.fuzz import fuzz as fuzz_api

    seed = secrets.randbelow(1_000_000)
    tally = fuzz_api(requests=10_000, seed=seed, seconds=20.0, at_once=4)
    assert sum(tally.statuses.values()) > 50
    assert tally.faults == [], f"python -m benchmarks.service.fuzz --seed {seed}"


@pytest.mark.long
def test_none_of_many_mutations_is_answered_with_a_fault() -> None:
    assert fuzz(queries=20_000, seed=2)["faults"] == []
