"""Goodput: the share of the calendar that a training keeps, with Poisson failures and periodic checkpoints."""

from __future__ import annotations

import math

from scipy.special import lambertw

from hp_tool.domain.sizing import Goodput, ReliabilityQuery
from hp_tool.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

MTBF_PER_GPU_S = 16_384 * 54 * SECONDS_PER_DAY / 419
"""Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100."""
STATE_BYTES_PER_PARAMETER = 14.0
"""16-bit weights, fp32 master copy and Adam's two states; Megatron-LM's 13.8 TB at 1.008e12 parameters (arXiv 2104.04473)."""
WRITE_BYTES_PER_NODE_SECOND = 273e9 / 384
READ_BYTES_PER_NODE_SECOND = 1e12 / 384
"""Saving and loading from a parallel file system, 384 nodes of 8 A100 (arXiv 2104.04473, section 5.10)."""
DIAGNOSIS_S = 600.0
"""Detecting a failure and running the diagnostics, on average less (MegaScale, arXiv 2402.15627)."""
_LARGEST_EXPONENT = 700.0


def goodput(*, num_gpus: int, num_nodes: int, parameters: float, reliability: ReliabilityQuery) -> Goodput:
    """Goodput of a job on `num_gpus` devices whose failures are independent: the job's MTBF is a device's over their number.

    A failed node is replaced by a spare. Not counted: planned maintenance, evaluation. Checkpoints written in the background
    stop training for the copy alone: say so in `reliability.checkpoint_s`.
    """
    size = STATE_BYTES_PER_PARAMETER * parameters
    per_gpu = MTBF_PER_GPU_S if reliability.mtbf_per_gpu_hours is None else reliability.mtbf_per_gpu_hours * SECONDS_PER_HOUR
    mtbf_s = per_gpu / num_gpus
    checkpoint_s = reliability.checkpoint_s
    if checkpoint_s is None:
        checkpoint_s = size / (num_nodes * WRITE_BYTES_PER_NODE_SECOND)
    restart_s = reliability.restart_s
    if restart_s is None:
        restart_s = DIAGNOSIS_S + size / (num_nodes * READ_BYTES_PER_NODE_SECOND)
    interval_s = reliability.checkpoint_interval_s
    if interval_s is None:
        interval_s = best_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s)
    stretch = time_stretch(interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=restart_s, mtbf_s=mtbf_s)
    return Goodput(
        fraction=1.0 / stretch,
        mtbf_s=mtbf_s,
        checkpoint_bytes=size,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=interval_s,
        young_interval_s=young_interval_s(checkpoint_s=checkpoint_s, mtbf_s=mtbf_s),
        restart_s=restart_s,
        source="; ".join(_sources(reliability)) or "as given",
    )


def time_stretch(*, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Wall time over solution time, exact for Poisson failures: M e^(R/M) (e^((tau + C)/M) - 1) / tau.

    Letters: M mean time between failures, R restart, C checkpoint, tau training between checkpoints; seconds. Failures may hit
    restarts and checkpoints too. Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps
    (2006), the complete cost function. Beyond e^700 the answer is that nothing ever ends.
    """
    m = mtbf_s
    restart, segment = min(restart_s / m, _LARGEST_EXPONENT / 2), min((interval_s + checkpoint_s) / m, _LARGEST_EXPONENT / 2)
    return m * math.exp(restart) * math.expm1(segment) / interval_s


def best_interval_s(*, checkpoint_s: float, mtbf_s: float) -> float:
    """The tau of least `time_stretch`: its derivative vanishes where (1 - tau/M) e^((tau + C)/M) = 1, so
    tau = M (1 + W(-e^(-1 - C/M))) with Lambert's W. Restart time does not move it.
    """
    return float(mtbf_s * (1.0 + lambertw(-math.exp(-1.0 - checkpoint_s / mtbf_s)).real))


def young_interval_s(*, checkpoint_s: float, mtbf_s: float) -> float:
    """First-order optimum sqrt(2 C M) (Young 1974), for C much smaller than M."""
    return math.sqrt(2.0 * checkpoint_s * mtbf_s)


def _sources(reliability: ReliabilityQuery) -> list[str]:
    given = {
        "failures: arXiv 2407.21783, 419 in 54 days on 16,384 H100": reliability.mtbf_per_gpu_hours,
        "checkpoint: 14 bytes a parameter at 0.71 GB/s a node, arXiv 2104.04473": reliability.checkpoint_s,
        "restart: 10 minutes of diagnosis, arXiv 2402.15627, and loading at 2.6 GB/s a node": reliability.restart_s,
        "interval: exact optimum of Daly 2006": reliability.checkpoint_interval_s,
    }
    return [source for source, value in given.items() if value is None]
