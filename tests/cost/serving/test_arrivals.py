"""Latencies of single requests that arrive independently."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.load import Quantiles, load_deviations, open_quantiles
from tests.cost.serving.serving_cases import Serving, serving, servings
from tests.cost.serving.test_serving_properties import few

SHARES = np.array([0.01, 0.1, 0.5, 0.9, 0.99, 0.999])


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
