"""Pipelines whose ends hold a layer fewer, as Llama 3.1 405B (126 layers) is trained on 8 stages of 8 chunks."""

from __future__ import annotations

from typing import Any

import pytest

from hp_tool.app import estimate
from hp_tool.catalog import model
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.stages import stage_layers
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Estimate
from hp_tool.schema import parse_query


def asked(name: str, **parallel: Any) -> Estimate:
    query = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
        # NVIDIA's recipes set grad_reduce_in_fp32 to False; with fp32 this one would need 75.8 GiB.
        "training": {"sequence_length": 8192, "global_batch_size": 512, "precision": "fp8", "gradient_precision": "bf16"},
        "parallel": {"tensor_parallel_size": 8, "pipeline_parallel_size": 8, **parallel},
    }
    return estimate(query=parse_query(query))


def test_405b_runs_as_its_makers_ran_it() -> None:
    result = asked("llama-3.1-405b", virtual_pipeline_parallel_size=8, context_parallel_size=2)
    assert result.feasible, result.reasons
    assert result.time is not None and sum(result.time.parts_s.values()) == pytest.approx(result.time.step_s)


def test_the_layers_of_all_stages_add_up() -> None:
    shape = model("llama-3.1-405b")
    stages = stage_layers(
        shape,
        Candidates.alone(ParallelConfig(pipeline_parallel_size=8, virtual_pipeline_parallel_size=8)),
        framework="megatron-core",
    )
    assert (stages.first.layers, stages.pace, stages.last.layers) == (15, 16, 15)
    assert stages.first.layers + 6 * stages.pace + stages.last.layers == shape.num_hidden_layers
    assert total_parameters(shape) == pytest.approx(405.9e9, rel=1e-3)


@pytest.mark.parametrize(("name", "stages"), [("gpt-22b", 5), ("gpt3-175b", 7), ("llama-2-70b", 32)])
def test_other_splits_stay_illegal(name: str, stages: int) -> None:
    assert "layers_not_divisible" in {reason.code for reason in asked(name, pipeline_parallel_size=stages).reasons}
