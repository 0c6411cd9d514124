"""Pipelines laid out by hand: equal ones cost what the plain formulas say, uneven ones what their
stages hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.model_states import stage_parameters
from hp_tool.cost.pipeline_parts import stage_kinds
from hp_tool.cost.pipeline_stages import complete_pipeline
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery, Recompute
from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.loop.tuning import resolve_search
from hp_tool.questions.training import estimate
from hp_tool.questions.training.evaluate import resolve_config
from hp_tool.questions.training.problem import resolve_training
from tests.cost.cases import columns


def query(
    layout: str | None,
    *,
    model: str = "llama-3-8b",
    gpus: int = 64,
    batch: int = 512,
    **parallel: Any,
) -> Query:
    return Query(
        kind="training",
        model=model,
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=gpus),
        training=TrainingWorkload(sequence_length=4096, global_batch_size=batch),
        parallel=ParallelQuery(
            **{"pipeline_parallel_size": 4, "micro_batch_size": 1} | parallel,
            pipeline_layout=layout,
        ),
    )


def asked(layout: str | None, **said: Any) -> Estimate:
    return estimate(query=query(layout, **said), with_fixes=False)


EQUAL = [
    ("Et*8|t*8|t*8|t*8L", {"tensor_parallel_size": 2}),
    ("Et*8|t*8|t*8|t*8L", {"recompute": "full", "zero_stage": 3}),
    ("Et*4|(t*4|)*6,t*4L", {"virtual_pipeline_parallel_size": 2, "recompute": "selective"}),
    ("Et*32L", {"pipeline_parallel_size": 1, "recompute": "full"}),
    ("Et*7|t*7|t*7|t*7L", {"model": "llama-3.2-3b", "tensor_parallel_size": 2}),  # tied embeddings
    ("Et*8|t*8|t*8|t*8L", {"model": "mixtral-8x7b", "expert_parallel_size": 8}),
]


@pytest.mark.parametrize(("layout", "said"), EQUAL, ids=range(len(EQUAL)))
def test_equal_stages_cost_what_they_cost_unsaid(layout: str, said: dict[str, Any]) -> None:
    plain, laid_out = asked(None, **said), asked(layout, **said)
    assert (
        plain.memory is not None
        and laid_out.memory is not None
        and plain.time is not None
        and laid_out.time is not None
    )
    assert laid_out.time.step_s == pytest.approx(plain.time.step_s, rel=1e-12)
    assert laid_out.time.parts_s == pytest.approx(plain.time.parts_s, rel=1e-12)
    assert laid_out.memory.total_bytes == pytest.approx(plain.memory.total_bytes, rel=1e-12)
    assert laid_out.memory.worst_stage == plain.memory.worst_stage


def test_a_shorter_last_stage_is_faster_where_the_output_layer_is_long() -> None:
    equal, shorter = asked("Et*8|t*8|t*8|t*8L").time, asked("Et*8|t*9|t*9|t*6L").time
    assert equal is not None and shorter is not None
    assert shorter.step_s < equal.step_s


def test_the_worst_stage_may_be_between_the_ends() -> None:
    found = asked("Et*2|t*20|t*5|t*5L").memory
    assert found is not None and found.worst_stage == 1
    alone = asked("E|t*16|t*16|L").memory
    assert alone is not None and alone.worst_stage == 1


def test_a_stage_without_layers_costs_time_and_memory_of_its_end_alone() -> None:
    found = asked("Et*16|t*16|L", pipeline_parallel_size=3, gpus=48, batch=480)
    assert found.time is not None and found.memory is not None
    assert all(np.isfinite(seconds) and seconds >= 0.0 for seconds in found.time.parts_s.values())
    for recompute in ("full", Recompute(granularity="full", method="block", num_layers=2)):
        assert (
            asked(
                "Et*16|t*16|L", pipeline_parallel_size=3, gpus=48, batch=480, recompute=recompute
            ).time
            is not None
        )


def test_tune_refuses_what_it_does_not_run() -> None:
    with pytest.raises(UnsupportedError) as caught:
        resolve_search(query("Et*8|t*9|t*9|t*6L"))
    assert caught.value.field == "parallel.pipeline_layout"


def test_deepseek_v3_laid_out_as_megatron_core_documents() -> None:
    layout = "Et*3|(tt|)*29,m|L"
    said: dict[str, Any] = {
        "model": "deepseek-v3",
        "gpus": 1024,
        "batch": 4096,
        "pipeline_parallel_size": 16,
        "expert_parallel_size": 64,
        "recompute": "full",
    }
    found = asked(layout, **said)
    assert found.parallel is not None and found.parallel.virtual_pipeline_parallel_size == 2
    assert found.time is not None and found.time.step_s == pytest.approx(
        sum(found.time.parts_s.values())
    )
    problem = resolve_training(query(layout, **said))
    kinds = stage_kinds(parse_layout(layout), stages=16, model=problem.model)
    assert sum(kind.ranks for kind in kinds) == 16
    assert sum(kind.ranks * (sum(kind.kinds) - kind.extra_layers) for kind in kinds) == 61
    assert [kind.kinds[0] for kind in kinds if kind.kinds[0]] == [3]  # all on the first rank
    (multi_token,) = [kind for kind in kinds if kind.extra_layers]
    assert (multi_token.rank, multi_token.embedding_copies, multi_token.output) == (14, 1, 0)
    # Of ranks with 2 + 2 layers every chunk in flight has two; the first rank holds more of its
    # chunk of three.
    assert kinds[0].chunk_layers > 2.5 and kinds[1].chunk_layers == 2.0


def test_multi_token_prediction_brings_a_copy_of_the_embedding() -> None:
    """On the last stage of equal ones too, where no layout says so."""
    problem = resolve_training(
        query(None, model="deepseek-v3", gpus=1024, batch=4096, expert_parallel_size=64)
    )
    model = problem.model
    candidates = Candidates.alone(
        ParallelConfig(pipeline_parallel_size=4, expert_parallel_size=64, data_parallel_size=256)
    )
    tied = dataclasses.replace(problem, model=dataclasses.replace(model, tie_word_embeddings=True))
    with_copy, without = (
        stage_parameters(case, candidates, complete_pipeline(case, candidates))[1]
        for case in (problem, tied)  # whose output layer is the copy
    )
    assert float(with_copy - without) == model.vocab_size * model.hidden_size


def test_many_candidates_and_one_alone_agree() -> None:
    layout = "Et*5|t*4|t*4|t*4|t*4|t*4|t*4|t*3L"
    problem = resolve_training(query(layout))
    configs = [
        resolve_config(
            ParallelQuery(
                pipeline_parallel_size=p,
                tensor_parallel_size=t,
                micro_batch_size=1,
                pipeline_layout=layout,
            ),
            num_gpus=64,
        )
        for p, t in ((8, 1), (4, 2), (2, 4), (8, 4))
    ]
    together = problem.costs(Candidates.from_configs(configs))
    for place, config in enumerate(configs):
        one = columns(problem.costs(Candidates.alone(config)))
        for name, values in columns(together).items():
            assert np.broadcast_to(values, (len(configs),))[place] == pytest.approx(
                one[name], rel=1e-12
            ), name
