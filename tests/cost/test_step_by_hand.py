"""Terms of a step that other tests see only in a sum, each by arithmetic on a model, a batch or a
group that singles it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hp_tool.catalog import cluster
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.workload import TrainingWorkload
from tests.cost.cases import Problem
from tests.cost.test_primitives import NETWORK, NVLINK, plain_profile

PEAK, MEMORY = 312e12 / 2, 2039e9 / 2
"""FLOPs and bytes a second that half of an A100 gives."""
L, H, V, S = 8, 4096, 32768, 4096
"""Layers, width, vocabulary, tokens of a sequence."""
TOKENS_BYTES = S * H * 2
"""One micro-batch's hidden states in 16 bits."""


def costs(
    *,
    gpus: int = 8,
    model: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    **parallel: Any,
) -> TrainingCosts:
    """Costs of one configuration on A100 at half of every peak, where nothing is hidden and no
    launch takes time.
    """
    machine = cluster(ClusterQuery(gpu="a100-sxm-80gb", num_gpus=gpus, inter_node_latency_s=0.0))
    profile = plain_profile(machine)
    roof = replace(profile.gpu.attention, overhead_s=0.0)
    profile = replace(
        profile,
        gpu=replace(
            profile.gpu,
            attention=roof,
            matmul={"bf16": roof},
            memory_fraction=0.5,
            kernel_overhead_s=0.0,
        ),
        framework=replace(
            profile.framework,
            fp32_accumulation={},
            attention_slowdown=1.0,
            attention_backward_slowdown=1.0,
            elementwise_traffic_factor=1.0,
            optimizer_traffic_factor=1.0,
            tensor_parallel_forward_overlap=0.0,
            host_launch_s=0.0,
        ),
    )
    shape = {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 32,
        "vocab_size": V,
        "position_embedding": "rotary",
    }
    workload = {"sequence_length": S, "global_batch_size": 32}
    problem = Problem(
        model=ModelSpec(**shape | (model or {})),
        cluster=machine,
        workload=TrainingWorkload(**workload | (work or {})),
        profile=profile,
    )
    return problem.costs([ParallelConfig(**parallel)])


def part(name: str, **case: Any) -> float:
    return float(costs(**case).parts[name][0])


def test_attention_is_two_matmuls_forward_and_five_backward() -> None:
    """Rows four times as long, a quarter as many: the same tokens, each with 3 S / 2 more keys
    under the causal mask.
    """
    short = {"sequence_length": S, "global_batch_size": 32}
    long = {"sequence_length": 4 * S, "global_batch_size": 8}
    config = {"data_parallel_size": 8}
    more = part("attention", work=long, **config) - part(
        "attention", work=short, micro_batch_size=4, **config
    )
    one_matmul = 2 * (4 * S) * (3 * S / 2) * H / PEAK
    assert more == pytest.approx(L * (2 + 5) * one_matmul, rel=1e-9)
    around = part("compute", work=long, **config) - part(
        "compute", work=short, micro_batch_size=4, **config
    )
    assert around == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("frozen", "matmuls"), [((), 3), (("embedding", "output_layer"), 2)])
def test_the_output_layer_has_a_matmul_forward_one_for_its_input_and_one_for_its_weights(
    frozen: tuple[str, ...], matmuls: int
) -> None:
    """A vocabulary twice as large; the loss passes 44 bytes a logit through memory."""
    config = {"data_parallel_size": 8, "work": {"frozen": frozen}}
    more = part("compute", model={"vocab_size": 2 * V}, **config) - part("compute", **config)
    assert more == pytest.approx(
        4 * (matmuls * 2 * S * V * H / PEAK + 44 * S * V / MEMORY), rel=1e-9
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_output_layer_has_collectives_of_its_own(sequence_parallel: bool) -> None:
    """What twice the layers do not double. An all-reduce of the input's gradient, or two gathers of
    the input and a reduce-scatter of its gradient; and the loss all-reduces a maximum, a sum and a
    logit of each token in fp32.
    """
    config: dict[str, Any] = {"tensor_parallel_size": 8, "sequence_parallel": sequence_parallel}
    few, many = (
        part("tensor_parallel", model={"num_hidden_layers": layers}, **config)
        for layers in (L, 2 * L)
    )
    wire = TOKENS_BYTES * 7 / 8 / (NVLINK / 2)
    around = 3 * (1e-6 + wire) if sequence_parallel else 1e-6 + 2 * wire
    inside = 3 * (1e-6 + 2 * 4 * S * 7 / 8 / (NVLINK / 2))
    assert 2 * few - many == pytest.approx(32 * (around + inside), rel=1e-9)


@pytest.mark.parametrize(("zero", "reductions", "gathers"), [(1, 1, 1), (2, 4, 1), (3, 4, 8)])
def test_gradients_are_reduced_after_every_micro_batch_from_zero_2_on(
    zero: int, reductions: int, gathers: int
) -> None:
    """4 micro-batches: fp32 gradients reduced, 16-bit weights gathered once, or under ZeRO 3 for
    either pass of each.
    """
    parameters = costs(data_parallel_size=8, zero_stage=1).memory_parts["weights"][0] / 2
    seconds = part("data_parallel", data_parallel_size=8, zero_stage=zero)
    reduce, gather = (size * parameters * 7 / 8 / (NVLINK / 2) for size in (4, 2))
    assert seconds == pytest.approx(reductions * reduce + gathers * gather, rel=1e-3)


@pytest.mark.parametrize(("zero", "states", "gradients"), [(0, 1, 1), (1, 8, 1), (2, 8, 8)])
def test_the_optimizer_reads_and_writes_states_and_passes_twice_over_gradients(
    zero: int, states: int, gradients: int
) -> None:
    """On its share of the parameters it reads and writes 12 bytes, reads a gradient of 4 and writes
    a weight of 2; for the norm and for zeroing, all gradients that the rank holds are passed over
    twice more.
    """
    found = costs(data_parallel_size=8, zero_stage=zero)
    parameters = found.memory_parts["weights"][0] / 2
    moved = parameters * ((2 * 12 + 4 + 2) / states + 2 * 4 / gradients)
    assert found.parts["optimizer"][0] == pytest.approx(moved / MEMORY, rel=1e-9)


@pytest.mark.parametrize(("layers", "gathered"), [(1, 1), (2, 2), (8, 2)])
def test_zero_3_holds_the_running_layer_whole_and_the_one_it_prefetches(
    layers: int, gathered: int
) -> None:
    """12 h^2 weights, 9 h of biases and 4 h of norms a layer, in 16 bits; ZeRO 2 holds an empty
    gradient of each matrix.
    """
    kept, sharded = (
        costs(
            data_parallel_size=8, zero_stage=zero, model={"num_hidden_layers": layers}
        ).memory_parts["buffers"][0]
        for zero in (2, 3)
    )
    assert sharded - kept == pytest.approx(
        gathered * 2 * (12 * H**2 + 13 * H) - 2 * 12 * H**2, rel=1e-12
    )


@pytest.mark.parametrize(("replicas", "stages", "gpus"), [(1, 4, 8), (2, 4, 16), (1, 8, 16)])
def test_stages_that_just_fill_an_nvlink_domain_do_not_touch_the_network(
    replicas: int, stages: int, gpus: int
) -> None:
    """Pairs of tensor-parallel ranks: 4 stages of 2 are a node of 8. Each rank sends its half, 2 m
    times.
    """
    seconds = part(
        "pipeline_p2p",
        gpus=gpus,
        tensor_parallel_size=2,
        pipeline_parallel_size=stages,
        data_parallel_size=replicas,
    )
    latency, rate = (1e-6, NVLINK / 2) if gpus == 8 else (1e-5, NETWORK / 2)
    assert seconds == pytest.approx(
        2 * 32 / replicas * (latency + TOKENS_BYTES / 2 / rate), rel=1e-9
    )


@pytest.mark.parametrize(("gpus", "stages", "context"), [(8, 4, 2), (8, 2, 4), (16, 8, 2)])
def test_context_parallel_ranks_send_their_part_of_the_sequence_to_the_next_stage(
    gpus: int, stages: int, context: int
) -> None:
    """Each of c ranks holds S / c tokens, and sends those alone: 2 m messages of S / c rows."""
    seconds = part(
        "pipeline_p2p", gpus=gpus, context_parallel_size=context, pipeline_parallel_size=stages
    )
    latency, rate = (1e-6, NVLINK / 2) if gpus == 8 else (1e-5, NETWORK / 2)
    assert seconds == pytest.approx(2 * 32 * (latency + TOKENS_BYTES / context / rate), rel=1e-9)


def test_a_weight_moves_2_bytes_forward_2_for_the_input_and_8_for_its_gradient() -> None:
    """Matmuls of 32 tokens are bound by memory. Their bytes are linear in the tokens, so twice the
    bytes at 32 less those at 64 are the weights' own: read in 16 bits by the forward pass and for
    the input's gradient; the fp32 buffer of the weight's gradient is read and written (Megatron's
    gradient_accumulation_fusion: C += A B). A layer has 12 h^2 weights.
    """

    def seconds(layers: int, tokens: int) -> float:
        work = {"sequence_length": tokens, "global_batch_size": 8}
        return part("compute", model={"num_hidden_layers": layers}, work=work, data_parallel_size=8)

    own = [2 * seconds(layers, 32) - seconds(layers, 64) for layers in (L, 2 * L)]
    assert own[1] - own[0] == pytest.approx(L * 12 * H**2 * (2 + 2 + 8) / MEMORY, rel=1e-9)
