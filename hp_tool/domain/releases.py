"""Releases of frameworks: NeMo's containers (year.month) and Megatron Core's versions (0.x), which began in 2023."""

import re
from collections.abc import Mapping

FIRST_CONTAINER = 20
"""Year of the first NeMo container; Megatron Core's releases begin with 0."""
LATEST = "26.02.01"
"""What runs where a query names no release: software as new as this, at least."""
FLEX_EXISTS = {"container": (25, 4), "core": (0, 12)}
"""Releases since which the flex dispatcher exists: with DeepEP; with HybridEP since Megatron Core 0.15."""
FLEX_IS_USUAL = {"container": (26, 2, 1), "core": (0, 16)}
"""Releases since which recipes use it; Megatron-Bridge's recipes of Qwen3-30B-A3B name it."""

GRAPHS_BESIDE_MERGED_PASSES = {"container": (26, 6), "core": (1, 0)}
"""Releases since which whole steps are recorded where experts' exchanges run behind other passes: Megatron Bridge's recipes of
26.06 have both; Megatron Core 0.16 refuses it, and of no later version by itself is it known."""
STAGES_IN_PATTERNS = {"container": (26, 6), "core": (0, 17)}
"""Releases since which Megatron's pattern of a hybrid's layers says its stages, several of a rank too, and multi-token
prediction; the containers of 26.02 bring core 0.16."""
DELTA_RULES_EXCHANGE_HEADS = {"container": (26, 6), "core": (0, 18)}
"""Releases since which context-parallel ranks share out a delta rule's heads (ssm/gated_delta_net.py)."""


def release_numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a release's name."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def has_come(release: str, *, since: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a release is the one named for its kind, or later; false for one without a number."""
    numbers = release_numbers(release)
    return bool(numbers) and numbers >= since["container" if numbers[0] >= FIRST_CONTAINER else "core"]


def is_later(release: str, *, than: str) -> bool:
    """Whether a release is later than a NeMo container's."""
    numbers, since = release_numbers(release), release_numbers(than)
    return bool(numbers) and ((23,) if numbers[0] < FIRST_CONTAINER else numbers) > since
