"""The preflight names what lags, and nothing where all are alike."""

from __future__ import annotations

import numpy as np
import pytest

from hp_tool.domain.measurement import Operation, OperationTimes
from hp_tool.loop.calibration.microbenchmarks import find_outliers, group_ranks

HOSTS = [f"node{rank // 4}" for rank in range(16)]


def timed(
    *, slow: dict[int, float] | None = None, slow_link: frozenset[int] = frozenset(), seed: int = 0
):
    """Matmuls and all-reduces over 16 ranks with 2% of noise; a group that holds all of
    `slow_link` takes twice as long.
    """
    noise = np.random.default_rng(seed)
    rows = []
    for size in (256, 512, 1024, 2048):
        seconds = 1e-12 * size**3 * np.exp(0.02 * noise.standard_normal(16))
        for rank, factor in (slow or {}).items():
            seconds[rank] *= factor
        rows.append(
            OperationTimes(
                operation=Operation(name="matmul", shape=(size,) * 3),
                seconds_per_rank=tuple(seconds),
            )
        )
    for exponent in (16, 20, 24):
        seconds = np.empty(16)
        for group in group_ranks(16, size=2, stride=1):
            seconds[group] = (
                1e-9
                * 2**exponent
                * np.exp(0.02 * noise.standard_normal())
                * (1 + (slow_link <= set(group)))
            )
        operation = Operation(name="all_reduce", shape=(2**exponent,), group_size=2)
        rows.append(OperationTimes(operation=operation, seconds_per_rank=tuple(seconds)))
    return rows


def test_groups_of_ranks_apart_deal_out_all_ranks():
    assert group_ranks(8, size=2, stride=4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert group_ranks(8, size=2, stride=2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert group_ranks(8, size=4, stride=1) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("seed", range(5))
def test_equals_are_left_alone(seed):
    assert find_outliers(timed(seed=seed), hosts=HOSTS) == ()


def test_a_slow_device_is_named():
    (found,) = find_outliers(timed(slow={5: 1.4}), hosts=HOSTS)
    assert (found.kind, found.name, found.operations) == ("gpu", "node1 rank 5", 4)
    assert found.slowdown == pytest.approx(1.4, rel=0.05)


def test_a_node_whose_devices_all_lag_is_one_finding():
    (found,) = find_outliers(timed(slow=dict.fromkeys(range(8, 12), 1.3)), hosts=HOSTS)
    assert (found.kind, found.name) == ("node", "node2")
    assert found.slowdown == pytest.approx(1.3, rel=0.05)


def test_a_slow_link_is_named_by_its_ends():
    (found,) = find_outliers(timed(slow_link=frozenset({6, 7})), hosts=HOSTS)
    assert (found.kind, found.name) == ("link", "node1 rank 6 - node1 rank 7")
    assert found.slowdown == pytest.approx(2.0, rel=0.1)


def test_two_peers_cannot_outvote_each_other():
    times = [
        OperationTimes(
            operation=Operation(name="matmul", shape=(64, 64, 64)), seconds_per_rank=(1.0, 3.0)
        )
    ]
    assert find_outliers(times, hosts=["a", "b"]) == ()
