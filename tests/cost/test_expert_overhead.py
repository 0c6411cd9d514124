"""The host's share of dispatching tokens: once for each layer with experts and micro-batch, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload

NODE = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=8))


@pytest.mark.parametrize(
    ("name", "sparse_layers", "recompute", "passes"),
    [
        ("qwen3-30b-a3b", 48, "none", 1.0),
        ("qwen3-30b-a3b", 48, "full", 1.5),  # the forward half again
        ("deepseek-v2-lite", 26, "none", 1.0),  # the first of 27 layers is dense
        ("llama-3-8b", 0, "none", 0.0),
    ],
)
def test_it_is_paid_by_layer_and_micro_batch(name: str, sparse_layers: int, recompute: str, passes: float) -> None:
    profile = efficiency(gpu=NODE.gpu, framework="megatron-core", cuda_graphs=True)  # no waits that it could shorten
    without, once = (
        training_costs(
            case=TrainingCase(
                model=model(name),
                cluster=NODE,
                workload=TrainingWorkload(sequence_length=4096, global_batch_size=64),
                profile=replace(profile, framework=replace(profile.framework, expert_overhead_s=seconds)),
            ),
            candidates=Candidates.alone(ParallelConfig(data_parallel_size=8, recompute=recompute)),
        ).parts
        for seconds in (0.0, 1e-3)
    )
    more = {part: once[part] - seconds for part, seconds in without.items()}
    assert more["compute"] + more["recompute"] == pytest.approx(8 * sparse_layers * passes * 1e-3, rel=1e-6, abs=1e-12)
    assert more.pop("data_parallel") <= 0  # there is more to hide behind
    assert all(seconds == 0 for part, seconds in more.items() if part not in ("compute", "recompute"))
