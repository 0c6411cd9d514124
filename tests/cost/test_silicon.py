"""Cards of one die, and what a network may change: properties that hold whatever the constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.catalog import cluster, gpu, model
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.space import default_axes, enumerate_space
from tests.cost.cases import case_of

SUCCESSORS = (
    ("a100-sxm-40gb", "a100-sxm-80gb"),
    ("a800-sxm-80gb", "a100-sxm-80gb"),
    ("h20-sxm-96gb", "h200-sxm-141gb"),
    ("h800-sxm-80gb", "h100-sxm-80gb"),
    ("h100-sxm-80gb", "h200-sxm-141gb"),
    ("b200-sxm-180gb", "b300-sxm-288gb"),
    ("gb200-nvl72", "gb300-nvl72"),
    ("mi300x-192gb", "mi325x-256gb"),
    ("mi350x-288gb", "mi355x-288gb"),
)
"""Cards of one die (or of one that borrows the other's constants); the second has no rate below the first's."""
MODELS = ("gpt3-1.3b", "gpt3-6.7b", "llama-3-8b", "qwen3-30b-a3b", "llama-3-70b")
FLOATS = 1e-9


def step_seconds(card: str, *, name: str, num_gpus: int, precision: str = "bf16", network: float = 1.0) -> np.ndarray:
    """Step seconds of every layout on these GPUs, whether it fits or not; the network's rate times `network`."""
    spec = cluster(ClusterQuery(gpu=card, num_gpus=num_gpus))
    port = spec.inter_node_bandwidth_bytes_per_second
    spec = replace(
        spec, inter_node_bandwidth_bytes_per_second=network * port, inter_node_latency_s=spec.inter_node_latency_s / network
    )
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=64, precision=precision)  # type: ignore[arg-type]
    case = case_of(model=model(name), workload=workload, cluster=spec)
    space = enumerate_space(axes=default_axes(query=ParallelQuery(), case=case), case=case)
    return training_costs(case=case, candidates=space.candidates).step_s


@pytest.mark.parametrize(("before", "after"), SUCCESSORS)
def test_no_card_is_slower_than_the_one_before_it_of_the_same_die(before: str, after: str) -> None:
    """At the same work, layout by layout, within a server and beyond it."""
    for name, num_gpus, precision in (("gpt3-6.7b", 8, "bf16"), ("qwen3-30b-a3b", 16, "fp8"), ("llama-3-70b", 64, "fp16")):
        if precision in gpu(before).peak_flops_per_second:
            slow, fast = (step_seconds(card, name=name, num_gpus=num_gpus, precision=precision) for card in (before, after))
            assert np.all(fast <= slow * (1.0 + FLOATS))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("card", "num_gpus"), [("h100-sxm-80gb", 8), ("l40s-48gb", 8), ("gb200-nvl72", 48), ("v100", 4)])
def test_what_stays_inside_one_server_never_depends_on_the_network(name: str, card: str, num_gpus: int) -> None:
    precision = "fp16" if card == "v100" else "bf16"
    fast, slow = (
        step_seconds(card, name=name, num_gpus=num_gpus, precision=precision, network=factor) for factor in (1.0, 0.01)
    )
    np.testing.assert_array_equal(fast, slow)
