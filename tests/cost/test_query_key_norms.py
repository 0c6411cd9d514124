"""Norms of queries and keys: passes over them that nothing else makes. Their bytes:
test_megatron_layers.
"""

from __future__ import annotations

import dataclasses

import pytest

from hp_tool.catalog import cluster, model
from hp_tool.cost.attention import attention_time
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.roofline import elementwise_seconds
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import case_of

QWEN = model("qwen3-30b-a3b")


@pytest.mark.parametrize("t", [1, 4])
def test_norms_read_and_write_the_heads_of_a_rank(t: int) -> None:
    """Forward they read and write, backward they read gradient and input and write, 128 elements of
    32 + 4 heads a token.
    """
    candidate = Candidates.alone(ParallelConfig(tensor_parallel_size=t, data_parallel_size=8 // t))
    workload, h100 = (
        TrainingWorkload(sequence_length=4096, global_batch_size=8),
        cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8)),
    )
    case = case_of(model=QWEN, workload=workload, cluster=h100)
    without = dataclasses.replace(case, model=dataclasses.replace(QWEN, query_key_norm=None))
    normed, plain = (
        attention_time(case=one, candidates=candidate, s=shapes(case=one, candidates=candidate))
        for one in (case, without)
    )
    once = elementwise_seconds(4096 * 128 * (32 + 4) / t * 2.0, machine=case, kernels=0.0)
    assert normed.elementwise - plain.elementwise == pytest.approx(2.0 * once)
    assert normed.elementwise_backward - plain.elementwise_backward == pytest.approx(3.0 * once)
