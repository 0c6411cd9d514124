"""Speculative decoding: how many tokens a pass yields, and what drafting them costs.

Of k drafted tokens a pass accepts those before the first rejection and adds one of its own. With acceptance rate a, the same
and independent at each place, it yields (1 - a^(k+1)) / (1 - a) tokens on average (arXiv 2211.17192, equation 1) and takes
1 + k c times as long, c being a draft token's seconds by a pass's.
"""

from __future__ import annotations

from hp_tool.domain.workload import SpeculativeSpec


def drafted_tokens(speculative: SpeculativeSpec | None) -> int:
    """k; 0 without speculation."""
    return 0 if speculative is None else speculative.num_speculative_tokens


def tokens_per_pass(speculative: SpeculativeSpec | None) -> float:
    """Tokens that a sequence gains by one verifying pass; 1 without speculation."""
    if speculative is None:
        return 1.0
    a, k = speculative.acceptance_rate, speculative.num_speculative_tokens
    return sum(a**i for i in range(k + 1))


def drafting_factor(speculative: SpeculativeSpec | None) -> float:
    """Seconds of drafting and verifying by those of verifying alone: 1 + k c."""
    return 1.0 if speculative is None else 1.0 + speculative.num_speculative_tokens * speculative.draft_cost_fraction
