"""Latencies of single requests that arrive independently."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts, most_running, serving_costs
from hp_tool.cost.serving.load import (
    Quantiles,
    costs_at_rate,
    equivalent_loads,
    load_deviations,
    open_quantiles,
    without_waves,
)
from tests.cost.serving.serving_cases import Serving, serving, servings
from tests.cost.serving.test_serving_properties import few

SHARES = np.array([0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
LATENCIES = ("ttft_s", "tpot_s", "request_latency_s")
EVERY_SHARE = np.concatenate([np.arange(0.02, 0.99, 0.02), [0.99, 0.995, 0.999, 0.9999, 1 - 1e-6]])
OF_CAPACITY = np.array([0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99])


def quantiles(setup: Serving, *, load: float) -> Quantiles:
    """At SHARES."""
    rows = ServingCandidates.from_configs(
        [setup.config] * len(SHARES), concurrency=[1] * len(SHARES)
    )
    return open_quantiles(
        case=setup.case, candidates=rows, load=np.full(len(SHARES), load), share=SHARES
    )


@settings(few)
@given(servings(), st.sampled_from((0.01, 1.0, 7.5, 60.0, 3000.0)))
def test_quantiles_rise_with_the_share_and_are_seconds(setup: Serving, load: float) -> None:
    found = quantiles(setup, load=load)
    for column in (found.ttft_s, found.tpot_s, found.request_latency_s):
        assert np.all(np.isfinite(column)) and np.all(column >= 0.0)
        assert np.all(np.diff(column) >= -1e-9 * column[:-1])


def at_rates(setup: Serving, of_capacity: np.ndarray) -> tuple[ServingCosts, list[Quantiles]]:
    """Costs at these fractions of the capacity, and the quantiles at EVERY_SHARE of each."""
    one = ServingCandidates.from_configs([setup.config], concurrency=[1])
    full = one.with_concurrency(
        np.ceil(most_running(case=setup.case, candidates=one)) * one.schedulers
    )
    tokens = serving_costs(case=without_waves(setup.case), candidates=full)
    capacity = tokens.output_tokens_per_second_per_gpu * one.devices / setup.case.output_length
    costs, load = costs_at_rate(
        case=setup.case,
        candidates=one.take(np.zeros(len(of_capacity), dtype=np.intp)),
        requests_per_second=of_capacity * capacity,
    )
    rows = one.take(np.zeros(len(EVERY_SHARE), dtype=np.intp))
    return costs, [
        open_quantiles(
            case=setup.case, candidates=rows, load=np.full(len(rows), each), share=EVERY_SHARE
        )
        for each in load
    ]


@settings(few)
@given(servings())
def test_a_mean_is_what_its_own_quantiles_leave_it_at_every_rate(setup: Serving) -> None:
    """Of the requests between two quantiles none is faster than the lower or slower than the
    upper one. But a single gap between two tokens jumps with the load.
    """
    assume(setup.case.output_length != 2)
    costs, found = at_rates(setup, OF_CAPACITY)
    assert np.all(costs.sustained)
    widths = np.diff(EVERY_SHARE, prepend=0.0)
    for name in LATENCIES:
        for mean, quantiles in zip(getattr(costs, name), found, strict=True):
            seconds = getattr(quantiles, name)
            least, most = widths[1:] @ seconds[:-1], widths @ seconds
            assert least <= 1.03 * mean and mean <= 1.03 * most, name


@settings(few)
@given(servings())
def test_latencies_rise_with_the_rate(setup: Serving) -> None:
    """Of the quantiles those from the median: the more loads vary, the lower are the lowest. Groups
    that step together are left out, as in test_latency_never_falls_as_concurrency_rises.
    """
    assume(setup.config.attention_data_parallel_size == 1)
    upper = EVERY_SHARE >= 0.5
    costs, found = at_rates(setup, OF_CAPACITY)
    for name in ("ttft_s", "request_latency_s"):
        columns = np.array([getattr(quantiles, name)[upper] for quantiles in found])
        means = getattr(costs, name)
        assert np.all(np.diff(means) >= -1e-9 * means[:-1]), name
        assert np.all(np.diff(columns, axis=0) >= -1e-9 * columns[:-1]), name


def test_the_mean_sees_the_requests_that_wait_for_a_place() -> None:
    """At 99% of the capacity some requests wait for seconds, and the mean of all includes them."""
    costs, found = at_rates(serving(input_length=2000, output_length=300), np.array([0.9, 0.99]))
    median, last = (found[1].ttft_s[EVERY_SHARE.searchsorted(share)] for share in (0.5, 0.99))
    assert last > 10.0 * median and costs.ttft_s[1] > 2.0 * median
    assert costs.parts["queue"][1] > 2.0 * costs.parts["queue"][0]
    np.testing.assert_allclose(sum(costs.parts.values()), costs.request_latency_s, rtol=1e-9)
    np.testing.assert_allclose(
        costs.ttft_s + 299 * costs.tpot_s, costs.request_latency_s, rtol=1e-9
    )


@pytest.mark.parametrize(("mean", "deviation", "places"), [(5, 2, 8), (7.9, 3, 8), (0.5, 0.7, 256)])
def test_two_loads_have_the_moments_of_a_load_between_one_and_its_places(
    mean: float, deviation: float, places: float
) -> None:
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.normal(mean, deviation, 1_000_000), 1.0, places)
    arrays = (np.array([float(value)]) for value in (mean, deviation, places))
    low, high, share = (float(values[0]) for values in equivalent_loads(*arrays))
    assert 1.0 <= low <= high <= places
    middle = low + share * (high - low)
    assert middle == pytest.approx(drawn.mean(), rel=2e-3)
    assert share * (1.0 - share) * (high - low) ** 2 == pytest.approx(drawn.var(), rel=1e-2)


@pytest.mark.parametrize(
    ("rate", "load"),
    [
        (lambda n: n, 40.0),  # nobody slows anybody
        (lambda n: n / (1.0 + n / 60.0), 40.0),  # decoding slows as the batch grows
        (lambda n: n / (1.0 + n / 60.0), 120.0),
        (lambda n: n / np.hypot(1.0, n / 100.0), 50.0),
    ],
)
def test_the_load_spreads_as_the_flow_equivalent_server_does(
    rate: Callable[[np.ndarray], np.ndarray], load: float
) -> None:
    """Its stationary distribution is exact for processor sharing: p(n) ~ product of l / X(i), i up
    to n.
    """
    n = np.arange(1.0, 4000.0)
    weights = np.exp(np.concatenate([[0.0], np.cumsum(np.log(rate(np.array(load)) / rate(n)))]))
    chance = weights / weights.sum()
    counts = np.arange(4000.0)
    mean = float(chance @ counts)
    exact = float(np.sqrt(chance @ (counts - mean) ** 2))
    elasticity = np.gradient(np.log(rate(n)), np.log(n))[int(load) - 1]
    moment, stay = load_deviations(np.array(load), elasticity=np.array(elasticity))
    assert moment == pytest.approx(exact, rel=0.15)
    assert stay < moment


def test_a_request_that_stays_sees_the_average_of_what_comes_and_goes() -> None:
    """Two thirds of the variance where stays are equal (M/D/inf), 0.74 by relaxation; all of it
    where nothing relaxes.
    """
    moment, stay = load_deviations(np.array([100.0, 100.0]), elasticity=np.array([1.0, 1e-3]))
    assert stay[0] ** 2 / moment[0] ** 2 == pytest.approx(2.0 / np.e)
    assert stay[1] / moment[1] == pytest.approx(1.0, abs=1e-3)


def test_prompts_that_arrive_together_wait_for_each_other() -> None:
    """Long prompts and short answers: the last hundredth waits for several prompts, the median for
    hardly one.
    """
    setup = serving(input_length=8192, output_length=16)
    median, last = quantiles(setup, load=3.0).ttft_s[[2, 4]]
    prompt = setup.costs(concurrency=[1]).prompt_s[0]
    assert last - median > 2.0 * prompt


def test_a_light_load_spreads_little() -> None:
    found = quantiles(serving(input_length=128, output_length=512), load=0.05)
    assert found.tpot_s[-1] == pytest.approx(found.tpot_s[0], rel=0.02)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("rate", [1e6, 1e18, 1e150])
def test_a_rate_beyond_all_capacity_is_finite_and_of_full_batches(rate: float) -> None:
    setup = serving()
    rows = ServingCandidates.from_configs([setup.config], concurrency=[1])
    costs, load = costs_at_rate(case=setup.case, candidates=rows, requests_per_second=rate)
    assert not costs.sustained[0] and load[0] > rate
    assert costs.running[0] == pytest.approx(costs.max_running[0])
    assert np.isfinite([costs.ttft_s[0], costs.tpot_s[0], costs.request_latency_s[0]]).all()
