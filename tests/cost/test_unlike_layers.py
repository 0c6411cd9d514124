"""Training of models whose layers differ: by kind of layer and by stage, against models that say
the same otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.catalog import cluster, model
from hp_tool.cost.block import shapes
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.flops import token_flops
from hp_tool.cost.legality import REASONS, legality
from hp_tool.cost.recurrent_block import mixer_kernels
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.scans import chunked_seconds, convolution_work, mixer_kernel, scan_work
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.blocks import Block
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.workload import LoraSpec, TrainingWorkload
from hp_tool.errors import UnsupportedError
from hp_tool.questions import anatomy
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import resolve_training
from tests.cost.cases import case_of, columns

WORKLOAD = TrainingWorkload(sequence_length=4096, global_batch_size=128)
NODES = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64))
NANO, QWEN = model("nemotron-3-nano-30b-a3b"), model("qwen3.6-35b-a3b")


def config(**sizes: Any) -> ParallelConfig:
    used = 1
    for name in ("tensor", "pipeline", "context"):
        used *= sizes.get(f"{name}_parallel_size", 1)
    return ParallelConfig(data_parallel_size=64 // used, **sizes)


def costs(spec: ModelSpec, **sizes: Any) -> TrainingCosts:
    case = case_of(model=spec, workload=WORKLOAD, cluster=NODES)
    candidate = Candidates.alone(config(**sizes))
    assert legality(case=case, candidates=candidate) == 0
    return training_costs(case=case, candidates=candidate)


def test_a_pattern_of_one_kind_costs_what_its_model_does() -> None:
    dense = model("llama-3-8b")
    for sizes in (
        {},
        {"pipeline_parallel_size": 4},
        {"pipeline_parallel_size": 8, "virtual_pipeline_parallel_size": 2},
    ):
        plain, pattern = (
            costs(dense, **sizes),
            costs(replace(dense, blocks=(Block(count=2),)), **sizes),
        )
        assert pattern.step_s == pytest.approx(plain.step_s, rel=1e-9)
        assert pattern.memory_total_bytes == pytest.approx(plain.memory_total_bytes, rel=1e-9)


def test_dense_layers_before_experts_cost_the_same_as_blocks() -> None:
    mixture = replace(model("deepseek-v2-lite"), num_hidden_layers=28, first_k_dense_replace=4)
    blocks = (Block(count=4, feed_forward="dense"), Block(count=24))
    written = replace(mixture, first_k_dense_replace=0, blocks=blocks)
    for sizes in (
        {},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 4, "recompute": "full"},
    ):
        plain, pattern = (
            costs(spec, expert_parallel_size=8, **sizes) for spec in (mixture, written)
        )
        assert pattern.step_s == pytest.approx(plain.step_s, rel=1e-12)
        assert pattern.memory_total_bytes == pytest.approx(plain.memory_total_bytes, rel=1e-12)


LAYOUTS = [
    (NANO, {"pipeline_parallel_size": 4, "tensor_parallel_size": 2, "expert_parallel_size": 8}),
    (NANO, {"pipeline_parallel_size": 8, "expert_parallel_size": 8, "recompute": "full"}),
    (
        QWEN,
        {
            "pipeline_parallel_size": 4,
            "virtual_pipeline_parallel_size": 5,
            "expert_parallel_size": 8,
        },
    ),
]


@pytest.mark.parametrize(("spec", "sizes"), LAYOUTS)
def test_a_pipeline_is_its_fullest_and_its_slowest_stage(
    spec: ModelSpec, sizes: dict[str, Any]
) -> None:
    """Every stage, costed alone: none is fuller or slower than the whole says; of several chunks a
    rank the mean counts.
    """
    query = Query(
        kind="training",
        model=spec,
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64),
        training=WORKLOAD,
        parallel=ParallelQuery(**sizes),
    )
    resolved = resolve_configuration(query)
    whole, each = (
        resolved.problem.costs(resolved.candidate),
        anatomy.stage_anatomies(problem=resolved.problem, config=resolved.config),
    )
    assert sum(stage.layers for stage in each) == spec.num_hidden_layers
    v = resolved.config.virtual_pipeline_parallel_size
    fullest = max(stage.total_bytes for stage in each)
    assert float(whole.memory_total_bytes) == pytest.approx(fullest, rel=1e-3 if v == 1 else 0.03)
    m = WORKLOAD.global_batch_size / resolved.config.data_parallel_size
    slowest = m * max(stage.seconds for stage in each)
    bubble = sum(stage.seconds for stage in each) - slowest / m
    together = sum(
        float(whole.parts[name])
        for name in (*anatomy.PER_MICRO_BATCH, "pipeline_bubble", "overhead")
    )
    assert together == pytest.approx(slowest + bubble / v, rel=0.01)


def test_rows_and_lone_candidates_are_equal_to_the_bit() -> None:
    case = case_of(model=NANO, workload=WORKLOAD, cluster=NODES)
    sizes = [
        {"pipeline_parallel_size": p, "expert_parallel_size": e, "recompute": how}
        for p in (1, 2, 4, 8)
        for e in (4, 8)
        for how in ("none", "full")
    ]
    configs = [config(**each) for each in sizes]
    rows = columns(training_costs(case=case, candidates=Candidates.from_configs(configs)))
    for place, one in enumerate(configs):
        alone = columns(training_costs(case=case, candidates=Candidates.alone(one)))
        assert {name: float(column) for name, column in alone.items()} == {
            name: float(
                column if not hasattr(column, "shape") or not column.shape else column[place]
            )
            for name, column in rows.items()
        }


def test_no_candidates_cost_nothing() -> None:
    """A part of a space may hold no legal one."""
    case = case_of(model=NANO, workload=WORKLOAD, cluster=NODES)
    none = Candidates.from_configs([config()]).take(np.zeros(0, dtype=np.intp))
    assert training_costs(case=case, candidates=none).step_s.shape == (0,)


def test_the_scan_of_a_state_space_runs_at_the_rate_of_its_framework() -> None:
    (_, layers), *_ = NANO.kinds
    case = case_of(model=layers, workload=WORKLOAD, cluster=NODES)
    candidate = Candidates.alone(config(micro_batch_size=2))
    rate = case.profile.framework.state_scan_flops_per_second
    assert rate is not None
    gpu = case.cluster.gpu
    convolution = chunked_seconds(
        mixer_kernel(case, layers, "convolution"),
        convolution_work(layers, 1),
        tokens=8192,
        prompts=2.0,
        gpu=gpu,
        peak=peak_flops(gpu, precision="bf16"),
    )
    seconds = mixer_kernels(
        case=case, candidates=candidate, s=shapes(case=case, candidates=candidate)
    )
    assert seconds == pytest.approx(convolution + 8192 * scan_work(layers, 1).flops / rate)


def test_context_parallel_ranks_scan_whole_sequences_of_fewer_heads() -> None:
    """The same work, exchanged before and after; a group that ranks share is copied."""
    (_, layers), *_ = NANO.kinds
    case = case_of(model=layers, workload=WORKLOAD, cluster=NODES)
    whole, split = (Candidates.alone(config(context_parallel_size=c)) for c in (1, 4))
    each = [
        mixer_kernels(case=case, candidates=one, s=shapes(case=case, candidates=one))
        for one in (whole, split)
    ]
    assert each[1] == pytest.approx(each[0] / 4, rel=0.05)


def test_flops_are_those_that_megatron_prints() -> None:
    """22.28 GFLOP a token at 8,192 tokens (Megatron Bridge's table of results, 26.06)."""
    flops = token_flops(NANO, replace(WORKLOAD, sequence_length=8192)).model
    assert flops == pytest.approx(22.28e9, rel=0.015)


@pytest.mark.parametrize(
    ("spec", "sizes", "is_legal"),
    [
        (NANO, {"tensor_parallel_size": 8}, True),
        (NANO, {"tensor_parallel_size": 16}, False),  # 8 groups
        (
            NANO,
            {"tensor_parallel_size": 2, "context_parallel_size": 8},
            True,
        ),  # a group on two ranks
        (NANO, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, False),
        (QWEN, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, True),
        (QWEN, {"context_parallel_size": 2}, False),
        (model("glm-5"), {"context_parallel_size": 2}, False),
    ],
)
def test_mixers_are_split_as_megatron_splits_them(
    spec: ModelSpec, sizes: dict[str, Any], is_legal: bool
) -> None:
    case = case_of(model=spec, workload=WORKLOAD, cluster=NODES)
    assert is_split(case, sizes) == is_legal


def is_split(case: TrainingCase, sizes: dict[str, Any]) -> bool:
    code = int(legality(case=case, candidates=Candidates.alone(config(**sizes))))
    return code >> REASONS.index("mixer_not_divisible") & 1 == 0


@pytest.mark.parametrize(
    ("spec", "sizes", "since"),
    [
        (NANO, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}, "0.17"),
        (QWEN, {"tensor_parallel_size": 2, "context_parallel_size": 8}, "0.18"),
        (QWEN, {"tensor_parallel_size": 2, "context_parallel_size": 16}, None),  # 16 heads of keys
    ],
)
def test_what_later_releases_split(
    spec: ModelSpec, sizes: dict[str, Any], since: str | None
) -> None:
    releases = ["0.16", "0.17", "0.18", "26.02", "26.06"]
    cases = [
        case_of(model=spec, workload=replace(WORKLOAD, framework_version=each), cluster=NODES)
        for each in releases
    ]
    splitting = [each for each, case in zip(releases, cases, strict=True) if is_split(case, sizes)]
    assert splitting == (
        [] if since is None else [each for each in releases[:3] if each >= since] + ["26.06"]
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"optimizer": "muon"}, "training.optimizer"),
        ({"task": "lora", "lora": LoraSpec(rank=8)}, "training.task"),
        ({"framework": "nanotron"}, "training.framework"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    gpus = ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64)
    with pytest.raises(UnsupportedError, match="layers of different kinds") as refused:
        resolve_training(
            Query(kind="training", model=NANO, cluster=gpus, training=replace(WORKLOAD, **changes))
        )
    assert refused.value.field == field


def test_a_framework_without_such_layers_is_refused_by_name() -> None:
    gpus = ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64)
    with pytest.raises(UnsupportedError, match="Megatron Core does not support kimi_delta layers"):
        resolve_training(Query(kind="training", model="kimi-k3", cluster=gpus, training=WORKLOAD))


def test_a_layout_counts_the_kinds_on_each_stage() -> None:
    """More of the layers with experts on the first stage make it fuller."""
    query = Query(
        kind="training",
        model=NANO,
        cluster=ClusterQuery(gpu="h100-sxm-80gb", num_gpus=64),
        training=WORKLOAD,
        parallel=ParallelQuery(
            pipeline_parallel_size=2, expert_parallel_size=8, pipeline_layout="Et*40|t*12L"
        ),
    )
    uneven = resolve_configuration(query)
    words = uneven.estimate(with_fixes=False).provenance["blocks_by_stage"]
    assert words == [
        "18 x mamba2, 17 x experts, 5 x attention",
        "5 x mamba2, 6 x experts, 1 x attention",
    ]
    even = resolve_configuration(
        replace(query, parallel=replace(query.parallel, pipeline_layout=None))
    )
    assert (
        uneven.problem.costs(uneven.candidate).memory_total_bytes
        > even.problem.costs(even.candidate).memory_total_bytes
    )
