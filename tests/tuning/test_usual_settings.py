"""Searches of MoE models run under the usual settings that rankings assume, or name why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.measurement import Hardware
from hp_tool.loop.tuning.problem import build_problem
from hp_tool.loop.tuning.training_result import TuningProblem
from hp_tool.questions import schema
from hp_tool.questions.training import recommend
from hp_tool.wording.fit import unrun_settings_words

NUM_GPUS = 16
HARDWARE = Hardware(gpu="h100-sxm-80gb", num_gpus=NUM_GPUS)
RECIPE = "training.recipe"


def asked(model: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": NUM_GPUS, "gpus_per_node": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 128},
        "parallel": {"recompute": "none", "context_parallel_size": 1, "zero_stage": 1},
        **changes,
    }


def build(query: dict[str, Any], **changes: Any) -> TuningProblem:
    problem = build_problem(
        query=schema.parse_query(query), query_json=query, hardware=HARDWARE, **changes
    )
    assert isinstance(problem, TuningProblem)
    return problem


def test_a_layout_has_the_same_figures_in_a_ranking_and_in_a_search() -> None:
    query = asked("mixtral-8x7b")
    problem = build(query)
    row = recommend(query=schema.parse_query(query), top=1).recommendations[0]
    assert row.estimate.time is not None
    assert problem.training.chosen[RECIPE] == "megatron-bridge-26.08"
    costs = problem.training.costs(Candidates.from_configs([row.parallel]))
    assert float(costs.row(0).step_s) == row.estimate.time.step_s
    assert problem.search.row(row.parallel) is not None
    assert problem.unrun == ()
    stored = schema.parse_query(problem.search.query)
    assert stored.training is not None and stored.training.recipe == "megatron-bridge-26.08"


def test_a_resumed_search_uses_the_settings_of_its_runs() -> None:
    query = asked("mixtral-8x7b")
    first = build(query)
    resumed = build(query, chosen=first.training.chosen)
    assert resumed.search.problem_digest == first.search.problem_digest
    assert resumed.search.candidates.shape == first.search.candidates.shape
    plain = build(query, chosen={})
    assert plain.search.problem_digest != first.search.problem_digest
    assert RECIPE not in plain.training.chosen


def test_settings_that_the_profiler_does_not_support_are_named() -> None:
    query = asked("qwen3-30b-a3b")
    problem = build(query)
    row = recommend(query=schema.parse_query(query), top=1).recommendations[0]
    assert RECIPE not in problem.training.chosen
    unrun = problem.unrun_settings(Candidates.from_configs([row.parallel]))
    assert unrun is not None and row.estimate.time is not None
    assert unrun["step_s_with"] == row.estimate.time.step_s
    words = unrun_settings_words(unrun)
    assert "recipe megatron-bridge-26.08" in words
    assert "training.cuda_graph_modules and training.cuda_graphs" in words


@pytest.mark.parametrize(
    ("command", "unset"),
    [
        (["run.py", "{file:nemo}"], None),
        (["pretrain_gpt.py", "{flags:megatron-lm}"], "training.cross_entropy."),
        (["train.py", "{micro_batch_size}"], "training.gradient_precision and training.cross"),
    ],
)
def test_a_trainers_command_runs_a_recipe_that_its_flags_express(
    command: list[str], unset: str | None
) -> None:
    trainer: dict[str, Any] = {"command": command, "reader": "megatron-lm"}
    if "{micro_batch_size}" in command:
        trainer["axes"] = ["micro_batch_size"]
    problem = build(
        asked(
            "mixtral-8x7b",
            trainer=trainer,
            search={"launcher": "slurm", "fidelity": "full"},
            parallel={"tensor_parallel_size": 2, "expert_parallel_size": 8},
        )
    )
    assert (RECIPE in problem.training.chosen) is (unset is None)
    row = problem.search.candidates.take(np.arange(1))
    words = unrun_settings_words(problem.unrun_settings(row))
    assert (f"the trainer's command does not set its {unset}" in words) if unset else not words
