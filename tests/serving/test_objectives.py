"""How many devices a serving objective uses, and what the answer says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import hp_tool
from hp_tool.errors import InputError
from hp_tool.questions.answers import RecommendAnswer
from tests.command_line import hp_tool as command

USERS = 200


def ask(model: str = "llama-3-70b", num_gpus: int = 64, **sections: Any) -> dict[str, Any]:
    inference = {"input_length": 2000, "output_length": 500, "precision": "fp8"} | sections.pop(
        "inference", {}
    )
    cluster = {
        "gpu": "h100-sxm-80gb",
        "num_gpus": num_gpus,
        "gpus_per_node": 8,
        "price_per_gpu_hour": 3.0,
    }
    return {
        "kind": "inference",
        "model": model,
        "cluster": cluster,
        "inference": inference,
        **sections,
    }


def first(answer: RecommendAnswer) -> Any:
    return answer.recommendations[0]


@pytest.mark.parametrize("pools", [False, True], ids=["replicas", "pools"])
def test_the_fewest_gpus_run_all_requests_at_once_if_no_target_limits_their_wait(
    pools: bool,
) -> None:
    load = {"concurrency": USERS} | ({"disaggregated": {}} if pools else {})
    for targets in ({}, {"tpot_s": 0.2}):
        answer = hp_tool.recommend(ask(inference=load, targets=targets, objective="min_gpus"))
        best = first(answer)
        assert best.estimate.running_requests >= USERS and best.estimate.ttft_s < 5.0
        assert "no request waits" in best.estimate.provenance["queue"]
        for pair in answer.disaggregated or ():
            assert pair.estimate.max_decode_batch * pair.decode.replicas >= USERS - 1e-6
    fewer = ask(num_gpus=best.set["cluster.num_gpus"] // 2, inference=load, objective="min_gpus")
    refused = hp_tool.recommend(fewer)
    assert not refused.recommendations and "queued" in refused.rejections
    reason = refused.nearest_misses[0].estimate.reasons[0]
    assert reason.code == "queued" and "targets.ttft_s" in reason.message


def test_a_target_on_the_wait_allows_a_queue() -> None:
    patient = first(
        hp_tool.recommend(
            ask(inference={"concurrency": USERS}, targets={"ttft_s": 600}, objective="min_gpus")
        )
    )
    assert patient.estimate.running_requests < USERS and "queue" not in patient.estimate.provenance


def test_a_list_of_concurrencies_is_held_to_the_same_rule() -> None:
    best = first(
        hp_tool.recommend(ask(inference={"concurrency": [USERS, 400]}, objective="min_gpus"))
    )
    assert best.estimate.running_requests >= USERS


def test_an_estimate_of_one_configuration_is_not() -> None:
    one = ask(
        num_gpus=2,
        inference={"concurrency": USERS},
        objective="min_gpus",
        parallel={"tensor_parallel_size": 2},
    )
    assert hp_tool.estimate(one).estimate.feasible


@pytest.mark.parametrize("most", [64, 4], ids=["some", "all"])
def test_the_number_of_gpus_is_printed(most: int) -> None:
    query = ask(num_gpus=most, inference={"concurrency": USERS}, objective="min_gpus")
    printed = command("recommend", "-", "--top=1", stdin=json.dumps(query)).stdout
    assert printed.startswith("Use 4 GPUs with ")
    assert "no request waits for a free place in a batch" in printed


@pytest.mark.parametrize("load", [{"concurrency": 64}, {"request_rate_per_second": 5.0}], ids=str)
@pytest.mark.parametrize("targets", [{}, {"tpot_s": 0.008}], ids=str)
def test_the_cheapest_token_of_any_number_of_gpus_is_found(
    load: dict[str, Any], targets: dict[str, Any]
) -> None:
    answers = [
        hp_tool.recommend(
            ask("llama-3-8b", count, inference=load, targets=targets), top=1
        ).recommendations
        for count in (1, 2, 4, 8, 16)
    ]
    prices = [row[0].estimate.cost_per_million_output_tokens for row in answers if row]
    best = first(
        hp_tool.recommend(ask("llama-3-8b", 16, inference=load, targets=targets, objective="cost"))
    )
    assert best.estimate.cost_per_million_output_tokens == pytest.approx(min(prices))  # type: ignore[type-var]
    assert best.set["cluster.num_gpus"] < 16


def test_of_equally_cheap_numbers_the_larger_waits_less() -> None:
    crowd = {"concurrency": 20_000}
    best = first(hp_tool.recommend(ask(num_gpus=8, inference=crowd, objective="cost")))
    assert best.set["cluster.num_gpus"] == 8
    full = first(hp_tool.recommend(ask(num_gpus=8, inference=crowd)))
    assert (
        best.estimate.cost_per_million_output_tokens == full.estimate.cost_per_million_output_tokens
    )


def test_pools_may_leave_gpus_free_if_cost_decides() -> None:
    load = {"concurrency": 8, "disaggregated": {}}
    pools = hp_tool.recommend(
        ask("llama-3-8b", 16, inference=load, objective="cost"), top=1
    ).disaggregated
    assert pools is not None and pools[0].estimate.num_gpus < 16


TRACE = {
    "arrival_s": [0.5 * k for k in range(60)],
    "input_tokens": [800] * 60,
    "output_tokens": [100] * 60,
}


@pytest.mark.parametrize("trace", [None, TRACE], ids=["lengths", "trace"])
def test_the_space_of_a_list_of_rates_is_that_of_all_rates(trace: dict[str, Any] | None) -> None:
    rates = [1.0, 4.0]
    shared = {} if trace is None else {"trace": trace}
    several, *each = (
        hp_tool.recommend(
            ask(
                "llama-3-8b",
                8,
                inference=shared | {"request_rate_per_second": rate},
                objective="min_gpus",
            )
        )
        for rate in (rates, *([rate] for rate in rates))
    )
    assert several.space.legal == sum(one.space.legal for one in each) > 0
    assert len(several.recommendations) <= several.space.feasible <= several.space.legal
    assert several.space.feasible == sum(one.space.feasible for one in each)


def test_a_trace_under_a_concurrency_is_as_cheap_as_its_means() -> None:
    lengths = {name: TRACE[name] for name in ("input_tokens", "output_tokens")}
    best = first(
        hp_tool.recommend(
            ask("llama-3-8b", 8, inference={"trace": lengths, "concurrency": 16}, objective="cost")
        )
    )
    assert best.set["cluster.num_gpus"] < 8


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"objective": "days"}, "objective"),
        ({"constraints": {"max_days": 3.0}}, "constraints.max_days"),
        ({"constraints": {"max_cost": 3.0}}, "constraints.max_cost"),
        ({"parallel": {"micro_batch_size": 2}}, "parallel.micro_batch_size"),
        ({"training": {"sequence_length": 2048, "global_batch_size": 8}}, "training"),
    ],
)
def test_what_belongs_to_training_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as refused:
        hp_tool.recommend(ask(**changes))
    assert refused.value.field == field
    assert (
        "remove it" in refused.value.message or "for training queries only" in refused.value.message
    )
