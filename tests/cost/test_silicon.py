"""Cards of one die, and what a network may change: properties that hold whatever the constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hp_tool.catalog import cluster, gpu, model
from hp_tool.catalog.efficiency import efficiency_profile, gpu_efficiency
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery, GpuSpec, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.questions.training import estimate
from hp_tool.space import default_axes, legal_chunks
from tests.cost.cases import case_of

SUCCESSORS = (
    ("a100-sxm-40gb", "a100-sxm-80gb"),
    ("a800-sxm-80gb", "a100-sxm-80gb"),
    ("h20-sxm-96gb", "h200-sxm-141gb"),
    ("h800-sxm-80gb", "h100-sxm-80gb"),
    ("h100-sxm-80gb", "h200-sxm-141gb"),
    ("mi300x-192gb", "mi325x-256gb"),
    ("mi350x-288gb", "mi355x-288gb"),
)
"""Cards of one die; the second has no rate below the first's."""
MODELS = ("gpt3-1.3b", "gpt3-6.7b", "llama-3-8b", "qwen3-30b-a3b", "llama-3-70b")
FLOATS = 1e-9


def step_seconds(
    card: str, *, name: str, num_gpus: int, precision: str = "bf16", network: float = 1.0
) -> np.ndarray:
    """Step seconds of every layout on these GPUs, whether it fits or not; the network's rate times
    `network`.
    """
    spec = cluster(ClusterQuery(gpu=card, num_gpus=num_gpus))
    port = spec.inter_node_bandwidth_bytes_per_second
    spec = replace(
        spec,
        inter_node_bandwidth_bytes_per_second=network * port,
        inter_node_latency_s=spec.inter_node_latency_s / network,
    )
    workload = TrainingWorkload(sequence_length=2048, global_batch_size=64, precision=precision)  # type: ignore[arg-type]
    case = case_of(model=model(name), workload=workload, cluster=spec)
    spaces = legal_chunks(axes=default_axes(query=ParallelQuery(), case=case), case=case)
    every = Candidates.concatenate([space.candidates for space in spaces])
    return training_costs(case=case, candidates=every).step_s


@pytest.mark.parametrize(("before", "after"), SUCCESSORS)
def test_no_card_is_slower_than_the_one_before_it_of_the_same_die(before: str, after: str) -> None:
    """At the same work, layout by layout, within a server and beyond it."""
    for name, num_gpus, precision in (
        ("gpt3-6.7b", 8, "bf16"),
        ("qwen3-30b-a3b", 16, "fp8"),
        ("llama-3-70b", 64, "fp16"),
    ):
        if precision in gpu(before).peak_flops_per_second:
            slow, fast = (
                step_seconds(card, name=name, num_gpus=num_gpus, precision=precision)
                for card in (before, after)
            )
            assert np.all(fast <= slow * (1.0 + FLOATS))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("card", "num_gpus"), [("h100-sxm-80gb", 8), ("l40s-48gb", 8), ("gb200-nvl72", 48), ("v100", 4)]
)
def test_what_stays_inside_one_server_never_depends_on_the_network(
    name: str, card: str, num_gpus: int
) -> None:
    precision = "fp16" if card == "v100" else "bf16"
    fast, slow = (
        step_seconds(card, name=name, num_gpus=num_gpus, precision=precision, network=factor)
        for factor in (1.0, 0.01)
    )
    np.testing.assert_array_equal(fast, slow)


def test_hosts_cost_the_same_on_every_gpu() -> None:
    """A 6.4B GPT at TP 8: small layers, which no newer GPU runs slower for being fed by the same
    host.
    """
    shape = ModelSpec(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, vocab_size=51200
    )
    steps = [
        estimate(
            query=Query(
                kind="training",
                model=shape,
                cluster=ClusterQuery(gpu=card, num_gpus=8),
                training=TrainingWorkload(sequence_length=2048, global_batch_size=64),
                parallel=ParallelQuery(tensor_parallel_size=8, micro_batch_size=1),
            )
        ).time
        for card in ("a100", "h100", "h200", "b200", "gb200")
    ]
    seconds = [step.step_s for step in steps if step is not None]
    assert len(seconds) == 5 and seconds == sorted(seconds, reverse=True)


def test_power_limits_set_the_clocks_of_long_trainings() -> None:
    """Isolated kernels run at boost; a card of the same die sustains the cube root of its power's
    ratio, never above boost.
    """

    def matmul(card: GpuSpec, precision: Precision = "bf16") -> tuple[float, float]:
        boost, long = (
            gpu_efficiency(card),
            efficiency_profile(gpu=card, framework="megatron-core").gpu,
        )
        peak = card.peak_flops_per_second[precision]
        return boost.matmul[precision].peak_fraction * peak, long.matmul[
            precision
        ].peak_fraction * peak

    boost, long = matmul(gpu("h100"))
    assert 0.5 * boost < long < boost
    capped = replace(gpu("h100"), power_w=350.0)
    assert matmul(capped) == (boost, pytest.approx(long * 0.5 ** (1 / 3)))
    assert matmul(replace(gpu("h100"), power_w=7000.0)) == (boost, pytest.approx(boost))
    cut = matmul(gpu("h20"))
    assert cut[0] < cut[1] < 148e12  # which need less than 400 W, and wait less for their inputs
    assert matmul(gpu("gb200"))[1] == pytest.approx(matmul(gpu("b200"))[1] * 1.2 ** (1 / 3))
