"""The laws of test_cost_properties where models, workloads and clusters are other than plain: a
space of each.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.encoder_decoder import mean_layer_bytes
from hp_tool.cost.layer import layer_bytes
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.questions.schema import parse_query
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.rank import cost_space
from tests.cost.cases import columns

EXACT = 1e-12
MOE = {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "gated_mlp": True,
    "normalization": "rmsnorm",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
}
DENSE = {key: value for key, value in MOE.items() if "expert" not in key and "moe" not in key}
LATENT = DENSE | {
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
TWO_KINDS = {
    "stages": [{"gpu": "h100-sxm-80gb", "num_gpus": 8}, {"gpu": "a100-sxm-80gb", "num_gpus": 8}]
}
FEATURES: dict[str, dict[str, Any]] = {
    "experts": {"model": MOE, "parallel": {"expert_parallel_size": [1, 4, 8]}},
    "experts by flex": {
        "model": MOE,
        "parallel": {"expert_parallel_size": 8, "moe_token_dispatcher_type": "flex"},
    },
    "experts by all-gather": {
        "model": MOE,
        "parallel": {"expert_parallel_size": 8, "moe_token_dispatcher_type": "allgather"},
    },
    "experts with biases, sent in 8 bits": {
        "model": MOE | {"expert_bias": True},
        "training": {"dispatch_precision": "fp8"},
        "parallel": {"expert_parallel_size": [1, 8]},
    },
    "graphs of modules": {
        "model": MOE,
        "training": {
            "cuda_graphs": True,
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
        },
        "parallel": {"expert_parallel_size": [1, 8]},
    },
    "latent attention": {"model": LATENT},
    "encoder-decoder": {"model": "t5-3b"},
    "encoder": {"model": "bert-large"},
    "hybrid sharding": {"parallel": {"data_parallel_shard_size": [2, 4], "zero_stage": [1, 2, 3]}},
    "lora": {"training": {"task": "lora", "lora": {"rank": 16}}},
    "muon": {"training": {"optimizer": "muon"}},
    "optimizer on the host": {"training": {"offload": "optimizer", "offload_fraction": 0.5}},
    "activations on the host": {
        "training": {"offload": "activations"},
        "parallel": {"recompute": "none"},
    },
    "zb-h1": {"parallel": {"pipeline_parallel_size": 4, "pipeline_schedule": "zb-h1"}},
    "zbv": {"parallel": {"pipeline_parallel_size": 4, "pipeline_schedule": "zbv"}},
    "dualpipe": {"parallel": {"pipeline_parallel_size": 4, "pipeline_schedule": "dualpipe"}},
    "dualpipe of experts": {
        "model": MOE,
        "parallel": {
            "pipeline_parallel_size": 4,
            "pipeline_schedule": "dualpipe",
            "expert_parallel_size": [1, 2, 4],
        },
    },
    "dualpipe-v": {"parallel": {"pipeline_parallel_size": 4, "pipeline_schedule": "dualpipe-v"}},
    "two kinds": {"cluster": TWO_KINDS, "parallel": {"pipeline_parallel_size": 4}},
    "context by all-gather": {
        "parallel": {
            "context_parallel_size": [2, 4],
            "context_parallel_communication": "all_gather",
        }
    },
}
LINKS = {
    "network": "inter_node_bandwidth_bytes_per_second",
    "nvlink": "nvlink_bandwidth_bytes_per_second",
    "pcie": "pcie_bandwidth_bytes_per_second",
    "memory": "memory_bandwidth_bytes_per_second",
    "host memory": "host_memory_bandwidth_bytes_per_second",
}


def space(feature: str) -> tuple[TrainingProblem, Candidates]:
    """The problem, and its legal candidates whether or not they fit."""
    said = FEATURES[feature]
    asked = {
        "kind": "training",
        "model": said.get("model", DENSE),
        "cluster": said.get("cluster", {"gpu": "a100-sxm-80gb", "num_gpus": 16}),
        "training": {"sequence_length": 1024, "global_batch_size": 32} | said.get("training", {}),
        "parallel": {"micro_batch_size": [1, 2]} | said.get("parallel", {}),
    }
    query = parse_query(asked)
    problem = resolve_training(query)
    candidates = cost_space(problem=problem).candidates
    assert len(candidates) > 3
    return problem, candidates


@pytest.fixture(scope="module", params=FEATURES)
def case(request: pytest.FixtureRequest) -> tuple[TrainingProblem, Candidates]:
    return space(request.param)


def test_parts_sum_to_totals(case: tuple[TrainingProblem, Candidates]) -> None:
    problem, candidates = case
    costs = problem.costs(candidates)
    np.testing.assert_allclose(sum(costs.parts.values()), costs.step_s, rtol=EXACT)
    np.testing.assert_allclose(
        sum(costs.memory_parts.values()), costs.memory_total_bytes, rtol=EXACT
    )
    for name, column in columns(costs).items():
        assert np.all(np.isfinite(column)) and np.all(np.asarray(column) >= 0), name


def test_a_row_depends_on_nothing_but_its_configuration(
    case: tuple[TrainingProblem, Candidates],
) -> None:
    problem, candidates = case
    order = np.random.default_rng(0).permutation(len(candidates))
    whole, shuffled = (
        columns(problem.costs(candidates)),
        columns(problem.costs(candidates.take(order))),
    )
    for name, column in whole.items():
        np.testing.assert_allclose(
            np.broadcast_to(shuffled[name], order.shape),
            np.broadcast_to(column, order.shape)[order],
            rtol=EXACT,
            err_msg=name,
        )
    for row in order[:3].tolist():
        one = columns(problem.costs(candidates.take(slice(row, row + 1))))
        alone = columns(problem.costs(Candidates.alone(candidates.config(row))))
        for name, column in whole.items():
            expected = np.broadcast_to(column, order.shape)[row]
            np.testing.assert_allclose(
                [np.ravel(one[name])[0], np.ravel(alone[name])[0]],
                expected,
                rtol=EXACT,
                err_msg=name,
            )


def slower(cluster: ClusterSpec, link: str) -> ClusterSpec:
    """The cluster, and each of its kinds, with one of its rates halved; a rate that nobody knows
    stays so.
    """
    name = LINKS[link]
    kinds = tuple(slower(kind, link) for kind in cluster.kinds)
    owner = cluster if name in {f.name for f in fields(ClusterSpec)} else cluster.gpu
    rate = getattr(owner, name)
    changed = replace(owner, **{name: rate / 2 if rate else rate})
    return (
        replace(changed, kinds=kinds)
        if owner is cluster
        else replace(cluster, gpu=changed, kinds=kinds)
    )


def test_slower_hardware_never_makes_a_step_faster(
    case: tuple[TrainingProblem, Candidates],
) -> None:
    problem, candidates = case
    before = problem.costs(candidates).step_s
    for link in LINKS:
        cluster = slower(problem.cluster, link)
        kinds = tuple(
            replace(kind, cluster=changed)
            for kind, changed in zip(problem.kinds, cluster.kinds, strict=True)
        )
        after = replace(problem, cluster=cluster, kinds=kinds).costs(candidates).step_s
        assert np.all(after >= before * (1 - EXACT)), link
        # A slower host and PCIe matter to offloading alone.
        assert np.any(after > before) or "host" in link or link == "pcie", link


@pytest.mark.parametrize("feature", ["optimizer on the host", "activations on the host"])
def test_a_slower_link_to_the_host_costs_time_where_it_is_used(feature: str) -> None:
    problem, candidates = space(feature)
    after = replace(problem, cluster=slower(problem.cluster, "pcie")).costs(candidates)
    assert np.any(after.step_s > problem.costs(candidates).step_s)


@pytest.mark.parametrize(
    "feature", ["experts", "latent attention", "encoder-decoder", "encoder", "lora"]
)
def test_saved_activations_of_a_layer_never_rise(feature: str) -> None:
    """With tensor parallelism, from none to selective (of unfused attention), from SP off to on."""
    problem, _ = space(feature)
    problem = replace(problem, workload=replace(problem.workload, attention="unfused"))

    def saved(t: int, *, sharded: bool) -> tuple[float, float]:
        one = Candidates.alone(
            ParallelConfig(tensor_parallel_size=t, sequence_parallel=sharded and t > 1)
        )
        if problem.model.architecture == "encoder_decoder":
            found = mean_layer_bytes(case=problem, candidates=one)
        else:
            found = layer_bytes(case=problem, candidates=one)
        return float(found.saved), float(found.saved_selective)

    for sharded in (False, True):
        sizes = np.array([saved(t, sharded=sharded) for t in (1, 2, 4, 8)])
        assert np.all(np.diff(sizes, axis=0) < 0)
        assert np.all(sizes[:, 1] < sizes[:, 0])
    for t in (2, 4, 8):
        assert np.all(np.array(saved(t, sharded=True)) < np.array(saved(t, sharded=False)))


@pytest.mark.parametrize(
    "feature", ["experts", "latent attention", "encoder-decoder", "encoder", "muon"]
)
def test_states_never_rise_with_zero_stage(feature: str) -> None:
    problem, _ = space(feature)
    one = ParallelConfig(data_parallel_size=16, expert_parallel_size=1)
    costs = problem.costs(
        Candidates.from_configs(replace(one, zero_stage=stage) for stage in (0, 1, 2, 3))
    )
    for name in ("weights", "gradients", "optimizer"):
        assert np.all(np.diff(costs.memory_parts[name]) <= 0), name


@pytest.mark.parametrize("feature", ["experts", "latent attention", "encoder-decoder", "encoder"])
def test_one_gpu_computes_updates_and_holds_18_bytes_a_parameter(feature: str) -> None:
    problem, _ = space(feature)
    problem = problem.with_num_gpus(1)
    costs = problem.costs(Candidates.alone(ParallelConfig()))
    for name in set(costs.parts) - {"compute", "attention", "optimizer", "overhead"}:
        assert costs.parts[name] == 0.0, name
    assert (
        costs.parts["compute"] > 0 and costs.parts["attention"] > 0 and costs.parts["optimizer"] > 0
    )
    states = sum(costs.memory_parts[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(
        18 * total_parameters(problem.model, sequence_length=1024), rel=EXACT
    )
