"""Waits before a first token: for a busy front end, for other prompts, for a random moment; and the
cost of a narrow cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.events import simulate_requests
from hp_tool.cost.serving.fluid import simulate_flow
from hp_tool.cost.serving.load import without_waves
from hp_tool.cost.serving.passes import pass_table
from tests.cost.serving.serving_cases import Serving, serving
from tests.cost.serving.test_events import row


def under(setup: Serving, **constants: Any) -> Serving:
    """The setup with other constants of the engine."""
    return replace(setup, case=replace(setup.case, engine=replace(setup.case.engine, **constants)))


def waited(setup: Serving, passes: float, load: int) -> float:
    """Passes that a prompt waits, by the model: what they add to the first token, over a pass that
    decodes.
    """
    idle = under(setup, request_overhead_s=0.0, stream_overhead_s=0.0)
    without, waiting = (
        idle.costs(concurrency=[load]),
        under(idle, batch_wait_iterations=passes).costs(concurrency=[load]),
    )
    step = without.parts["decode"][0] / (setup.case.output_length - 1)
    return float((waiting.ttft_s[0] - without.ttft_s[0]) / step)


@pytest.mark.parametrize("load", [1, 32, 128])
def test_prompts_wait_for_others_as_a_timer_that_the_first_one_starts(load: int) -> None:
    """Against arrivals of one a pass with the load's probability, played one by one."""
    setup = serving(input_length=128, output_length=512)
    comes = np.random.default_rng(0).random(400_000) < load / 512
    opened, waits = -100, []
    for at in np.flatnonzero(comes):
        opened = at if at >= opened + 20 else opened
        waits.append(opened + 20 - at)
    assert waited(setup, 20.0, load) == pytest.approx(np.mean(waits), rel=0.05)


def test_where_the_front_end_is_the_limit_first_tokens_wait_behind_others() -> None:
    setup = under(serving(input_length=128, output_length=512), stream_overhead_s=0.01)

    def costs(share: float) -> ServingCosts:
        return under(setup, backlog_share=share).costs(concurrency=[64])

    none, some, whole = (costs(share) for share in (0.0, 0.3, 1.0))
    for other in (some, whole):
        assert other.request_latency_s == pytest.approx(none.request_latency_s)
    assert some.ttft_s[0] - none.ttft_s[0] == pytest.approx(
        0.3 * none.parts["front_end"][0], rel=0.02
    )
    device = (none.parts["decode"] + none.parts["prefill_interference"])[0] / 511
    assert whole.tpot_s[0] == pytest.approx(device, rel=0.05) and none.tpot_s[0] > 10 * device
    busy = 64 * (
        setup.case.engine.request_overhead_s + 512 * 1e-4
    )  # less of the time, so fewer stand before it
    none, whole = (
        under(setup, backlog_share=share, stream_overhead_s=1e-4).costs(concurrency=[64])
        for share in (0.0, 1.0)
    )
    utilisation = busy / (none.request_latency_s[0] - setup.case.engine.first_token_s)
    added = (whole.ttft_s - none.ttft_s)[0] / none.parts["front_end"][0]
    assert 0.2 < utilisation < 0.8 and added == pytest.approx(utilisation**2, rel=0.05)


def test_device_and_front_end_do_not_wait_for_each_other_where_requests_come_at_any_moment() -> (
    None
):
    """Front end and device each busy for more than half of the time: the fluid says what single
    events show.
    """
    setup = under(
        serving(input_length=1024, output_length=512),
        request_overhead_s=5e-3,
        stream_overhead_s=2.5e-4,
    )
    full = replace(setup, case=without_waves(setup.case)).costs(concurrency=[256])
    rate, n = 0.7 * 256 / full.request_latency_s[0], 2000
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1.0 / rate, n))
    played = simulate_requests(
        table=pass_table(case=setup.case, candidates=row(setup)),
        input_tokens=np.full(n, 1024),
        output_tokens=np.full(n, 512),
        arrival_s=arrivals,
    )
    counts = np.histogram(arrivals, bins=1000, range=(0.0, arrivals[-1]))[0].astype(np.float64)
    fluid = simulate_flow(
        case=setup.case, candidates=row(setup), arrivals=counts, step_s=arrivals[-1] / 1000
    )
    assert fluid.tpot_s[0] == pytest.approx(played.tpot_s.mean(), rel=0.04)
    assert fluid.ttft_s[0] == pytest.approx(played.ttft_s.mean(), rel=0.3)


def test_a_cache_of_half_the_bytes_read_at_half_the_speed_gains_nothing() -> None:
    wide = serving(input_length=4000, output_length=200)
    narrow = under(
        serving(input_length=4000, output_length=200, kv_cache_precision="fp8"),
        narrow_cache_slowdown=2.0,
    )
    decode = [
        setup.costs(concurrency=[8]).parts["decode"][0]
        for setup in (wide, narrow, under(narrow, narrow_cache_slowdown=1.0))
    ]
    assert decode[0] == pytest.approx(decode[1]) and decode[2] < decode[0]
