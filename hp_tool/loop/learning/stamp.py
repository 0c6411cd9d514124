"""Digest of the predictions that a calibration was fitted to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import training_costs
from hp_tool.domain.digests import json_digest
from hp_tool.domain.hardware import DEFAULT_RANK_ORDER, ClusterSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training.problem import TrainingProblem

DEVICES, NODE = 64, 8
DIGITS = 6
"""Number of significant digits to which predictions agree on all CPUs and NumPy releases."""
DENSE = ModelSpec(
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    gated_mlp=True,
    normalization="rmsnorm",
    vocab_size=128256,
)
MIXTURE = replace(DENSE, num_experts=64, num_experts_per_tok=4, moe_intermediate_size=2048)
LAYOUTS = (
    ParallelConfig(data_parallel_size=64, zero_stage=3),
    ParallelConfig(tensor_parallel_size=2, data_parallel_size=32, recompute="full"),
    ParallelConfig(
        tensor_parallel_size=4,
        sequence_parallel=True,
        pipeline_parallel_size=4,
        virtual_pipeline_parallel_size=2,
        data_parallel_size=4,
        recompute="selective",
    ),
    ParallelConfig(tensor_parallel_size=2, context_parallel_size=4, data_parallel_size=8),
)


def predictions_digest(cluster: ClusterSpec, *, framework: str, experts: bool) -> str:
    """Return a digest that changes with the cost model or the GPU's or framework's constants.

    It covers every part of step time and memory for a few layouts of a dense model or, with
    `experts`, of an MoE model. Releases of a framework share a calibration's series, and therefore
    the digest.
    """
    cluster = replace(
        cluster, kinds=(), rank_order=DEFAULT_RANK_ORDER, num_gpus=DEVICES, gpus_per_node=NODE
    )
    cluster = replace(
        cluster, nvlink_domain_size=NODE, nvlink_segment_gpus=None
    )  # A part of a node has the same calibration as the whole node.
    precision: Precision = "bf16" if "bf16" in cluster.gpu.peak_flops_per_second else "fp32"
    workload = TrainingWorkload(
        sequence_length=4096, global_batch_size=128, framework=framework, precision=precision
    )
    profile = efficiency_profile(gpu=cluster.gpu, framework=framework, cluster=cluster.name)
    model, layouts = (
        (MIXTURE, [replace(each, expert_parallel_size=8) for each in LAYOUTS])
        if experts
        else (DENSE, LAYOUTS)
    )
    costs = training_costs(
        case=TrainingCase(
            model=model,
            cluster=cluster,
            workload=workload,
            profile=profile,
            strategy=DEFAULT_STRATEGY,
        ),
        candidates=Candidates.from_configs(layouts),
    )
    columns = {**costs.memory_parts, **costs.parts}
    return json_digest(
        {
            name: [f"{value:.{DIGITS}g}" for value in np.broadcast_to(column, len(layouts))]
            for name, column in columns.items()
        }
    )


def digest_of(problem: TrainingProblem) -> str:
    """Return the digest for a problem's cluster, framework and model family."""
    return predictions_digest(
        problem.cluster,
        framework=problem.workload.framework,
        experts=bool(problem.model.num_experts),
    )
