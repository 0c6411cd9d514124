"""Releases of frameworks: NeMo's containers (year.month) and Megatron Core's versions (0.x), which
began in 2023.
"""

import re
from collections.abc import Mapping

FIRST_CONTAINER = 20
"""Year of the first NeMo container; Megatron Core's releases begin with 0."""
LATEST = "26.02.01"
"""Release assumed if the query names none: software at least as new as this."""
FLEX_EXISTS = {"container": (25, 4), "core": (0, 12)}
"""Releases from which the flex dispatcher exists: with DeepEP, and with HybridEP since Megatron
Core 0.15.
"""
FLEX_IS_DEFAULT = {"container": (26, 2, 1), "core": (0, 16)}
"""Releases from which recipes use the flex dispatcher; Megatron-Bridge's recipes of Qwen3-30B-A3B
name it.
"""

GRAPHS_BESIDE_MERGED_PASSES = {"container": (26, 6), "core": (0, 18)}
"""Releases from which Megatron Core records whole iterations under overlap_moe_expert_parallel_comm
(TransformerConfig rejects it in 0.17.1 and accepts it in 0.18.0). The containers of 26.06 include
core 0.18.
"""
LOOP_REFUSES_IN_PLACE_LOSS = {"container": (26, 6, 1), "core": (0, 18, 2)}
"""Releases from which Megatron-LM's training loop rejects --cross-entropy-fusion-impl te
(validate_args of 0.18.2 and 0.19). Megatron Core only warns, so Megatron Bridge's recipes still use
it; Bridge 0.5.1 (26.06.01) includes core 0.18.2.
"""
MUON_OVERLAPS = {"container": (26, 6), "core": (0, 18)}
"""Releases from which Megatron Core overlaps the collectives of data parallelism with optimizer
muon (validate_args of 0.16.1, 0.17.1 and 0.18.2).
"""
DIST_MUON_OVERLAPS = {"container": (26, 4), "core": (0, 17)}
"""The same for dist_muon, which shards its states."""
STAGES_IN_PATTERNS = {"container": (26, 6), "core": (0, 17)}
"""Releases from which Megatron's layer pattern of hybrids specifies stages (several per rank) and
multi-token prediction; the containers of 26.02 include core 0.16.
"""
DELTA_RULES_EXCHANGE_HEADS = {"container": (26, 6), "core": (0, 18)}
"""Releases from which context-parallel ranks divide a delta rule's heads
(ssm/gated_delta_net.py).
"""


def release_numbers(text: str) -> tuple[int, ...]:
    """Return the first three numbers in the name of a release."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_at_least(release: str, *, since: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a release is at least the minimum for its kind of version; False if it has no
    number.
    """
    numbers = release_numbers(release)
    return (
        bool(numbers) and numbers >= since["container" if numbers[0] >= FIRST_CONTAINER else "core"]
    )


def is_core_release(release: str) -> bool:
    """Return whether a release is named by Megatron Core's version, not by a NeMo container."""
    numbers = release_numbers(release)
    return bool(numbers) and numbers[0] < FIRST_CONTAINER


def is_later(release: str, *, than: str) -> bool:
    """Return whether a release is later than that of a NeMo container."""
    numbers, since = release_numbers(release), release_numbers(than)
    return bool(numbers) and ((23,) if numbers[0] < FIRST_CONTAINER else numbers) > since
