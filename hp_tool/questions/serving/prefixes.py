"""Positions at which engines can resume a cached prompt of a model with recurrent layers."""

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import state_block
from hp_tool.domain.engines import engine_facts
from hp_tool.domain.releases import release_numbers

SNAPSHOT_TOKENS = 256
"""Default of TensorRT-LLM's mamba_state_cache_interval in 1.3."""
SNAPSHOTS_SINCE = (1, 3)
"""First release that stores states for other requests; earlier releases need enable_block_reuse off
for such models.
"""
ANYWHERE, NOWHERE = 1, 0


def resume_interval(case: ServingCase, *, release: str) -> int:
    """Return the interval in tokens at which a prompt can resume; ANYWHERE if prompts can also
    resume at the ends of earlier requests.

    `EngineFacts.stores_recurrent_states` tells where an engine stores states. The ends of requests
    and their chunks are where the prefixes of a conversation end.
    """
    block, stored_at = state_block(case), engine_facts(case.engine.engine).stores_recurrent_states
    if block == ANYWHERE or stored_at == "requests":
        return ANYWHERE
    if stored_at == "snapshots":
        return SNAPSHOT_TOKENS if release_numbers(release)[:2] >= SNAPSHOTS_SINCE else NOWHERE
    return block


def resumed_tokens(prefix_tokens: NDArray[np.int64], every: int) -> NDArray[np.int64]:
    """Return how many tokens of each prefix need not be recomputed."""
    return prefix_tokens // every * every if every else np.zeros_like(prefix_tokens)


def resume_sentence(case: ServingCase, every: int) -> str:
    """Return the sentence of an answer that states this interval."""
    engine = case.engine.engine
    if every == NOWHERE:
        return (
            f"{engine} keeps no recurrent states for other requests before "
            f"{'.'.join(map(str, SNAPSHOTS_SINCE))}: none resumes"
        )
    if every == ANYWHERE:
        return (
            f"{engine} keeps recurrent states at ends of requests and chunks: prefixes are "
            "taken to end there"
        )
    return f"prompts resume at multiples of {every} tokens, where {engine} keeps recurrent states"
