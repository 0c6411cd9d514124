"""Each stage by the formulas of the whole: the fullest is the estimate's, and its parts are a
stage's share.
"""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.domain.result import Estimate
from hp_tool.questions import anatomy
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

GPT = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 512},
    "training": {"sequence_length": 2048, "global_batch_size": 256},
}
H100 = {"gpu": "h100-sxm-80gb", "num_gpus": 64}
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8}},
    "interleaved": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "virtual_pipeline_parallel_size": 3,
        }
    },
    "gpipe": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "pipeline_schedule": "gpipe",
        }
    },
    "zb-h1": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "pipeline_schedule": "zb-h1",
        }
    },
    "zbv": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "pipeline_schedule": "zbv",
        }
    },
    "dualpipe": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "pipeline_schedule": "dualpipe",
        }
    },
    "dualpipe-v": {
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 8,
            "pipeline_schedule": "dualpipe-v",
        }
    },
    "dualpipe, ends shorter": {
        "model": "llama-3.1-405b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
        "training": {"sequence_length": 8192, "global_batch_size": 512},
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 16,
            "pipeline_schedule": "dualpipe",
        },
    },
    "dualpipe-v, first and last chunks shorter": {
        "model": "llama-3.1-405b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
        "training": {"sequence_length": 8192, "global_batch_size": 512},
        "parallel": {
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 16,
            "pipeline_schedule": "dualpipe-v",
        },
    },
    "without a pipeline": {"parallel": {"tensor_parallel_size": 8, "recompute": "full"}},
    "experts": {
        "model": "mixtral-8x7b",
        "cluster": H100,
        "parallel": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 4,
            "expert_parallel_size": 8,
        },
    },
    "dense layers first, another token predicted": {
        "model": "deepseek-v3",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512},
        "training": {"sequence_length": 4096, "global_batch_size": 1024},
        "parallel": {
            "pipeline_parallel_size": 16,
            "expert_parallel_size": 32,
            "pipeline_layout": "Et*3|(tt|)*29,m|L",
            "virtual_pipeline_parallel_size": 2,
        },
    },
    "ends a layer shorter": {
        "model": "llama-3.1-405b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
        "training": {"sequence_length": 8192, "global_batch_size": 512},
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 16},
    },
    "dense layers first, ends shorter": {
        "model": "deepseek-v3",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512},
        "training": {"sequence_length": 4096, "global_batch_size": 1024},
        "parallel": {"pipeline_parallel_size": 16, "expert_parallel_size": 32},
    },
    "dense layer first": {
        "model": "deepseek-v2",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 240},
        "training": {"sequence_length": 4096, "global_batch_size": 480},
        "parallel": {"pipeline_parallel_size": 10, "expert_parallel_size": 8, "recompute": "full"},
    },
    "offloaded": {
        "training": GPT["training"] | {"offload": "optimizer"},
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8},
    },
    "balanced by weight": {
        "model": "llama-3-70b",
        "cluster": H100,
        "training": {"sequence_length": 4096, "global_batch_size": 256, "framework": "nanotron"},
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8},
    },
    "longer at the end": {
        "model": "llama-2-7b",
        "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 6},
        "training": {"sequence_length": 2048, "global_batch_size": 24, "framework": "internevo"},
        "parallel": {"pipeline_parallel_size": 6, "recompute": "full"},
    },
    "encoder and decoder": {
        "model": "t5-11b",
        "cluster": H100,
        "parallel": {"tensor_parallel_size": 8},
    },
    "two kinds of GPU": {
        "cluster": {
            "stages": [
                {"gpu": "a100-sxm-80gb", "num_gpus": 256},
                {"gpu": "h100-sxm-80gb", "num_gpus": 256},
            ],
        },
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8},
    },
}


def looked_into(case: str) -> tuple[TrainingProblem, Estimate, tuple[anatomy.StageAnatomy, ...]]:
    query = parse_query(GPT | CASES[case])
    problem, found = resolve_training(query), estimate(query=query, with_fixes=False)
    assert found.parallel is not None and found.memory is not None
    return problem, found, anatomy.stage_anatomies(problem=problem, config=found.parallel)


def test_the_fullest_stage_is_the_estimates(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=str(case)):
            _, found, each = looked_into(case)
            assert found.memory is not None
            fullest = max(each, key=lambda stage: stage.total_bytes / stage.capacity_bytes)
            assert fullest.total_bytes == pytest.approx(found.memory.total_bytes, rel=1e-9)
            if not any(
                stage.total_bytes == fullest.total_bytes for stage in each if stage is not fullest
            ):
                assert fullest.rank == found.memory.worst_stage
            for name, size in fullest.memory_bytes.items():
                assert size == pytest.approx(getattr(found.memory, f"{name}_bytes"), rel=1e-9)


def test_stages_hold_the_whole_model(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=str(case)):
            problem, found, each = looked_into(case)
            assert found.parallel is not None
            copies = 2 if found.parallel.pipeline_schedule == "dualpipe" else 1
            held = sum(stage.layers for stage in each)
            if problem.cluster.kinds:  # stages of a kind hold equally many, rounded up
                assert problem.model.total_layers <= held < problem.model.total_layers + len(each)
            else:
                assert held == pytest.approx(problem.model.total_layers)
            assert (
                sum(stage.holds_embedding for stage in each)
                == sum(stage.holds_output for stage in each)
                == copies
            )


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "gpipe", "zb-h1", "experts"])
def test_the_slowest_stage_sets_the_pace(case: str) -> None:
    problem, found, each = looked_into(case)
    assert found.time is not None and found.parallel is not None
    m = problem.workload.global_batch_size / (
        found.parallel.data_parallel_size * found.parallel.micro_batch_size
    )
    waits = found.time.parts_s["overhead"] - problem.profile.framework.step_overhead_s
    paced = sum(found.time.parts_s[name] for name in each[0].parts_s) + waits
    assert m * max(stage.seconds for stage in each) == pytest.approx(paced, rel=1e-9)
