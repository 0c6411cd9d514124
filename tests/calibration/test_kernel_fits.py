"""Constants put into made times come out again, and a few odd timings do not bend them."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool import catalog
from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.cost.case import Machine
from hp_tool.cost.network import adjacent_group, group_ring
from hp_tool.cost.roofline import matmul_seconds
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.measurement import Operation, OperationTimes
from hp_tool.loop.calibration.microbenchmarks import (
    GPU,
    fit_additive_roofline,
    fit_link,
    fit_machine,
    fit_memory,
    fit_roofline,
    plan_operations,
)

SIZES = np.logspace(-7, -2, 40)
fractions = st.floats(0.2, 0.95)
overheads = st.floats(1e-6, 2e-5)


@settings(max_examples=20)
@given(peak=fractions, bandwidth=fractions, overhead=overheads)
def test_a_roofline_is_found_again(peak, bandwidth, overhead):
    flops, traffic = np.concatenate([SIZES, SIZES * 0.1]), np.concatenate([SIZES * 0.1, SIZES])
    seconds = overhead + np.maximum(flops / peak, traffic / bandwidth)
    seconds[3] *= 30  # one odd kernel
    found, errors = fit_roofline(flops, traffic, seconds, bounds=GPU)
    assert (found.peak_fraction, found.bandwidth_fraction) == pytest.approx(
        (peak, bandwidth), rel=0.02
    )
    assert found.overhead_s == pytest.approx(overhead, rel=0.05)
    assert np.median(errors) < 0.01


@settings(max_examples=20)
@given(peak=fractions, bandwidth=fractions, overhead=overheads)
def test_so_is_an_additive_one(peak, bandwidth, overhead):
    flops, traffic = np.concatenate([SIZES, SIZES * 0.1]), np.concatenate([SIZES * 0.1, SIZES])
    found, _ = fit_additive_roofline(
        flops, traffic, overhead + flops / peak + traffic / bandwidth, bounds=GPU
    )
    assert (found.peak_fraction, found.bandwidth_fraction) == pytest.approx(
        (peak, bandwidth), rel=0.02
    )


@settings(max_examples=20)
@given(fraction=fractions, overhead=overheads)
def test_so_are_memory_bound_kernels(fraction, overhead):
    kernels = np.tile([1.0, 2.0], len(SIZES) // 2)
    (found, per_kernel), _ = fit_memory(
        SIZES, kernels, kernels * overhead + SIZES / fraction, bounds=GPU
    )
    assert (found, per_kernel) == pytest.approx((fraction, overhead), rel=0.02)


@settings(max_examples=20)
@given(fraction=fractions, latency=overheads, per_peer=overheads)
def test_so_is_a_link(fraction, latency, per_peer):
    peers = np.tile([2.0, 4.0, 8.0, 2.0], len(SIZES) // 4)
    seconds = latency + per_peer * (peers - 1) + SIZES / fraction
    found, _ = fit_link(peers, SIZES, seconds, bounds=GPU)
    assert found.bandwidth_fraction == pytest.approx(fraction, rel=0.02)
    assert found.latency_s + found.latency_per_peer_s == pytest.approx(latency + per_peer, rel=0.05)
    two, _ = fit_link(
        np.full(len(SIZES), 2.0), SIZES, latency + per_peer + SIZES / fraction, bounds=GPU
    )
    assert two.latency_s == two.latency_per_peer_s  # a message is half of a ring of two
    assert two.latency_s + two.latency_per_peer_s == pytest.approx(latency + per_peer, rel=0.05)


def test_the_cost_models_own_times_give_its_constants_back():
    """A fit inverts the formulas the cost model has, so it must understand an operation's shape as
    they do.
    """
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=16))
    stock = gpu_efficiency(catalog.gpu("h100-sxm-80gb"))
    from hp_tool.catalog.efficiency import efficiency_profile

    profile = efficiency_profile(gpu=machine.gpu, framework="megatron-core")
    isolated = EfficiencyProfile(gpu=stock, framework=_undisturbed(profile))
    operations = plan_operations(machine, precisions=("bf16",))
    assert {(each.group_size, each.stride) for each in operations} == {
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (2, 8),
    }
    times = []
    for each in operations:
        seconds = _modelled(each, machine=machine, profile=isolated)
        if seconds is not None:
            times.append(OperationTimes(operation=each, seconds_per_rank=(seconds,) * 16))
    found = fit_machine(times, cluster=machine, start=stock, fitted_on="made").gpu
    assert found.matmul["bf16"].peak_fraction == pytest.approx(
        stock.matmul["bf16"].peak_fraction, rel=0.03
    )
    assert (
        found.nvlink.bandwidth_fraction < stock.nvlink.bandwidth_fraction
    )  # without a ramp, the mean over sizes
    assert found.memory_fraction == stock.memory_fraction  # nothing of it was timed
    assert found.fitted_on == "made"


@pytest.mark.parametrize("gpu", ["cpu", "h100-sxm-80gb"])
def test_small_and_large_operations_of_each_kind_are_timed(gpu):
    """Eight times the elements at least: overheads are told from rates by both ends."""
    sizes = defaultdict(list)
    for each in plan_operations(cluster(ClusterQuery(gpu=gpu, num_gpus=2)), precisions=("fp32",)):
        sizes[each.name].append(math.prod(each.shape))
    assert {
        "matmul",
        "attention",
        "add",
        "activation",
        "norm",
        "loss",
        "all_reduce",
    } <= sizes.keys()
    assert min(max(each) / min(each) for each in sizes.values()) >= 8


def test_every_operation_counts_what_it_computes_moves_and_sends():
    """On a machine that runs exactly as stated, every fit finds its constants and leaves next to no
    error.
    """
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=32))
    times = [
        _stated(each, machine=machine)
        for each in plan_operations(machine, precisions=("bf16", "fp16"))
    ]
    found = fit_machine(
        times, cluster=machine, start=gpu_efficiency(catalog.gpu("h100-sxm-80gb")), fitted_on="made"
    )
    assert max(error for _, error in found.errors.values()) < 0.01, found.errors
    assert found.gpu.matmul["fp16"] == found.gpu.matmul["bf16"]
    attention = found.gpu.attention
    assert found.gpu.matmul["bf16"].peak_fraction == pytest.approx(
        0.6, rel=0.01
    )  # no planned shape is bound by memory
    assert (attention.peak_fraction, attention.bandwidth_fraction) == pytest.approx(
        (0.6, 0.7), rel=1e-3
    )
    assert attention.overhead_s == pytest.approx(5e-6, rel=0.01)
    assert (found.gpu.memory_fraction, found.gpu.kernel_overhead_s) == pytest.approx(
        (0.7, 3e-6), rel=1e-3
    )
    for link in (found.gpu.nvlink, found.gpu.all_to_all, found.network):
        assert link.bandwidth_fraction == pytest.approx(0.8, rel=1e-3)
        assert link.latency_s + 3 * link.latency_per_peer_s == pytest.approx(
            10e-6 + 3 * 2e-6, rel=0.01
        )


def _stated(operation: Operation, *, machine) -> OperationTimes:
    """0.6 of the peak, 0.7 of the memory's bandwidth and 0.8 of the links'. A kernel takes what the
    median rank takes, a collective what the slowest does.
    """
    gpu, name, shape = machine.gpu, operation.name, operation.shape
    element = {"bf16": 2, "fp16": 2, "fp32": 4}[operation.precision]
    peak, memory = (
        gpu.peak_flops_per_second[operation.precision] * 0.6,
        gpu.memory_bandwidth_bytes_per_second * 0.7,
    )
    if name == "matmul":
        m, n, k = shape
        seconds = 5e-6 + max(2 * m * n * k / peak, element * (m * k + k * n + m * n) / memory)
    elif (
        name == "attention"
    ):  # causal: half of two matmuls of s x s x d; queries, keys, values and output
        b, s, heads, kv_heads, d = shape
        seconds = (
            5e-6
            + 0.5 * 2 * 2 * b * heads * s * s * d / peak
            + element * b * s * d * (2 * heads + 2 * kv_heads) / memory
        )
    elif operation.group_size == 1:
        tensors, kernels = {
            "add": (3, 1),
            "activation": (2 + 3, 2),
            "norm": (2 + 3, 2),
            "loss": (2 + 2, 2),
        }[name]
        seconds = kernels * 3e-6 + tensors * element * math.prod(shape) / memory
    else:
        n, rounds = operation.group_size, 2 if name == "all_reduce" else 1
        away = machine.inter_node_bandwidth_bytes_per_second
        bandwidth = 0.8 * (away if operation.stride > 1 else gpu.nvlink_bandwidth_bytes_per_second)
        seconds = 10e-6 + (n - 1) * 2e-6 + rounds * shape[0] * (n - 1) / n / bandwidth
    slower = (0.8, 0.9, 1.0) if operation.group_size > 1 else (0.8, 1.0, 2.0)
    return OperationTimes(
        operation=operation, seconds_per_rank=tuple(seconds * factor for factor in slower)
    )


def _undisturbed(profile):
    import dataclasses

    return dataclasses.replace(profile.framework, matmul_slowdown=1.0)


def _modelled(operation: Operation, *, machine, profile) -> float | None:
    if operation.name == "matmul":
        m, n, k = operation.shape
        return float(
            matmul_seconds(
                m, n, k, machine=Machine(cluster=machine, profile=profile), precision="bf16"
            )
        )
    if operation.name == "all_gather" and operation.stride == 1:
        n = np.array([operation.group_size])
        wire = operation.shape[0] * (n - 1) / n
        return float(
            group_ring(
                machine=Machine(cluster=machine, profile=profile),
                group=adjacent_group(n, cluster=machine),
            ).seconds(wire)[0]
        )
    return None
