"""Goodput: the fraction of wall-clock time spent training, with Poisson failures and periodic
checkpoints.
"""

import math

import numpy as np

from hp_tool.cost.arrays import ComplexArray, FloatArray
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.optimizer import bytes_per_parameter
from hp_tool.cost.parameters import total_parameters
from hp_tool.domain.result import Goodput
from hp_tool.domain.units import SECONDS_PER_DAY, SECONDS_PER_HOUR
from hp_tool.domain.workload import ReliabilitySpec

MTBF_PER_GPU_S = 16_384 * 54 * SECONDS_PER_DAY / 419
"""Mean time between failures of one GPU, in seconds. Llama 3 (arXiv 2407.21783, section 3.3.4): 419
unexpected interruptions in 54 days on 16,384 H100.
"""
WRITE_BYTES_PER_NODE_SECOND = 273e9 / 384
READ_BYTES_PER_NODE_SECOND = 1e12 / 384
"""Read and write rates of a parallel file system in bytes per second and node, measured with 384
nodes of 8 A100 (arXiv 2104.04473, section 5.10).
"""
DIAGNOSIS_S = 600.0
"""Seconds to detect a failure and run diagnostics; the published average is below this (MegaScale,
arXiv 2402.15627).
"""
_MAX_MTBFS = 300.0
"""Longest failure-free interval in units of the mean time between failures. e^x overflows above
it.
"""
_LONG_CHECKPOINT = 30.0
"""Checkpoint time, in units of the mean time between failures, above which the best interval equals
M to thirteen digits.
"""
_NEWTON_STEPS = 12
BINS = 1 << 13
"""Number of bins in the distribution of lost time."""
SPREADS = 10.0
"""Number of standard deviations above the mean that the bins extend to."""


def goodput(*, case: TrainingCase) -> Goodput | None:
    """Return the goodput of a training on the whole cluster.

    Returns None if the workload has no `reliability` and no spot interruptions. Device failures are
    independent, so the job's MTBF is a device's MTBF divided by the number of devices. A spare
    replaces a failed node. Interrupted spot nodes are replaced too; they have a separate
    interruption rate. A checkpoint contains weights, master copy and optimizer states: 14 bytes per
    parameter with Adam, like Megatron-LM's 13.8 TB at 1.008e12 parameters (arXiv 2104.04473);
    Muon's smaller states are not modelled. Planned maintenance and evaluation are excluded. If
    checkpoints are written in the background, training stops only for the copy. In that case, set
    checkpoint_s to the time of the copy.
    """
    cluster, workload = case.cluster, case.workload
    taken_per_day = cluster.interruptions_per_node_day
    spec = workload.reliability or (ReliabilitySpec() if taken_per_day else None)
    if spec is None:
        return None
    state_bytes = bytes_per_parameter(workload)
    size = (state_bytes.weights + state_bytes.optimizer) * total_parameters(
        case.model, sequence_length=workload.sequence_length
    )
    nodes = cluster.num_nodes
    mtbf_hours = spec.mtbf_per_gpu_hours
    mtbf_s = (
        MTBF_PER_GPU_S if mtbf_hours is None else mtbf_hours * SECONDS_PER_HOUR
    ) / cluster.num_gpus
    if taken_per_day:
        mtbf_s = 1.0 / (1.0 / mtbf_s + nodes * taken_per_day / SECONDS_PER_DAY)
    checkpoint_s = _value_or_default(
        spec.checkpoint_s, size / (nodes * WRITE_BYTES_PER_NODE_SECOND)
    )
    restart_s = _value_or_default(
        spec.restart_s, DIAGNOSIS_S + size / (nodes * READ_BYTES_PER_NODE_SECOND)
    )
    interval_s = _value_or_default(
        spec.checkpoint_interval_s, best_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    )
    stretch = time_stretch(
        interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s
    )
    return Goodput(
        fraction=1.0 / stretch,
        mtbf_s=mtbf_s,
        checkpoint_bytes=size,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=interval_s,
        young_interval_s=young_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s),
        restart_s=restart_s,
        source="; ".join(_sources(spec)) or "as given",
    )


def time_stretch(
    *, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return wall-clock time divided by failure-free training time. Exact for Poisson failures.

    The result is M e^(R/M) (e^((tau + C)/M) - 1) / tau, where M is the mean time between failures,
    R the restart time, C the checkpoint time and tau the training time between checkpoints.
    Failures may occur during restarts and checkpoints too. Source: Daly, A higher order estimate of
    the optimum checkpoint interval for restart dumps (2006), the complete cost function.
    """
    restart, segment = (
        min(span_s / mtbf_s, _MAX_MTBFS) for span_s in (restart_s, interval_s + checkpoint_s)
    )
    return mtbf_s * math.exp(restart) * math.expm1(segment) / interval_s


def lost_s(
    *, stretches: float, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float
) -> tuple[FloatArray, FloatArray]:
    """Return (seconds, probability), each of shape (BINS,): the distribution of the total time that
    failures add over n training intervals.

    An interval of w = tau + C completes with probability p = e^(-w/M). Each failure before that
    costs X < w (truncated exponential) and a restart D, which further failures may interrupt. Let
    phi_X and phi_D be the Fourier transforms of the distributions of these two times, on equal
    bins. The transform of the sum over n intervals is (p / (1 - (1 - p) phi_X phi_D))^n, a compound
    negative binomial.
    """
    w, m = min(interval_s + checkpoint_s, _MAX_MTBFS * mtbf_s), mtbf_s
    passes, failures = math.exp(-w / m), stretches * math.expm1(w / m)
    once_s = m * (1.0 - w / m * passes / -math.expm1(-w / m)) + m * math.expm1(
        min(restart_s / m, _MAX_MTBFS)
    )
    width_s = (
        (failures + SPREADS * math.sqrt(failures * (1.0 + failures / stretches)) + SPREADS)
        * once_s
        * 2.0
        / BINS
    )
    seconds: FloatArray = width_s * np.arange(BINS, dtype=np.float64)

    def before(end_s: float) -> ComplexArray:
        """Return the transform of the time of a failure that occurs before the limit `end_s`."""
        edges = np.clip((np.arange(BINS + 1) - 0.5) * width_s, 0.0, end_s)
        return np.fft.rfft(np.diff(-np.expm1(-edges / m)) / -math.expm1(-end_s / m))

    again = min(restart_s, _MAX_MTBFS * m)
    restart = np.exp(-2j * np.pi * np.arange(BINS // 2 + 1) / BINS * (again / width_s))
    if again > 0.0:
        through = math.exp(-again / m)
        restart = through * restart / (1.0 - (1.0 - through) * before(again))
    total = (passes / (1.0 - (1.0 - passes) * before(w) * restart)) ** stretches
    return seconds, np.clip(np.fft.irfft(total, BINS), 0.0, 1.0)


def best_interval_s(*, checkpoint_s: float, mtbf_s: float) -> float:
    """Return the tau that minimises `time_stretch`.

    With y = tau/M and x = C/M, the derivative vanishes where (1 - y) e^(y + x) = 1. Therefore tau =
    M (1 + W(-e^(-1 - x))) with Lambert's W. The restart time has no effect. The function y + ln(1 -
    y) + x decreases and is concave, so Newton's method converges from above the root without
    overshooting. The starting point follows from y^2/2 <= x and ln(1 - y) >= -(1 + x).
    """
    x = min(checkpoint_s / mtbf_s, _LONG_CHECKPOINT)
    y = min(math.sqrt(2.0 * x), -math.expm1(-1.0 - x))
    for _ in range(_NEWTON_STEPS):
        y += (y + math.log1p(-y) + x) * (1.0 - y) / y
    return mtbf_s * y


def young_interval_s(*, checkpoint_s: float, mtbf_s: float) -> float:
    """Return the first-order optimum sqrt(2 C M) (Young 1974), for C much smaller than M."""
    return math.sqrt(2.0 * checkpoint_s * mtbf_s)


def _value_or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _sources(spec: ReliabilitySpec) -> list[str]:
    defaults = {
        "failures: arXiv 2407.21783, 419 in 54 days on 16,384 H100": spec.mtbf_per_gpu_hours,
        "checkpoint: weights and optimizer at 0.71 GB/s a node, arXiv "
        "2104.04473": spec.checkpoint_s,
        "restart: 10 minutes of diagnosis, arXiv 2402.15627, and loading at 2.6 GB/s a "
        "node": spec.restart_s,
        "interval: exact optimum of Daly 2006": spec.checkpoint_interval_s,
    }
    return [source for source, value in defaults.items() if value is None]
