"""Waits for stragglers. GPUs of the same model differ in speed, and the slowest determines
the step time.
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import numpy as np

from hp_tool.cost.arrays import Floats, Ints, anywhere, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase

SERVER_GPUS = 8
"""Number of devices in the servers on which the other constants were measured. Those constants
already include waits within a server.
"""


def deviations_of_slowest(devices: Ints) -> Floats:
    """Return the expected excess of the slowest of n devices over the slowest of one server, in
    standard deviations.

    The expected maximum of n normal values uses Blom's approximation, F^-1((n - 3/8) / (n + 1/4))
    (Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    if isinstance(devices, int):
        return _servers_deviation(devices)
    counts, places = np.unique(devices, return_inverse=True)
    beyond: Floats = np.array([_servers_deviation(int(n)) for n in counts], dtype=np.float64)[
        places
    ]
    return beyond


@functools.cache
def _servers_deviation(devices: int) -> float:
    if devices <= SERVER_GPUS:
        return 0.0
    return _expected_maximum(devices) - _expected_maximum(SERVER_GPUS)


def _expected_maximum(n: int) -> float:
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def straggler_share(
    *,
    case: TrainingCase,
    candidates: Candidates,
    micro_batches: Floats,
    devices: Ints,
    run: Ints | int = 1,
) -> Floats:
    """Return the seconds that all devices wait for the slowest one, per second of compute.

    The slowest of n devices takes z(n) sd longer than the mean. One part of the deviation is
    constant for a device (clocks under its power limit). Another part is independent for each
    micro-batch and averages out over the r micro-batches that replicas run before they wait for
    each other: sd^2 = device^2 + micro_batch^2 / r. With ZeRO 0 and 1, r is the number of
    micro-batches of a step. With ZeRO 2 and 3, ranks communicate in every micro-batch. With delayed
    scaling in fp8 they do so, too: its amax all-reduce runs over all tensor-, context- and
    data-parallel ranks after each pass.

    Sources: NVIDIA/Megatron-LM, megatron/core/parallel_state.py (get_amax_reduction_group without
    tp_only_amax_red); for the differences between GPUs of one model, Sinha et al., Not All GPUs Are
    Created Equal, SC 2022 (arXiv 2208.11035).
    """
    framework, workload = case.profile.framework, case.workload
    z = deviations_of_slowest(devices)
    if not anywhere(z > 0.0) or not (framework.device_log_sd or framework.micro_batch_log_sd):
        return 0.0
    delayed = workload.precision == "fp8" and workload.fp8_recipe in (None, "delayed")
    zero = candidates.zero_stage
    averaged = where(zero >= 3, 1.0, where(zero == 2, 1.0 * run, micro_batches))
    if delayed:
        averaged = 1.0
    variance = framework.device_log_sd**2 + framework.micro_batch_log_sd**2 / averaged
    share: Floats = z * variance**0.5
    return share
