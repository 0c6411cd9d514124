"""What must hold for every serving problem: sums, independence of rows, limits, and which way each
knob moves the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.roofline import peak_flops
from hp_tool.cost.serving.load import tpot_quantile, ttft_quantile
from hp_tool.domain.efficiency import Roofline
from hp_tool.domain.engines import EngineEfficiency
from tests.cost.serving.serving_cases import Serving, columns, serving, servings

EXACT = 1e-9
few = settings(suppress_health_check=[HealthCheck.filter_too_much])
LOADS = [1, 2, 3, 5, 8, 16, 31, 64, 100, 256, 1000, 10_000]


@few
@given(servings())
def test_parts_sum_to_totals_and_everything_is_finite(setup: Serving) -> None:
    costs = setup.costs(concurrency=LOADS)
    for name, column in columns(costs).items():
        assert np.all(np.isfinite(column)) and np.all(column >= 0), name
    np.testing.assert_allclose(sum(costs.parts.values()), costs.request_latency_s, rtol=EXACT)
    output = setup.case.output_length
    np.testing.assert_allclose(
        costs.ttft_s + (output - 1) * costs.tpot_s, costs.request_latency_s, rtol=EXACT
    )


@few
@given(servings())
def test_memory_adds_up(setup: Serving) -> None:
    memory = setup.costs(concurrency=[1]).bytes
    engine = setup.case.engine
    free = memory.kv_capacity / (
        engine.memory_fraction if engine.memory_fraction_of == "free" else 1.0
    )
    parts = memory.weights + memory.activations + memory.logits + memory.overhead + free
    np.testing.assert_allclose(parts, memory.capacity, rtol=EXACT)


@few
@given(servings())
def test_latency_never_falls_as_concurrency_rises(setup: Serving) -> None:
    """But a token of attention groups that step together: the more requests, the more of their
    prompts come in one pass, and the first tokens wait for what the later ones then do not.
    """
    costs = setup.costs(concurrency=LOADS)
    together = setup.config.attention_data_parallel_size > 1
    for name in ("ttft_s", "request_latency_s", *(() if together else ("tpot_s",))):
        column = getattr(costs, name)
        assert np.all(np.diff(column) >= -EXACT * column[:-1]), name


@few
@given(servings())
def test_a_row_depends_on_nothing_but_its_configuration(setup: Serving) -> None:
    together = columns(setup.costs(concurrency=LOADS))
    for index, load in enumerate(LOADS):
        for name, column in columns(setup.costs(concurrency=[load])).items():
            assert column[0] == together[name][index], name


@few
@given(
    servings(),
    st.sampled_from(
        ("memory_bandwidth_bytes_per_second", "nvlink_bandwidth_bytes_per_second", "network")
    ),
)
def test_more_bandwidth_never_hurts(setup: Serving, rate: str) -> None:
    cluster = setup.case.cluster
    if rate == "network":
        faster = replace(
            cluster,
            inter_node_bandwidth_bytes_per_second=2 * cluster.inter_node_bandwidth_bytes_per_second,
        )
    else:
        faster = replace(
            cluster, gpu=replace(cluster.gpu, **{rate: 2 * (getattr(cluster.gpu, rate) or 3e10)})
        )
    before = setup.costs(concurrency=LOADS)
    after = replace(setup, case=replace(setup.case, cluster=faster)).costs(concurrency=LOADS)
    assert np.all(after.request_latency_s <= before.request_latency_s * (1 + EXACT))


@few
@given(servings())
def test_a_prefix_cache_never_hurts(setup: Serving) -> None:
    # Of several chunks the last one's way through a pipeline is timed at their mean context
    # (docs/serving.md).
    assume(
        setup.config.pipeline_parallel_size == 1
        or setup.case.input_length < setup.config.max_num_batched_tokens
    )
    none, half = (
        replace(setup, case=replace(setup.case, prefix_cache_hit_rate=rate)) for rate in (0.0, 0.5)
    )
    slow, fast = none.costs(concurrency=LOADS), half.costs(concurrency=LOADS)
    assert np.all(fast.request_latency_s <= slow.request_latency_s * (1 + EXACT))


@few
@given(servings())
def test_the_mean_lies_between_quantiles_and_quantiles_rise(setup: Serving) -> None:
    costs, wave = setup.costs(concurrency=LOADS), min(setup.case.wave_share, 1.0)
    shares = (np.arange(1000) + 0.5) / 1000
    waits: dict[str, Any] = {"wave_s": costs.wave_s[:, None], "share": shares, "wave_share": wave}
    ttft = ttft_quantile(ttft_s=costs.ttft_s[:, None], **waits).T
    assert np.all(np.diff(ttft, axis=0) >= 0)
    np.testing.assert_allclose(ttft.mean(axis=0), costs.ttft_s, rtol=0.02)
    if setup.case.output_length > 1:
        tpot = tpot_quantile(
            tpot_s=costs.tpot_s[:, None], output_length=setup.case.output_length, **waits
        )
        np.testing.assert_allclose(np.mean(tpot, axis=1), costs.tpot_s, rtol=0.02)


def ideal(engine: EngineEfficiency) -> EngineEfficiency:
    """An engine that adds nothing to the kernels."""
    return replace(
        engine,
        matmul_slowdown=1.0,
        attention_slowdown=1.0,
        layer_overhead_s=0.0,
        iteration_overhead_s=0.0,
        sequence_overhead_s=0.0,
        prompt_layer_overhead_s=0.0,
        request_overhead_s=0.0,
        stream_overhead_s=0.0,
        first_token_s=0.0,
    )


def perfect(setup: Serving) -> Serving:
    """The setup on kernels that reach the datasheet, without overhead, on one device."""
    roof, link = (
        Roofline(peak_fraction=1.0, bandwidth_fraction=1.0, overhead_s=0.0),
        setup.case.profile.gpu.nvlink,
    )
    gpu = replace(
        setup.case.profile.gpu,
        matmul={"bf16": roof},
        thin_matmul={"bf16": roof},
        attention=roof,
        decode_attention=roof,
        memory_fraction=1.0,
        kernel_overhead_s=0.0,
        nvlink=link,
        small_all_reduce=link,
    )
    case = replace(
        setup.case,
        profile=replace(setup.case.profile, gpu=gpu),
        engine=ideal(setup.case.engine),
        wave_share=0.0,
    )
    return replace(setup, case=case, config=replace(setup.config, tensor_parallel_size=1))


def test_decoding_tends_to_bytes_over_bandwidth() -> None:
    """One request, a short prompt: every token reads all weights but the embedding, and its
    cache.
    """
    setup = perfect(serving(input_length=16, output_length=1024))
    case = setup.case
    model, device = case.model, case.cluster.gpu
    read = 2.0 * (total_parameters(model) - model.vocab_size * model.hidden_size)
    tpot = setup.costs(concurrency=[1]).tpot_s[0]
    assert tpot == pytest.approx(read / device.memory_bandwidth_bytes_per_second, rel=0.01)


def test_prefill_tends_to_flops_over_peak() -> None:
    """One long prompt: 2 FLOPs a parameter and token, and half of the attention matrix."""
    setup = perfect(serving(input_length=8000, output_length=2))
    case = setup.case
    model, device = case.model, case.cluster.gpu
    tokens = case.input_length
    matrices = total_parameters(model) - 2.0 * model.vocab_size * model.hidden_size
    attention = (
        2.0 * model.num_hidden_layers * model.num_attention_heads * model.head_size * tokens**2
    )
    least = (2.0 * matrices * tokens + attention) / peak_flops(device, precision="bf16")
    ttft = setup.costs(concurrency=[1]).ttft_s[0]
    assert least < ttft < 1.1 * least


def test_a_full_cache_makes_requests_wait_and_no_longer_slows_those_that_run() -> None:
    setup = serving(input_length=4096, output_length=512)
    costs = setup.costs(concurrency=[64, 256, 512])
    assert costs.kv_limited.tolist() == [False, True, True]
    assert costs.parts["queue"][0] == 0 and np.all(costs.parts["queue"][1:] > 0)
    assert costs.tpot_s[1] == pytest.approx(costs.tpot_s[2], rel=EXACT)
    assert costs.output_tokens_per_second_per_gpu[1] == pytest.approx(
        costs.output_tokens_per_second_per_gpu[2]
    )


def test_narrow_weights_leave_more_room_and_decode_faster() -> None:
    wide, fp8, int4 = (serving(precision=precision) for precision in ("bf16", "fp8", "int4"))
    rooms = [setup.costs(concurrency=[1]).bytes.kv_capacity[0] for setup in (wide, fp8, int4)]
    assert rooms == sorted(rooms) and len(set(rooms)) == 3
    seconds = [setup.costs(concurrency=[1]).tpot_s[0] for setup in (wide, fp8, int4)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_slow_front_end_bounds_the_request_rate() -> None:
    setup = serving(input_length=128, output_length=4)
    slow = replace(
        setup, case=replace(setup.case, engine=replace(setup.case.engine, request_overhead_s=1.0))
    )
    costs = slow.costs(concurrency=[64])
    rate = costs.output_tokens_per_second_per_gpu[0] * 2 / 4
    assert rate == pytest.approx(1.0 / (1.0 + 4 * setup.case.engine.stream_overhead_s), rel=0.001)
