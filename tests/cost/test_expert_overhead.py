"""The host's share of dispatching tokens, once for each layer with experts and micro-batch, and
what experts launch singly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.block import BlockTime, shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.mlp import mlp_time
from hp_tool.cost.moe import expert_time
from hp_tool.cost.roofline import elementwise_seconds, matmul_seconds
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import InputError
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training import estimate
from tests.cost.cases import case_of

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
def test_it_is_paid_by_layer_and_micro_batch(
    name: str, sparse_layers: int, recompute: str, passes: float
) -> None:
    profile = efficiency_profile(
        gpu=NODE.gpu, framework="megatron-core", cuda_graphs=True
    )  # no waits that it could shorten
    without, once = (
        training_costs(
            case=TrainingCase(
                model=model(name),
                cluster=NODE,
                workload=TrainingWorkload(sequence_length=4096, global_batch_size=64),
                profile=replace(
                    profile, framework=replace(profile.framework, expert_overhead_s=seconds)
                ),
            ),
            candidates=Candidates.alone(ParallelConfig(data_parallel_size=8, recompute=recompute)),
        ).parts
        for seconds in (0.0, 1e-3)
    )
    more = {part: once[part] - seconds for part, seconds in without.items()}
    assert more["compute"] + more["recompute"] == pytest.approx(
        8 * sparse_layers * passes * 1e-3, rel=1e-6, abs=1e-12
    )
    assert more.pop("data_parallel") <= 0  # there is more to hide behind
    assert all(
        seconds == 0 for part, seconds in more.items() if part not in ("compute", "recompute")
    )


def experts_time(
    name: str = "qwen3-30b-a3b", *, ranks: int = 8, launch_s: float = 0.0, **training: object
) -> BlockTime:
    """The experts' block of one micro-batch."""
    profile = efficiency_profile(gpu=NODE.gpu, framework="megatron-core", cuda_graphs=True)
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=64, **training)  # type: ignore[arg-type]
    case = TrainingCase(
        model=model(name),
        cluster=NODE,
        workload=workload,
        profile=replace(profile, framework=replace(profile.framework, expert_launch_s=launch_s)),
    )
    candidates = Candidates.alone(ParallelConfig(data_parallel_size=8, expert_parallel_size=ranks))
    return expert_time(case=case, candidates=candidates, s=shapes(case=case, candidates=candidates))


@pytest.mark.parametrize(
    ("name", "training", "forward", "backward"),
    [
        ("qwen3-30b-a3b", {}, 2, 4),
        (
            "qwen3-30b-a3b",
            {"precision": "fp8"},
            6,
            8,
        ),  # each input and each gradient is reduced and cast
        ("qwen3-30b-a3b", {"expert_precision": "fp8"}, 6, 8),
        (
            "gpt-oss-120b",
            {},
            4,
            12,
        ),  # the second bias times the weight, added; backward the gradients of both
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_each_expert_of_a_rank_is_launched_on_its_own(
    name: str, training: dict[str, object], forward: int, backward: int, ranks: int
) -> None:
    free, host = (
        experts_time(name, ranks=ranks, launch_s=launch_s, **training) for launch_s in (0.0, 1e-5)
    )
    assert host.elementwise - free.elementwise == pytest.approx(128 / ranks * forward * 1e-5)
    assert host.elementwise_backward - free.elementwise_backward == pytest.approx(
        128 / ranks * backward * 1e-5
    )


def test_small_groups_fill_their_last_tile() -> None:
    """128 experts on one rank: each computes 64 rows more than it gets, half a tile."""
    plain = model("qwen3-30b-a3b")
    one = experts_time(ranks=1).matmul
    machine = TrainingCase(
        model=plain,
        cluster=NODE,
        workload=TrainingWorkload(sequence_length=4096, global_batch_size=64),
        profile=efficiency_profile(gpu=NODE.gpu, framework="megatron-core"),
    )
    rows = 4096 * 8 / 128 + 64
    expected = sum(
        matmul_seconds(rows, n, k, machine=machine, precision="bf16", batch=128.0)
        for n, k in ((2 * 768, 2048), (2048, 768))
    )
    assert one == pytest.approx(expected)


def test_biases_of_experts_pass_over_memory_in_32_bits() -> None:
    bare = replace(model("gpt-oss-120b"), expert_bias=False)
    case = TrainingCase(
        model=bare,
        cluster=NODE,
        workload=TrainingWorkload(sequence_length=4096, global_batch_size=64),
        profile=efficiency_profile(gpu=NODE.gpu, framework="megatron-core", cuda_graphs=True),
    )
    candidates = Candidates.alone(ParallelConfig(data_parallel_size=8, expert_parallel_size=8))
    without = expert_time(
        case=case, candidates=candidates, s=shapes(case=case, candidates=candidates)
    )
    biased = experts_time("gpt-oss-120b")
    copies = 4096 * 4
    assert biased.elementwise - without.elementwise == pytest.approx(
        elementwise_seconds(copies * 2880 * 28.0, kernels=0.0, machine=case)
    )
    assert biased.matmul == without.matmul and biased.expert == without.expert


def test_experts_in_8_bits_alone() -> None:
    wide, narrow = experts_time(), experts_time(expert_precision="fp8")
    assert narrow.matmul < 0.8 * wide.matmul and narrow.weight_gradient < wide.weight_gradient
    assert narrow.elementwise > wide.elementwise, "their inputs are cast"
    sizes = [
        training_costs(
            case=TrainingCase(
                model=model("qwen3-30b-a3b"),
                cluster=NODE,
                workload=TrainingWorkload(
                    sequence_length=4096, global_batch_size=64, expert_precision=precision
                ),
                profile=efficiency_profile(gpu=NODE.gpu, framework="megatron-core"),
            ),
            candidates=Candidates.alone(
                ParallelConfig(data_parallel_size=8, expert_parallel_size=8)
            ),
        )
        for precision in (None, "fp8")
    ]
    assert sizes[1].layer_activations_bytes < sizes[0].layer_activations_bytes
    assert sizes[1].memory_parts["weights"] == sizes[0].memory_parts["weights"]
    shared = [
        experts_time("deepseek-v2-lite", expert_precision=precision).matmul
        for precision in (None, "fp8")
    ]
    both = experts_time("deepseek-v2-lite", precision="fp8").matmul
    assert both < shared[1] < shared[0], "shared experts multiply as all other layers do"


@pytest.mark.parametrize(
    ("name", "gpu", "training", "field"),
    [
        ("llama-3-8b", "h100-sxm-80gb", {"expert_precision": "fp8"}, "training.expert_precision"),
        (
            "llama-3-8b",
            "h100-sxm-80gb",
            {"dispatch_precision": "fp8"},
            "training.dispatch_precision",
        ),
        (
            "qwen3-30b-a3b",
            "h100-sxm-80gb",
            {"expert_precision": "mxfp8"},
            "training.expert_precision",
        ),
        (
            "qwen3-30b-a3b",
            "b200-sxm-180gb",
            {"cuda_graph_modules": ["attn"]},
            "training.cuda_graph_modules",
        ),
        (
            "qwen3-30b-a3b",
            "b200-sxm-180gb",
            {"cuda_graphs": True, "cuda_graph_modules": []},
            "training.cuda_graph_modules",
        ),
    ],
)
def test_what_no_training_of_experts_has_is_refused(
    name: str, gpu: str, training: dict[str, object], field: str
) -> None:
    query = {
        "kind": "training",
        "model": name,
        "cluster": {"gpu": gpu, "num_gpus": 8},
        "training": {"sequence_length": 4096, "global_batch_size": 64} | training,
        "parallel": {"micro_batch_size": 1},
    }
    with pytest.raises(InputError) as caught:
        estimate(query=parse_query(query))
    assert caught.value.field == field


def test_a_shared_expert_costs_the_matmuls_of_a_dense_mlp_of_its_width() -> None:
    """Every token passes it, in either direction."""
    plain = model("qwen3-30b-a3b")
    shared = replace(plain, num_shared_experts=1)
    dense = replace(
        plain.without_experts, intermediate_size=plain.moe_intermediate_size, blocks=None
    )
    candidates = Candidates.alone(ParallelConfig(data_parallel_size=8))
    workload = TrainingWorkload(sequence_length=4096, global_batch_size=64)
    cases = [case_of(model=each, workload=workload) for each in (plain, shared, dense)]
    inner = [shapes(case=case, candidates=candidates) for case in cases]
    without, with_shared = (
        expert_time(case=case, candidates=candidates, s=s)
        for case, s in zip(cases[:2], inner, strict=False)
    )
    mlp = mlp_time(case=cases[2], s=inner[2])
    assert with_shared.matmul - without.matmul == pytest.approx(mlp.matmul)
    assert with_shared.weight_gradient - without.weight_gradient == pytest.approx(
        mlp.weight_gradient
    )
