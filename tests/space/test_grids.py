"""A grid of candidates costs what its rows cost, and a row what it costs alone, whatever the query
asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import resolve_training
from hp_tool.space import default_axes, legal_chunks
from tests.cost.cases import columns

QUERIES: dict[str, dict[str, Any]] = {
    "dense": {
        "model": "gpt-22b",
        "parallel": {"zero_stage": [0, 1, 2, 3], "sequence_parallel": [False, True]},
    },
    "uneven stages": {
        "model": "llama-3.1-405b",
        "parallel": {"pipeline_parallel_size": [1, 2, 4, 8]},
    },
    "mixture of experts": {
        "model": "mixtral-8x7b",
        "parallel": {"zero_stage": [1, 3], "expert_tensor_parallel_size": [1, 2]},
    },
    "latent attention, multi-token prediction": {
        "model": "deepseek-v3",
        "training": {"precision": "fp8"},
    },
    "long context": {"model": "llama-3-8b", "training": {"sequence_length": 32768}},
    "hybrid sharding": {
        "model": "llama-3-8b",
        "parallel": {"data_parallel_shard_size": [0, 2, 4], "zero_stage": [2, 3]},
    },
    "encoder and decoder": {
        "model": "t5-11b",
        "training": {"decoder_sequence_length": 1024},
        "parallel": {
            "recompute": [
                "none",
                "selective",
                "full",
                {"granularity": "full", "method": "block", "num_layers": 3},
            ]
        },
    },
    "encoder": {"model": "megatron-bert-3.9b", "parallel": {"zero_stage": [0, 1, 2]}},
    "replicas inside of context-parallel groups": {
        "model": "mixtral-8x7b",
        "training": {"sequence_length": 32768},
        "parallel": {
            "rank_order": "tp-dp-cp-ep-pp",
            "context_parallel_size": [2, 4],
            "micro_batch_size": 1,
        },
    },
    "stages inside of context-parallel groups": {
        "model": "llama-3-8b",
        "training": {"sequence_length": 32768},
        "parallel": {
            "rank_order": "tp-pp-cp-dp",
            "context_parallel_size": [2, 4],
            "micro_batch_size": 1,
        },
    },
    "packed rows": {
        "model": "llama-3-8b",
        "training": {"sequence_lengths": "synthetic-long-sft", "packed": True},
    },
    "nothing legal": {"model": "gpt-22b", "parallel": {"tensor_parallel_size": 3}},
    "nothing legal, packed": {
        "model": "llama-3-8b",
        "training": {"sequence_lengths": "synthetic-long-sft", "packed": True},
        "parallel": {"tensor_parallel_size": 3},
    },
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_grid_costs_what_its_rows_cost(name: str) -> None:
    change = dict(QUERIES[name])
    training = {"sequence_length": 4096, "global_batch_size": 64} | change.pop("training", {})
    query = parse_query(
        {
            "kind": "training",
            "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
            "training": training,
            **change,
        }
    )
    problem = resolve_training(query)
    seen = 0
    for chunk in legal_chunks(
        axes=default_axes(query=query.parallel, case=problem), case=problem, size=2000
    ):
        grid = chunk.candidates
        assert len(grid.shape) == 3
        whole, rows = (
            columns(problem.costs(grid).rows(grid.shape)),
            columns(problem.costs(grid.take(slice(None)))),
        )
        for part, column in rows.items():
            np.testing.assert_array_equal(whole[part], column, err_msg=part)
        for row in range(0, len(grid), max(len(grid) // 20, 1)):
            alone = columns(
                problem.costs(Candidates.alone(grid.take(slice(row, row + 1)).config(0)))
            )
            for part, column in rows.items():
                assert column[row] == pytest.approx(alone[part], rel=1e-12), part
        seen += len(grid)
    assert bool(seen) != name.startswith("nothing legal")
