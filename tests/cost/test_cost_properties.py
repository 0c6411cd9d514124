"""What must hold for every problem: sums, independence of rows, and the direction in which each
knob moves the result.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog.efficiency import efficiency_profile
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.embedding_and_head import head_time
from hp_tool.cost.layer import layer_bytes, layer_time
from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.training import training_costs
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.parts import MEMORY_KEYS, STEP_KEYS
from hp_tool.space import default_axes, legal_chunks
from tests.cost.cases import Problem, columns, problems, rows

EXACT = 1e-12


def space(problem: Problem) -> Candidates:
    axes = default_axes(case=problem, query=ParallelQuery())
    return Candidates.concatenate(
        [chunk.candidates for chunk in legal_chunks(case=problem, axes=axes)]
    )


def one_stage(problem: Problem, config: ParallelConfig) -> tuple[Problem, ParallelConfig]:
    """The same without a pipeline, where the worst stage cannot change from one candidate to the
    next.
    """
    gpus = config.tensor_parallel_size * config.data_parallel_size
    config = replace(config, pipeline_parallel_size=1, virtual_pipeline_parallel_size=1)
    return replace(problem, cluster=replace(problem.cluster, num_gpus=gpus)), config


@given(problems())
def test_parts_sum_to_totals_and_everything_is_finite(case: tuple[Problem, ParallelConfig]) -> None:
    problem, _ = case
    costs = problem.costs(space(problem))
    assert set(costs.parts) == set(STEP_KEYS) and set(costs.memory_parts) == set(MEMORY_KEYS)
    np.testing.assert_allclose(sum(costs.parts.values()), costs.step_s, rtol=EXACT)
    np.testing.assert_allclose(
        sum(costs.memory_parts.values()), costs.memory_total_bytes, rtol=EXACT
    )
    for name, column in columns(costs).items():
        assert np.all(np.isfinite(column)) and np.all(column >= 0), name
    assert np.all(costs.step_s > 0)
    assert np.all(costs.layer_activations_bytes <= costs.memory_parts["activations"])


@given(problems(), st.randoms(use_true_random=False))
def test_a_row_depends_on_nothing_but_its_configuration(
    case: tuple[Problem, ParallelConfig], random
) -> None:  # type: ignore[no-untyped-def]
    """Alone, in a batch of one, in a large batch, or in another order: the same numbers."""
    problem, _ = case
    candidates = space(problem)
    order = list(range(len(candidates)))
    random.shuffle(order)
    whole, shuffled = (
        columns(problem.costs(candidates)),
        columns(problem.costs(candidates.take(np.array(order)))),
    )
    for name, column in whole.items():
        np.testing.assert_array_equal(shuffled[name], column[order], err_msg=name)
    for index in order[:5]:
        one = columns(problem.costs(candidates.take(slice(index, index + 1))))
        alone = columns(problem.costs(Candidates.alone(candidates.config(index))))
        for name, column in whole.items():
            np.testing.assert_allclose(
                one[name], column[index : index + 1], rtol=EXACT, err_msg=name
            )
            assert alone[name] == one[name][0] and not isinstance(alone[name], np.ndarray), name


@given(problems())
def test_a_configuration_survives_the_way_through_arrays(
    case: tuple[Problem, ParallelConfig],
) -> None:
    problem, config = case
    assert Candidates.from_configs([config]).config(0) == config
    candidates = space(problem)
    again = Candidates.from_configs(candidates.config(index) for index in range(len(candidates)))
    assert rows(again) == rows(candidates)


@given(problems())
def test_one_gpu_is_the_sum_of_its_layers(case: tuple[Problem, ParallelConfig]) -> None:
    """t = p = d = 1: no communication, no bubble; 18 bytes a parameter and every layer's saved
    tensors.
    """
    problem, config = case
    problem = replace(problem, cluster=replace(problem.cluster, num_gpus=1, gpus_per_node=1))
    config = ParallelConfig(micro_batch_size=config.micro_batch_size)
    one = Candidates.from_configs([config])
    layer = layer_time(case=problem, candidates=one)
    head = head_time(case=problem, candidates=one)
    costs, m = problem.costs(one), problem.workload.global_batch_size / config.micro_batch_size
    compute = m * (
        problem.model.num_hidden_layers * (layer.forward + layer.backward)
        + head.embedding
        + head.output
    )
    for name in set(STEP_KEYS) - {"compute", "attention", "optimizer", "overhead"}:
        assert costs.parts[name][0] == 0.0, name
    assert (costs.parts["compute"] + costs.parts["attention"])[0] == pytest.approx(
        compute[0], rel=EXACT
    )
    states = sum(costs.memory_parts[name][0] for name in ("weights", "gradients", "optimizer"))
    parameters = total_parameters(problem.model, sequence_length=problem.workload.sequence_length)
    assert states == pytest.approx(18 * parameters, rel=EXACT)
    saved = layer_bytes(case=problem, candidates=one).saved
    assert costs.layer_activations_bytes[0] == pytest.approx(
        problem.model.num_hidden_layers * saved[0], rel=EXACT
    )


@given(problems(replicas=4))
def test_states_never_rise_with_zero_stage(case: tuple[Problem, ParallelConfig]) -> None:
    problem, config = case
    costs = problem.costs([replace(config, zero_stage=stage) for stage in (0, 1, 2, 3)])
    for name in ("weights", "gradients", "optimizer"):
        assert np.all(np.diff(costs.memory_parts[name]) <= 0), name
    # Weights gathered two layers at a time may take more than sharding a small model saves: only
    # stages 0 to 2 are a law.
    assert np.all(np.diff(costs.memory_total_bytes[:3]) < 0)
    # Activations are the worst stage's, and which stage that is may change with the states.
    same = costs.worst_stage == costs.worst_stage[0]
    np.testing.assert_array_equal(
        costs.layer_activations_bytes[same], costs.layer_activations_bytes[0]
    )


@given(problems())
def test_saved_activations_never_rise_with_recomputation_or_sequence_parallelism(
    case: tuple[Problem, ParallelConfig],
) -> None:
    """A fused core that is recomputed keeps no log-sum-exp, but with rotary positions the heads
    before their rotation.
    """
    problem, config = one_stage(*case)
    none, selective, full = problem.costs(
        [replace(config, recompute=name) for name in ("none", "selective", "full")]  # type: ignore[arg-type]
    ).layer_activations_bytes
    assert full < min(selective, none)
    if problem.workload.attention == "unfused" or problem.model.positions != "rotary":
        assert selective <= none
    if config.tensor_parallel_size > 1:
        off, on = problem.costs(
            [replace(config, sequence_parallel=value) for value in (False, True)]
        ).layer_activations_bytes
        assert on < off


@given(problems())
def test_saved_activations_never_rise_with_tensor_parallelism(
    case: tuple[Problem, ParallelConfig],
) -> None:
    """Replicas and micro-batches held, so the number of devices grows with t."""
    problem, config = one_stage(*case)
    found = []
    for t in (1, 2, 4, 8):
        gpus = t * config.data_parallel_size
        wider = replace(problem, cluster=replace(problem.cluster, num_gpus=gpus))
        each = replace(
            config, tensor_parallel_size=t, sequence_parallel=t > 1 and config.sequence_parallel
        )
        found.append(wider.costs([each]).layer_activations_bytes[0])
    assert np.all(np.diff(found) <= 0)


def slower(cluster: ClusterSpec, part: str) -> ClusterSpec:
    """The cluster with one of its rates halved, or its network's latency made 100 us longer."""
    if part == "network":
        return replace(
            cluster,
            inter_node_bandwidth_bytes_per_second=cluster.inter_node_bandwidth_bytes_per_second / 2,
        )
    if part == "latency":
        return replace(cluster, inter_node_latency_s=cluster.inter_node_latency_s + 1e-4)
    name = {
        "nvlink": "nvlink_bandwidth_bytes_per_second",
        "memory": "memory_bandwidth_bytes_per_second",
    }[part]
    return replace(cluster, gpu=replace(cluster.gpu, **{name: getattr(cluster.gpu, name) / 2}))


@given(
    problems(),
    st.sampled_from(("network", "latency", "nvlink", "memory")),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_slower_hardware_never_makes_a_step_faster(
    case: tuple[Problem, ParallelConfig], part: str, tensor_overlap: float, data_overlap: float
) -> None:
    """Whatever share of the communication is hidden."""
    problem, _ = case
    framework = replace(
        problem.profile.framework,
        tensor_parallel_overlap=tensor_overlap,
        data_parallel_overlap=data_overlap,
    )
    problem = replace(problem, profile=replace(problem.profile, framework=framework))
    candidates = space(problem)
    before = problem.costs(candidates).step_s
    after = replace(problem, cluster=slower(problem.cluster, part)).costs(candidates).step_s
    assert np.all(after >= before * (1 - EXACT))


@given(problems(replicas=8))
def test_more_replicas_never_raise_compute(case: tuple[Problem, ParallelConfig]) -> None:
    """The same batch on 1, 2, 4 and 8 replicas."""
    problem, config = case
    config = replace(config, virtual_pipeline_parallel_size=1)
    computed = []
    for d in (1, 2, 4, 8):
        gpus = d * config.tensor_parallel_size * config.pipeline_parallel_size
        wider = replace(problem, cluster=replace(problem.cluster, num_gpus=gpus))
        costs = wider.costs([replace(config, data_parallel_size=d)])
        computed.append(costs.parts["compute"][0] + costs.parts["recompute"][0])
    assert np.all(np.diff(computed) < 0)


@given(problems())
def test_recomputation_costs_time_and_full_costs_most(case: tuple[Problem, ParallelConfig]) -> None:
    problem, config = case
    none, selective, full = problem.costs(
        [replace(config, recompute=name) for name in ("none", "selective", "full")]  # type: ignore[arg-type]
    ).parts["recompute"]
    assert 0 == none < selective < full


def test_headroom_only_lowers_the_capacity() -> None:
    problem, config = problems_example()
    candidates = Candidates.from_configs([config])
    none = training_costs(case=problem, candidates=candidates, memory_headroom_fraction=0.0)
    half = training_costs(case=problem, candidates=candidates, memory_headroom_fraction=0.5)
    assert (none.capacity_bytes, half.capacity_bytes) == (
        problem.cluster.gpu.memory_bytes,
        problem.cluster.gpu.memory_bytes / 2,
    )
    assert none.memory_total_bytes == half.memory_total_bytes


def problems_example() -> tuple[Problem, ParallelConfig]:
    """One fixed case, where nothing random is needed."""
    from hp_tool.catalog import cluster, model
    from hp_tool.domain.hardware import ClusterQuery
    from hp_tool.domain.workload import TrainingWorkload

    machine = cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=8))
    problem = Problem(
        model=model("gpt-22b"),
        cluster=machine,
        workload=TrainingWorkload(sequence_length=2048, global_batch_size=8),
        profile=efficiency_profile(gpu=machine.gpu, framework="megatron-core"),
    )
    return problem, ParallelConfig(tensor_parallel_size=8)
