"""Speculation, cached prefixes and sliding windows: their limits, and which way each moves the
result.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.serving.engine import tokens_per_pass
from hp_tool.cost.serving.operations import prefill_keys, seen_tokens
from hp_tool.domain.inference import SpeculativeSpec
from tests.cost.serving.serving_cases import Serving, serving, servings

rates = st.floats(0.0, 1.0)
drafts = st.integers(1, 8)


@given(rates, drafts)
def test_a_pass_yields_one_token_at_least_and_all_of_them_at_most(rate: float, k: int) -> None:
    found = tokens_per_pass(SpeculativeSpec(num_speculative_tokens=k, acceptance_rate=rate))
    assert 1.0 <= found <= k + 1
    if rate < 1.0:
        assert found == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


@given(servings(), drafts)
def test_speculation_that_is_never_right_only_costs_and_better_guesses_never_hurt(
    setup: Serving, k: int
) -> None:
    plain = setup.costs(concurrency=[8])

    def at(rate: float, *, cost: float) -> float:
        spec = SpeculativeSpec(
            num_speculative_tokens=k, acceptance_rate=rate, draft_cost_fraction=cost
        )
        return float(
            replace(setup, case=replace(setup.case, speculative=spec))
            .costs(concurrency=[8])
            .request_latency_s[0]
        )

    never, half, always = (at(rate, cost=0.05) for rate in (0.0, 0.5, 1.0))
    assert never >= plain.request_latency_s[0] * (1 - 1e-9)
    assert never >= half * (1 - 1e-9) and half >= always * (1 - 1e-9)


def test_a_lone_sequence_decodes_as_much_faster_as_a_pass_yields_tokens() -> None:
    """One sequence reads all weights for one token or for five alike."""
    setup = serving(input_length=16, output_length=2048)
    spec = SpeculativeSpec(num_speculative_tokens=4, acceptance_rate=0.8)
    faster = replace(setup, case=replace(setup.case, speculative=spec))
    ratio = setup.costs(concurrency=[1]).tpot_s[0] / faster.costs(concurrency=[1]).tpot_s[0]
    assert 0.9 * tokens_per_pass(spec) < ratio <= tokens_per_pass(spec) * 1.0001


@given(servings(), st.sampled_from((0.1, 0.5, 0.9)))
def test_a_cached_prefix_never_delays_the_first_token(setup: Serving, share: float) -> None:
    without, cached = (
        replace(setup, case=replace(setup.case, prefix_cache_hit_rate=rate)).costs(concurrency=[8])
        for rate in (0.0, share)
    )
    assert cached.prompt_s[0] <= without.prompt_s[0] * (1 + 1e-9)
    assert cached.bytes.kv_capacity[0] == without.bytes.kv_capacity[0]


@given(st.floats(1.0, 1e5), st.floats(0.0, 0.99), st.integers(1, 100_000), st.integers(0, 62))
def test_a_window_hides_keys_and_nothing_else(
    length: float, share: float, window: int, windowed: int
) -> None:
    model = replace(serving().case.model, sliding_window=window, sliding_window_layers=windowed)
    cached = share * length
    full = 0.5 * (cached + length)
    keys = prefill_keys(model, length=length, cached=cached)
    assert keys <= full * (1 + 1e-9) and seen_tokens(model, length) <= length * (1 + 1e-9)
    if windowed == 0 or window >= length:
        assert keys == pytest.approx(full) and seen_tokens(model, length) == pytest.approx(length)
    everywhere = replace(model, sliding_window_layers=None)
    assert seen_tokens(everywhere, length) == min(length, window)


def test_windowed_layers_leave_room_for_more_requests_and_decode_faster() -> None:
    setup = serving(input_length=32_000, output_length=512)
    model = replace(setup.case.model, sliding_window=1024, sliding_window_layers=48)
    windowed = replace(setup, case=replace(setup.case, model=model))
    full, few = setup.costs(concurrency=[64]), windowed.costs(concurrency=[64])
    assert few.max_running[0] > 2 * full.max_running[0]
    assert windowed.costs(concurrency=[2]).tpot_s[0] < setup.costs(concurrency=[2]).tpot_s[0]
