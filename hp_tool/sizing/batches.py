"""Batch size from compute, in sequences that many degrees of data parallelism divide."""

from __future__ import annotations

import math

FITTED_FLOPS = (1e17, 2e19)
"""Compute of the runs that DeepSeek's laws of batch size and learning rate were fitted on (arXiv 2401.02954, section 3.1)."""


def batch_tokens(*, flops: float) -> float:
    """Tokens a step: B = 0.2920 C^0.3271, C non-embedding FLOPs of the training (arXiv 2401.02954, equation 1)."""
    return float(0.2920 * flops**0.3271)


def batch_sequences(*, flops: float, sequence_length: int, num_gpus: int) -> int:
    """`batch_tokens` in whole sequences, at most 11 % off: 4, 5, 6 or 7 times a power of two, times the odd part of
    num_gpus, so that replicas get equal shares whichever part of the devices they take.
    """
    odd = num_gpus
    while odd % 2 == 0:
        odd //= 2
    groups = max(batch_tokens(flops=flops) / sequence_length / odd, 1.0)
    step = 2 ** max(math.floor(math.log2(groups)) - 2, 0)
    return int(odd * step * max(round(groups / step), 1))
