"""Releases of frameworks: NeMo's containers (year.month) and Megatron Core's versions (0.x), which
began in 2023.
"""

import re
from collections.abc import Mapping

FIRST_CONTAINER = 20
"""Year of the first NeMo container; Megatron Core's releases begin with 0."""
LATEST = "26.02.01"
"""What runs where a query names no release: software as new as this, at least."""
FLEX_EXISTS = {"container": (25, 4), "core": (0, 12)}
"""Releases since which the flex dispatcher exists: with DeepEP; with HybridEP since Megatron Core
0.15.
"""
FLEX_IS_DEFAULT = {"container": (26, 2, 1), "core": (0, 16)}
"""Releases since which recipes use it; Megatron-Bridge's recipes of Qwen3-30B-A3B name it."""

GRAPHS_BESIDE_MERGED_PASSES = {"container": (26, 6), "core": (0, 18)}
"""Releases since which Megatron Core records whole iterations under
overlap_moe_expert_parallel_comm (TransformerConfig of 0.17.1 refuses it, that of 0.18.0 does not);
the containers of 26.06 bring core 0.18.
"""
LOOP_REFUSES_IN_PLACE_LOSS = {"container": (26, 6, 1), "core": (0, 18, 2)}
"""Releases since which Megatron-LM's training loop refuses --cross-entropy-fusion-impl te
(validate_args of 0.18.2 and 0.19). Megatron Core only warns, so Megatron Bridge's recipes still use
it; Bridge 0.5.1, of 26.06.01, brings core 0.18.2.
"""
MUON_OVERLAPS = {"container": (26, 6), "core": (0, 18)}
"""Releases since which Megatron Core overlaps the collectives of data parallelism with optimizer
muon (validate_args of 0.16.1, 0.17.1 and 0.18.2).
"""
DIST_MUON_OVERLAPS = {"container": (26, 4), "core": (0, 17)}
"""The same of dist_muon, which shards its states."""
STAGES_IN_PATTERNS = {"container": (26, 6), "core": (0, 17)}
"""Releases since which Megatron's pattern of a hybrid's layers says its stages, several of a rank
too, and multi-token prediction; the containers of 26.02 bring core 0.16.
"""
DELTA_RULES_EXCHANGE_HEADS = {"container": (26, 6), "core": (0, 18)}
"""Releases since which context-parallel ranks share out a delta rule's heads
(ssm/gated_delta_net.py).
"""


def release_numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a release's name."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_at_least(release: str, *, since: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a release is the one named for its kind, or later; false for one without a number."""
    numbers = release_numbers(release)
    return (
        bool(numbers) and numbers >= since["container" if numbers[0] >= FIRST_CONTAINER else "core"]
    )


def is_core_release(release: str) -> bool:
    """Return whether a release is named by Megatron Core's version, not by a NeMo container."""
    numbers = release_numbers(release)
    return bool(numbers) and numbers[0] < FIRST_CONTAINER


def is_later(release: str, *, than: str) -> bool:
    """Whether a release is later than a NeMo container's."""
    numbers, since = release_numbers(release), release_numbers(than)
    return bool(numbers) and ((23,) if numbers[0] < FIRST_CONTAINER else numbers) > since
