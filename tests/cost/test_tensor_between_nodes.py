"""Tensor parallelism over several nodes: what pipelines collectives with matmuls reaches as far as
NVLink.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import resolve_training


@pytest.mark.parametrize(
    ("size", "domain", "hides"), [(8, 8, True), (16, 8, False), (16, 16, True)]
)
def test_forward_collectives_hide_inside_a_domain_alone(
    size: int, domain: int, hides: bool
) -> None:
    query = {
        "kind": "training",
        "model": "llama-3.1-405b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512, "nvlink_domain_size": domain},
        "training": {"sequence_length": 8192, "global_batch_size": 512},
    }
    problem = resolve_training(parse_query(query))
    framework = replace(problem.profile.framework, tensor_parallel_forward_overlap=0.0)
    exposed = replace(problem, profile=replace(problem.profile, framework=framework))
    assert problem.profile.framework.tensor_parallel_forward_overlap > 0.0
    config = ParallelConfig(
        tensor_parallel_size=size, data_parallel_size=512 // size, sequence_parallel=True
    )
    rows = Candidates.from_configs([config])
    alone, together = (
        float(each.costs(rows).parts["tensor_parallel"][0]) for each in (exposed, problem)
    )
    assert together < alone if hides else together == alone
