"""Constants put into made times come out again, and a few odd timings do not bend them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.calibration.microbenchmarks import (
    GPU,
    fit_additive_roofline,
    fit_link,
    fit_machine,
    fit_memory,
    fit_roofline,
    plan_operations,
)
from hp_tool.catalog import cluster
from hp_tool.catalog.efficiency import gpu_efficiency
from hp_tool.cost.case import Machine
from hp_tool.cost.collectives import ring
from hp_tool.cost.roofline import matmul_seconds
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.measurement import Operation, OperationTimes

SIZES = np.logspace(-7, -2, 40)
fractions = st.floats(0.2, 0.95)
overheads = st.floats(1e-6, 2e-5)


@settings(max_examples=20, deadline=None)
@given(peak=fractions, bandwidth=fractions, overhead=overheads)
def test_a_roofline_is_found_again(peak, bandwidth, overhead):
    flops, traffic = np.concatenate([SIZES, SIZES * 0.1]), np.concatenate([SIZES * 0.1, SIZES])
    seconds = overhead + np.maximum(flops / peak, traffic / bandwidth)
    seconds[3] *= 30  # one odd kernel
    found, errors = fit_roofline(flops, traffic, seconds, bounds=GPU)
    assert (found.peak_fraction, found.bandwidth_fraction) == pytest.approx((peak, bandwidth), rel=0.02)
    assert found.overhead_s == pytest.approx(overhead, rel=0.05)
    assert np.median(errors) < 0.01


@settings(max_examples=20, deadline=None)
@given(peak=fractions, bandwidth=fractions, overhead=overheads)
def test_so_is_an_additive_one(peak, bandwidth, overhead):
    flops, traffic = np.concatenate([SIZES, SIZES * 0.1]), np.concatenate([SIZES * 0.1, SIZES])
    found, _ = fit_additive_roofline(flops, traffic, overhead + flops / peak + traffic / bandwidth, bounds=GPU)
    assert (found.peak_fraction, found.bandwidth_fraction) == pytest.approx((peak, bandwidth), rel=0.02)


@settings(max_examples=20, deadline=None)
@given(fraction=fractions, overhead=overheads)
def test_so_are_memory_bound_kernels(fraction, overhead):
    kernels = np.tile([1.0, 2.0], len(SIZES) // 2)
    (found, per_kernel), _ = fit_memory(SIZES, kernels, kernels * overhead + SIZES / fraction, bounds=GPU)
    assert (found, per_kernel) == pytest.approx((fraction, overhead), rel=0.02)


@settings(max_examples=20, deadline=None)
@given(fraction=fractions, latency=overheads, per_peer=overheads)
def test_so_is_a_link(fraction, latency, per_peer):
    peers = np.tile([2.0, 4.0, 8.0, 2.0], len(SIZES) // 4)
    seconds = latency + per_peer * (peers - 1) + SIZES / fraction
    found, _ = fit_link(peers, SIZES, seconds, bounds=GPU)
    assert found.bandwidth_fraction == pytest.approx(fraction, rel=0.02)
    assert found.latency_s + found.latency_per_peer_s == pytest.approx(latency + per_peer, rel=0.05)
    two, _ = fit_link(np.full(len(SIZES), 2.0), SIZES, latency + per_peer + SIZES / fraction, bounds=GPU)
    assert two.latency_s == two.latency_per_peer_s  # a message is half of a ring of two
    assert two.latency_s + two.latency_per_peer_s == pytest.approx(latency + per_peer, rel=0.05)


def test_the_cost_models_own_times_give_its_constants_back():
    """A fit inverts the formulas the cost model has, so it must understand an operation's shape as they do."""
    machine = cluster(ClusterQuery(gpu="h100-sxm-80gb", num_gpus=16))
    stock = gpu_efficiency("h100-sxm-80gb")
    from hp_tool.catalog.efficiency import efficiency

    profile = efficiency(gpu=machine.gpu, framework="megatron-core")
    isolated = EfficiencyProfile(gpu=stock, framework=_undisturbed(profile))
    operations = plan_operations(machine, precisions=("bf16",))
    assert {(each.group_size, each.stride) for each in operations} == {(1, 1), (2, 1), (4, 1), (8, 1), (2, 8)}
    times = []
    for each in operations:
        seconds = _modelled(each, machine=machine, profile=isolated)
        if seconds is not None:
            times.append(OperationTimes(operation=each, seconds_per_rank=(seconds,) * 16))
    found = fit_machine(times, cluster=machine, start=stock, fitted_on="made").gpu
    assert found.matmul["bf16"].peak_fraction == pytest.approx(stock.matmul["bf16"].peak_fraction, rel=0.03)
    assert found.nvlink.bandwidth_fraction < stock.nvlink.bandwidth_fraction  # without a ramp, the mean over sizes
    assert found.memory_fraction == stock.memory_fraction  # nothing of it was timed
    assert found.fitted_on == "made"


def _undisturbed(profile):
    import dataclasses

    return dataclasses.replace(profile.framework, matmul_slowdown=1.0, narrow_matmul_slowdown=1.0)


def _modelled(operation: Operation, *, machine, profile) -> float | None:
    if operation.name == "matmul":
        m, n, k = operation.shape
        return float(matmul_seconds(m, n, k, machine=Machine(cluster=machine, profile=profile), precision="bf16"))
    if operation.name == "all_gather" and operation.stride == 1:
        n = np.array([operation.group_size])
        wire = operation.shape[0] * (n - 1) / n
        return float(ring(machine=Machine(cluster=machine, profile=profile), group_size=n, stride=1).seconds(wire)[0])
    return None
