"""Positions at which engines can resume a cached prompt, for models with recurrent layers."""

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import state_block
from hp_tool.domain.engines import engine_facts
from hp_tool.domain.releases import release_numbers

SNAPSHOT_TOKENS = 256
"""Default of TensorRT-LLM's mamba_state_cache_interval in release 1.3."""
SNAPSHOTS_SINCE = (1, 3)
"""First TensorRT-LLM release that keeps states for later requests. Earlier releases require
enable_block_reuse to be off for such models.
"""
ANYWHERE, NOWHERE = 1, 0


def resume_interval(case: ServingCase, *, release: str) -> int:
    """Return the interval in tokens at which a prompt can resume, or ANYWHERE or NOWHERE.

    It follows from where the engine stores states (`EngineFacts.stores_recurrent_states`). If
    states are stored at the ends of requests and chunks, the result is ANYWHERE, because the shared
    prefixes of a conversation end there.
    """
    block, stored_at = state_block(case), engine_facts(case.engine.engine).stores_recurrent_states
    if block == ANYWHERE or stored_at == "requests":
        return ANYWHERE
    if stored_at == "snapshots":
        return SNAPSHOT_TOKENS if release_numbers(release)[:2] >= SNAPSHOTS_SINCE else NOWHERE
    return block


def resumed_tokens(prefix_tokens: NDArray[np.int64], every: int) -> NDArray[np.int64]:
    """Return how many tokens of each prefix are not recomputed."""
    return prefix_tokens // every * every if every else np.zeros_like(prefix_tokens)


def resume_sentence(case: ServingCase, every: int) -> str:
    """Return a sentence for an answer that explains the interval `every`."""
    engine = case.engine.engine
    if every == NOWHERE:
        return (
            f"{engine} before {'.'.join(map(str, SNAPSHOTS_SINCE))} stores no recurrent states for "
            "other requests, so no prompt resumes"
        )
    if every == ANYWHERE:
        return (
            f"{engine} stores recurrent states at the ends of requests and chunks, where prefixes "
            "are assumed to end"
        )
    return f"prompts resume at multiples of {every} tokens, where {engine} stores recurrent states"
