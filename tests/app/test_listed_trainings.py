"""Lists under `training`: what changes the numbers that are trained is chosen only where the query
lists values.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from hp_tool.domain.result import Recommendation
from hp_tool.errors import InputError
from hp_tool.formats.exchange.export import export
from hp_tool.questions.answers import answer_estimate, answer_recommend
from hp_tool.questions.schema import parse_query, query_mapping, to_dict
from hp_tool.questions.training import recommend
from hp_tool.wording.columns import varied_columns


def asked(**training: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 16, **training},
        "parallel": {"micro_batch_size": 1, "context_parallel_size": 1},
    }


def ranked(top: int = 4, **training: Any) -> tuple[Recommendation, ...]:
    return recommend(query=parse_query(asked(**training)), top=top).recommendations


def expected_s(row: Recommendation) -> float:
    return row.expected_step_s or math.inf


def chosen(row: Recommendation, key: str) -> Any:
    assumed: Any = row.estimate.provenance["assumed"]
    return assumed[f"training.{key}"]


def test_a_list_frees_a_precision_and_each_row_names_its_own() -> None:
    both = ranked(top=200, precision=["bf16", "fp8"], gradient_precision=["fp32", "bf16"])
    pairs = {(chosen(row, "precision"), chosen(row, "gradient_precision")) for row in both}
    assert len(pairs) == 4
    fastest = {key: ranked(top=1, precision=key[0], gradient_precision=key[1])[0] for key in pairs}
    for key, alone in fastest.items():
        first = next(
            row
            for row in both
            if (chosen(row, "precision"), chosen(row, "gradient_precision")) == key
        )
        assert expected_s(first) <= 1.01 * expected_s(alone)
    assert min(map(expected_s, both)) == min(map(expected_s, fastest.values()))
    assert {"precision", "gradient precision"} <= {column.head for column in varied_columns(both)}


def test_batches_are_ranked_by_the_time_of_a_token() -> None:
    rows = ranked(global_batch_size=[8, 64])
    costs = [row.expected_token_s or math.inf for row in rows]
    assert costs[1:] == sorted(costs[1:])
    assert chosen(rows[0], "global_batch_size") == 64 and expected_s(rows[0]) > expected_s(
        ranked(global_batch_size=8)[0]
    )


def test_an_answer_asks_for_the_same_again_and_exports_what_it_chose() -> None:
    query = parse_query(asked(precision=["fp8", "bf16"]))
    answer = answer_recommend(query, top=1)
    assert parse_query(query_mapping(query)) == query and answer.query == query_mapping(query)
    assert chosen(answer.recommendations[0], "precision") == "fp8"  # type: ignore[arg-type]
    assert "--fp8-format" in export(result=to_dict(answer), format="megatron-lm")


def test_nothing_is_offloaded_where_one_of_the_trainings_fits_without() -> None:
    query = asked(optimizer_precision=["fp32", "fp8"])
    query |= {"model": "llama-2-70b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8}}
    query["parallel"] = {"tensor_parallel_size": 8, "micro_batch_size": 1, "zero_stage": 1}
    query["training"] |= {"gradient_precision": "bf16", "master_precision": "remainder"}
    for precisions, offloads in ((["fp32", "fp8"], {None}), (["fp32"], {"optimizer"})):
        query["training"]["optimizer_precision"] = precisions
        rows = recommend(query=parse_query(query), top=20).recommendations
        assumed: list[Any] = [row.estimate.provenance["assumed"] for row in rows]
        assert {each.get("training.offload") for each in assumed} == offloads


def test_one_training_is_asked_for_elsewhere_and_no_more_than_can_be_ranked() -> None:
    query = parse_query(asked(precision=["bf16", "fp8"]))
    for ask in (
        lambda: answer_estimate(query),
        lambda: answer_recommend(query, top=1, sensitivity=True),
    ):
        with pytest.raises(InputError, match="has 2 values") as caught:
            ask()
        assert caught.value.field == "training.precision"
    with pytest.raises(InputError, match="the lists under training have 18 combinations"):
        ranked(
            precision=["bf16", "fp8", "mxfp8"],
            gradient_precision=["fp32", "bf16"],
            optimizer_precision=["fp32", "bf16", "fp8"],
        )
    with pytest.raises(InputError, match="expected 'bf16'"):
        ranked(precision=["bf16", "bf17"])
