"""The ranked answer: sorted, legal, within constraints; and an honest empty one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.domain import bounds
from hp_tool.domain.frameworks import FRAMEWORKS
from hp_tool.domain.parallel import ParallelConfig, Recompute
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError
from hp_tool.questions.answers import answer_estimate
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import config_query, estimate, recommend
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.best import search_best
from hp_tool.questions.training.ranking.choice import _count_axes
from hp_tool.questions.training.ranking.rank import cost_space
from hp_tool.space.enumerate import CHUNK

EVERY_RECOMPUTATION = [
    "none",
    "selective",
    *(
        {"granularity": "full", "method": how, "num_layers": n}
        for how in ("uniform", "block")
        for n in range(1, 20)
    ),
]


def query(**change: Any) -> Query:
    base: dict[str, Any] = {
        "kind": "training",
        "model": "gpt-22b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 32},
        "training": {"sequence_length": 2048, "global_batch_size": 64, "total_tokens": 1e9},
    }
    return parse_query(base | change)


def test_best_first_and_each_row_is_the_estimate_of_its_configuration() -> None:
    asked = query()
    found = recommend(query=asked, top=8)
    steps = [row.estimate.time.step_s for row in found.recommendations if row.estimate.time]
    expected = [row.expected_step_s for row in found.recommendations if row.expected_step_s]
    assert len(steps) == 8 and expected[1:] == sorted(expected[1:])
    assert expected[0] <= 1.01 * min(expected)
    assert [row.rank for row in found.recommendations] == list(range(1, 9))
    for row in found.recommendations[:3]:
        alone = estimate(query=replace(asked, parallel=config_query(row.parallel)))
        assert alone.feasible and alone.parallel == row.parallel
        assert alone.time is not None and row.estimate.time is not None
        assert alone.time.step_s == pytest.approx(row.estimate.time.step_s, rel=1e-12)
        assert alone.memory is not None and row.estimate.memory is not None
        assert alone.memory.total_bytes == pytest.approx(row.estimate.memory.total_bytes, rel=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("model", ["mistral-7b", "llama-3.2-1b"], ids=["two ends", "tied ends"])
def test_a_row_takes_what_its_configuration_takes_under_every_framework(
    framework: str, model: str
) -> None:
    """Arrays of many layouts and the numbers of one go through the same formulas: a truth that is
    added as a number counts twice, added as an array once.
    """
    training = {"sequence_length": 2048, "global_batch_size": 16, "framework": framework}
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 8}
    asked = query(model=model, cluster=cluster, training=training)
    rows = recommend(query=asked, top=20).recommendations
    stages = {row.parallel.zero_stage: row for row in rows}
    assert stages
    for row in stages.values():
        one = parse_query(Configuration.from_row(row, query=asked).mapping())
        alone = answer_estimate(one, with_fixes=False).estimate
        assert isinstance(alone, Estimate)
        assert alone.time is not None and row.estimate.time is not None
        assert alone.time.step_s == pytest.approx(row.estimate.time.step_s, rel=1e-12)
        assert alone.memory is not None and row.estimate.memory is not None
        assert alone.memory.total_bytes == pytest.approx(row.estimate.memory.total_bytes, rel=1e-12)


def test_nothing_acceptable_is_faster_than_the_first() -> None:
    asked = query()
    space = cost_space(problem=resolve_training(asked))
    rows = recommend(query=replace(asked, rank_by="mean"), top=5).recommendations
    steps = [row.estimate.time.step_s for row in rows if row.estimate.time]
    assert min(steps) <= space.step_s[space.acceptable].min()
    assert steps[0] <= 1.01 * min(steps)


@pytest.mark.parametrize("keep", [1, 10, 700])
def test_the_best_kept_on_the_way_are_the_best_of_all(keep: int) -> None:
    """Over several chunks, with times that tie: a replica alone does nothing different under ZeRO
    2.
    """
    asked = query(
        parallel={
            "sequence_parallel": [True, False],
            "zero_stage": [0, 1, 2, 3],
            "recompute": EVERY_RECOMPUTATION,
        }
    )
    problem = resolve_training(asked)
    whole, kept = cost_space(problem=problem), cost_space(problem=problem, keep=keep)
    assert whole.legal > 2 * CHUNK
    rows = whole.best(keep)
    assert [kept.candidates.config(row) for row in range(keep)] == [
        whole.candidates.config(int(row)) for row in rows
    ]
    assert (kept.step_s == whole.step_s[rows]).all()
    assert (kept.legal, kept.feasible, kept.rejections) == (
        whole.legal,
        whole.feasible,
        whole.rejections,
    )
    assert whole.legal == len(whole.candidates) and whole.feasible == np.count_nonzero(
        whole.acceptable
    )


def test_the_space_is_counted() -> None:
    fixed = {
        "zero_stage": [0, 1],
        "data_parallel_shard_size": 0,
        "context_parallel_communication": "p2p",
    }
    asked = query(parallel={"recompute": EVERY_RECOMPUTATION[:4], **fixed})
    found = recommend(query=asked)
    space = cost_space(problem=resolve_training(asked))
    assert (found.space.legal, found.space.pruned) == (len(space.candidates), 0)
    assert found.space.feasible == found.space.legal - found.rejections["memory"]


def test_fixed_and_listed_axes_narrow_the_space() -> None:
    found = recommend(
        query=query(
            parallel={"tensor_parallel_size": [2, 4], "recompute": "selective", "zero_stage": 1}
        ),
        top=1000,
    )
    seen = {
        (row.parallel.tensor_parallel_size, row.parallel.recompute, row.parallel.zero_stage)
        for row in found.recommendations
    }
    assert seen == {(2, "selective", 1), (4, "selective", 1)}


def test_a_given_data_parallel_size_holds() -> None:
    found = recommend(query=query(parallel={"data_parallel_size": 4}), top=1000)
    assert {row.parallel.data_parallel_size for row in found.recommendations} == {4}
    assert found.rejections["world_size_mismatch"] > recommend(query=query(), top=1).rejections.get(
        "world_size_mismatch", 0
    )


@pytest.mark.parametrize(
    ("schedule", "interleaved"), [("1f1b", {False}), ("interleaved", {True}), (None, {False, True})]
)
def test_a_given_schedule_holds(schedule: str | None, interleaved: set[bool]) -> None:
    found = recommend(
        query=query(parallel={"pipeline_schedule": schedule, "pipeline_parallel_size": 4}), top=1000
    )
    assert {
        row.parallel.virtual_pipeline_parallel_size > 1 for row in found.recommendations
    } == interleaved


def test_infeasible_is_an_empty_list_with_the_reasons_counted() -> None:
    found = recommend(query=query(model="gpt-1t"))
    assert found.recommendations == ()
    assert found.space.feasible == 0 and found.space.legal > 0
    assert found.rejections["memory"] == found.space.legal


def test_a_deadline_turns_slow_candidates_away() -> None:
    free = recommend(query=query(), top=1000).recommendations
    days = [row.estimate.days for row in free]
    limit = sorted(days)[len(days) // 2]  # type: ignore[type-var]
    found = recommend(query=query(constraints={"max_days": limit}), top=1000)
    assert 0 < len(found.recommendations) < len(free)
    assert all(row.estimate.days <= limit * (1 + 1e-12) for row in found.recommendations)  # type: ignore[operator]
    assert found.rejections["target_missed"] > 0


def test_min_gpus_answers_for_the_smallest_power_of_two_share_that_does_it() -> None:
    found = recommend(query=query(objective="min_gpus"), top=1).recommendations[0]
    used = found.parallel
    gpus = used.tensor_parallel_size * used.pipeline_parallel_size * used.data_parallel_size
    assert gpus < 32
    fewer = query(cluster={"gpu": "a100-sxm-80gb", "num_gpus": gpus})
    assert recommend(query=fewer).space.feasible > 0
    too_few = query(cluster={"gpu": "a100-sxm-80gb", "num_gpus": gpus // 2})
    assert too_few.training is not None
    too_few = replace(too_few, training=replace(too_few.training, offload="none"))
    assert recommend(query=too_few).space.feasible == 0


def test_min_gpus_keeps_to_the_deadline() -> None:
    free = recommend(query=query(objective="min_gpus"), top=1).recommendations[0].estimate.days
    assert free is not None
    found = recommend(
        query=query(objective="min_gpus", constraints={"max_days": free / 2}), top=1
    ).recommendations[0]
    assert found.estimate.days is not None and found.estimate.days <= free / 2


@pytest.mark.parametrize("top", (0, -1, 1001))
def test_top_is_bounded(top: int) -> None:
    with pytest.raises(InputError) as caught:
        recommend(query=query(), top=top)
    assert caught.value.field == "top"


def test_headline_days_of_gpt3_175b() -> None:
    """1,024 A100, 300B tokens: what selective recomputation and sequence parallelism save, from
    Table 5's constants.
    """
    days = {}
    for recompute, sequence_parallel in (("selective", True), ("full", False)):
        asked = query(
            model="gpt3-175b",
            cluster={"gpu": "a100-sxm-80gb", "num_gpus": 1024},
            training={
                "sequence_length": 2048,
                "global_batch_size": 1536,
                "precision": "fp16",
                "attention": "unfused",
                "dropout": 0.1,
                "total_tokens": 300e9,
            },
            parallel={
                "tensor_parallel_size": 8,
                "pipeline_parallel_size": 8,
                "virtual_pipeline_parallel_size": 3,
                "micro_batch_size": 1,
                "recompute": recompute,
                "sequence_parallel": sequence_parallel,
            },
        )
        result = estimate(query=asked)
        assert result.feasible and result.days is not None
        days[recompute] = result.days
    assert 22.5 <= days["selective"] <= 24.5
    assert 29.5 <= days["full"] <= 31.5
    assert 1.29 <= days["full"] / days["selective"] <= 1.35


def test_a_layout_narrows_the_axes_and_stands_in_each_answer() -> None:
    layout = "Et*8|t*9|t*9|t*6L"
    query = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"sequence_length": 8192, "global_batch_size": 64},
        "parallel": {"pipeline_layout": layout},
    }
    result = recommend(query=parse_query(query), top=40)
    assert result.rejections["layout_not_applicable"] > 0
    sizes = {
        (one.parallel.pipeline_parallel_size, one.parallel.virtual_pipeline_parallel_size)
        for one in result.recommendations
    }
    assert sizes == {(4, 1), (2, 2)}
    for one in result.recommendations[:3]:
        found = estimate(
            query=Configuration.from_row(one, query=parse_query(query)).query, with_fixes=False
        )
        assert found.parallel == one.parallel and one.parallel.pipeline_layout == layout
        assert found.time == one.estimate.time and found.memory == one.estimate.memory


def test_what_holds_for_all_candidates_stands_in_each_and_asks_for_the_same_again() -> None:
    said = {
        "rank_order": "tp-dp-cp-ep-pp",
        "context_parallel_communication": "a2a+p2p",
        "hierarchical_context_parallel_sizes": [4, 2],
        "moe_token_dispatcher_type": "flex",
    }
    query = {
        "kind": "training",
        "model": "mixtral-8x7b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 32768, "global_batch_size": 64},
        "parallel": {"context_parallel_size": 8, "expert_parallel_size": [8], "recompute": "full"}
        | said,
    }
    best = recommend(query=parse_query(query), top=3).recommendations
    assert best
    for one in best:
        found = answer_estimate(
            Configuration.from_row(one, query=parse_query(query)).query
        ).estimate
        assert isinstance(found, Estimate)
        assert found.parallel == one.parallel == one.estimate.parallel
        assert found.time == one.estimate.time and found.memory == one.estimate.memory
        assert to_dict(one.parallel)["hierarchical_context_parallel_sizes"] == [4, 2]


@pytest.mark.parametrize(("model", "num_gpus"), [("mixtral-8x7b", 32), ("llama-3-70b", 8)])
def test_a_space_counts_once_however_often_a_ranking_goes_over_it(
    model: str, num_gpus: int
) -> None:
    """With free knobs; offloaded, where nothing fits; for what comes nearest, where nothing
    helps.
    """
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": num_gpus}
    training = {"sequence_length": 8192, "global_batch_size": 64}
    asked = query(model=model, cluster=cluster, training=training)

    def limits(most: int) -> bounds.Bounds:
        return bounds.Bounds(
            max_combinations=most, max_values=64, max_yaml_bytes=1, check=lambda _: None
        )

    with bounds.apply_bounds(once := limits(10**9)):
        search_best(resolve_training(asked), keep=1, rank_by="expected")
    with bounds.apply_bounds(limits(once.counted)):
        recommend(query=asked, top=1)


@pytest.mark.parametrize("shown", [20, pytest.param(200, marks=pytest.mark.components)])
def test_the_row_to_try_does_not_depend_on_how_many_are_shown(shown: int) -> None:
    """Nor do the usual settings that it assumes: rows far down would gain most from other ones."""
    training = {"sequence_length": 8192, "global_batch_size": 512}
    asked = query(
        model="deepseek-v3", cluster={"gpu": "h100-sxm-80gb", "num_gpus": 256}, training=training
    )
    few, many = (recommend(query=asked, top=top).recommendations[0] for top in (1, shown))
    assert few.set == many.set
    few_usual, many_usual = (each.estimate.provenance["usual"] for each in (few, many))
    assert few_usual == many_usual and few_usual["set"]
    assert few.estimate.time == many.estimate.time and few.parallel == many.parallel


def test_layers_that_differ_rule_out_what_is_modelled_for_llamas_alone() -> None:
    training = {"sequence_length": 4096, "global_batch_size": 128, "framework": "torch-fsdp"}
    cluster = {"gpu": "h100-sxm-80gb", "num_gpus": 64}
    found = recommend(query=query(model="qwen3.6-27b", cluster=cluster, training=training), top=2)
    assert [one.rank for one in found.recommendations] == [1, 2]


@pytest.mark.parametrize(
    ("parallel", "layers", "ways"),
    [
        ({"data_parallel_size": 8}, 32, 0),
        ({"tensor_parallel_size": 2, "context_parallel_size": 2}, 32, 2),
        ({"zero_stage": 1}, 32, 0),
        ({"zero_stage": 2}, 32, 1),
        ({"recompute": "full"}, 32, 0),
        ({"recompute": Recompute(granularity="full", method="uniform", num_layers=2)}, 32, 1),
        ({"recompute": Recompute(granularity="full", method="block", num_layers=1)}, 32, 1),
        ({"pipeline_parallel_size": 4}, 32, 1),
        ({"pipeline_parallel_size": 4}, 33, 2),  # uneven stages
    ],
)
def test_the_row_to_try_is_the_one_that_uses_the_fewest_ways(
    parallel: dict[str, Any], layers: int, ways: int
) -> None:
    rows = Candidates.from_configs([ParallelConfig(), ParallelConfig(**parallel)])
    assert _count_axes(rows, layers=layers).tolist() == [0, ways]


def test_recorded_graphs_rule_out_recomputation_that_an_estimate_calls_illegal() -> None:
    """Spaces are enumerated before recomputation; graphs of a mixture exclude whole layers."""
    asked = query(
        model="qwen3-30b-a3b",
        cluster={"gpu": "h100-pcie-80gb", "num_gpus": 8},
        training={
            "sequence_length": 4096,
            "global_batch_size": 32,
            "optimizer_precision": "bf16",
            "cuda_graphs": True,
        },
    )
    found = recommend(query=asked, top=5)
    assert found.recommendations and found.rejections["cuda_graphs_not_applicable"] > 0
    for row in found.recommendations:
        own = parse_query(Configuration.from_row(row, query=asked).mapping())
        assert estimate(query=own).feasible, row.parallel


def test_adapters_of_other_zero_stages_are_costed_apart() -> None:
    """FSDP widens the residual stream of PEFT's models, so a layer's bytes depend on the stage."""
    training = {
        "sequence_length": 2048,
        "global_batch_size": 16,
        "framework": "hf-trainer",
        "task": "lora",
        "lora": {"rank": 16},
    }
    asked = query(
        model="llama-3.1-8b",
        cluster={"gpu": "h100-sxm-80gb", "num_gpus": 2},
        training=training,
        parallel={"recompute": "full"},
    )
    problem = resolve_training(asked)
    configs = [
        ParallelConfig(
            data_parallel_size=2, zero_stage=stage, recompute=Recompute(granularity="full")
        )
        for stage in (0, 2, 3)
    ]
    together = problem.costs(Candidates.from_configs(configs)).memory_parts["activations"]
    alone = [
        float(problem.costs(Candidates.alone(each)).memory_parts["activations"]) for each in configs
    ]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)
    assert alone[2] > 1.5 * alone[1]
