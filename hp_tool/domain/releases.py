"""Releases of frameworks: NeMo containers (year.month) and Megatron Core versions (0.x). Both began
in 2023.
"""

import re
from collections.abc import Mapping

FIRST_CONTAINER = 20
"""Year of the first NeMo container; Megatron Core's releases begin with 0."""
LATEST = "26.02.01"
"""Release assumed if the query names none. It stands for software that is at least as new."""
FLEX_EXISTS = {"container": (25, 4), "core": (0, 12)}
"""Releases from which the flex dispatcher exists: with DeepEP, and from Megatron Core 0.15 on also
with HybridEP.
"""
FLEX_IS_DEFAULT = {"container": (26, 2, 1), "core": (0, 16)}
"""Releases from which recipes use the flex dispatcher. Megatron-Bridge's recipes for Qwen3-30B-A3B
name it.
"""

GRAPHS_BESIDE_MERGED_PASSES = {"container": (26, 6), "core": (0, 18)}
"""Releases from which Megatron Core captures whole iterations with overlap_moe_expert_parallel_comm
(TransformerConfig rejects it in 0.17.1 and accepts it in 0.18.0). The 26.06 containers include core
0.18.
"""
LOOP_REFUSES_IN_PLACE_LOSS = {"container": (26, 6, 1), "core": (0, 18, 2)}
"""Releases from which Megatron-LM's training loop rejects --cross-entropy-fusion-impl te
(validate_args of 0.18.2 and 0.19). Megatron Core only warns, so Megatron Bridge's recipes still use
it; Bridge 0.5.1 (26.06.01) includes core 0.18.2.
"""
MUON_OVERLAPS = {"container": (26, 6), "core": (0, 18)}
"""Releases from which Megatron Core overlaps data-parallel collectives with optimizer muon
(validate_args of 0.16.1, 0.17.1 and 0.18.2).
"""
DIST_MUON_OVERLAPS = {"container": (26, 4), "core": (0, 17)}
"""The same for dist_muon, which shards its optimizer states."""
STAGES_IN_PATTERNS = {"container": (26, 6), "core": (0, 17)}
"""Releases from which Megatron's layer pattern for hybrid models can specify stages (several per
rank) and multi-token prediction. The 26.02 containers include core 0.16.
"""
DELTA_RULES_EXCHANGE_HEADS = {"container": (26, 6), "core": (0, 18)}
"""Releases from which context-parallel ranks shard the heads of a delta rule
(ssm/gated_delta_net.py).
"""


def release_numbers(text: str) -> tuple[int, ...]:
    """Return the first three numbers in the name of a release."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_at_least(release: str, *, since: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a release is at least the minimum for its versioning scheme; False if it
    contains no number.
    """
    numbers = release_numbers(release)
    return (
        bool(numbers) and numbers >= since["container" if numbers[0] >= FIRST_CONTAINER else "core"]
    )


def is_core_release(release: str) -> bool:
    """Return whether a release is a Megatron Core version, not a NeMo container."""
    numbers = release_numbers(release)
    return bool(numbers) and numbers[0] < FIRST_CONTAINER


def is_later(release: str, *, than: str) -> bool:
    """Return whether a release is later than the NeMo container `than`."""
    numbers, since = release_numbers(release), release_numbers(than)
    return bool(numbers) and ((23,) if numbers[0] < FIRST_CONTAINER else numbers) > since
