"""The discrete-event core: against sums by hand, against one pass at a time, and against the closed
form and the fluid.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.parameters import total_parameters
from hp_tool.cost.serving.candidates import Pass, ServingCandidates
from hp_tool.cost.serving.engine import serving_costs
from hp_tool.cost.serving.events import Served, simulate_requests
from hp_tool.cost.serving.fluid import simulate_flow
from hp_tool.cost.serving.forward import forward_seconds
from hp_tool.cost.serving.load import costs_at_rate
from hp_tool.cost.serving.passes import PassTable, pass_table
from tests.cost.serving.serving_cases import Serving, serving

EXACT = 1e-9
TABLE = PassTable(
    decoding=np.array([0.0, 1.0, 64.0]),
    prompt=np.array([0.0, 512.0]),
    base=np.array([[0.001, 0.011], [0.002, 0.012], [0.065, 0.075]]),
    cached_token_s=1e-7,
    key_s=1e-9,
    prompt_s=1e-4,
    request_s=0.0,
    stream_s=0.0,
    first_token_s=0.0,
    cache_tokens=1e9,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    prefill_first=False,
    promised=(0.0, 0.0),
)
"""Decoding takes 1 ms and 1 ms a sequence, a prompt token 10/512 ms."""


def row(setup: Serving, load: float = 1.0) -> ServingCandidates:
    return ServingCandidates.from_configs([setup.config], concurrency=[1]).with_concurrency(
        np.array([load])
    )


def equal(n: int, tokens: int) -> np.ndarray:
    return np.full(n, tokens)


def test_states_keep_requests_waiting_however_short() -> None:
    """Three of 10 tokens in a cache of 1,300, of which a state takes 600: as with two slots."""
    load = {
        "input_tokens": np.full(3, 10),
        "output_tokens": np.full(3, 10),
        "arrival_s": np.zeros(3),
    }
    crowded = simulate_requests(
        table=replace(TABLE, cache_tokens=1_300.0, state_tokens=600), **load
    )
    slots = simulate_requests(table=replace(TABLE, max_num_seqs=2), **load)
    assert (
        crowded.finish_s.tolist()
        == slots.finish_s.tolist()
        != simulate_requests(table=TABLE, **load).finish_s.tolist()
    )


def test_one_request_takes_the_sum_of_its_passes() -> None:
    found = simulate_requests(
        table=TABLE, input_tokens=equal(1, 512), output_tokens=equal(1, 11), concurrency=1
    )
    first = 0.011 + 1e-9 * 512 * 256 + 1e-4
    assert found.first_token_s[0] == pytest.approx(first, rel=EXACT)
    tokens = sum(0.002 + 1e-7 * (513 + i) for i in range(10))
    assert found.finish_s[0] == pytest.approx(first + tokens, rel=EXACT)


def test_a_long_prompt_goes_in_chunks_beside_decoding() -> None:
    """The second prompt is two chunks, less the token that the first request decodes beside
    each.
    """
    found = simulate_requests(
        table=TABLE,
        input_tokens=np.array([512, 1000]),
        output_tokens=np.array([50, 2]),
        concurrency=2,
    )
    keys, last = 511 * 255.5, 489 * (511 + 244.5)
    whole = 0.012 + (0.010 * 511 / 512) - 0.010 + 1e-9 * keys + 1e-7 * 513
    rest = 0.002 + 0.010 * 489 / 512 + 1e-9 * last + 1e-7 * 514 + 1e-4
    assert found.first_token_s[1] - found.first_token_s[0] == pytest.approx(whole + rest, rel=EXACT)


def test_prefill_first_stops_decoding() -> None:
    table = replace(TABLE, prefill_first=True)
    arrivals = np.array([0.0, 0.02])
    alone = simulate_requests(
        table=table, input_tokens=equal(1, 512), output_tokens=equal(1, 100), concurrency=1
    )
    both = simulate_requests(
        table=table,
        input_tokens=equal(2, 512),
        output_tokens=np.array([100, 1]),
        arrival_s=arrivals,
    )
    assert both.finish_s[0] - alone.finish_s[0] == pytest.approx(
        0.011 + 1e-9 * 512 * 256 + 1e-4, rel=1e-6
    )


def one_by_one(
    table: PassTable, inputs: list[int], outputs: list[int], arrivals: list[float]
) -> tuple[list[float], list[float]]:
    """The same engine, without a front end or a full cache, a pass at a time."""
    first, finish = [0.0] * len(inputs), [0.0] * len(inputs)
    done, made = [0] * len(inputs), [0] * len(inputs)
    waiting, running, now = list(range(len(inputs))), [], 0.0
    while waiting or running:
        decoding = [i for i in running if made[i] > 0]
        space, tokens, keys, ended = table.max_num_batched_tokens - len(decoding), 0, 0.0, []
        for i in [i for i in running if made[i] == 0] + [i for i in waiting if arrivals[i] <= now]:
            if (i not in running and len(running) == table.max_num_seqs) or space == 0:
                break
            if i in waiting:
                waiting.remove(i)
                running.append(i)
            take = min(space, inputs[i] - done[i])
            keys += take * (done[i] + take / 2)
            done[i], tokens, space = done[i] + take, tokens + take, space - take
            ended += [i] if done[i] == inputs[i] else []
        if not running:
            now = arrivals[waiting[0]]
            continue
        rows = [np.interp(len(decoding), table.decoding, column) for column in table.base.T]
        cached = sum(inputs[i] + made[i] for i in decoding)
        now += (
            np.interp(tokens, table.prompt, rows)
            + table.cached_token_s * cached
            + table.key_s * keys
        )
        now += table.prompt_s * len(ended)
        for i in decoding + ended:
            made[i] += 1
            first[i] = first[i] or now
            if made[i] == outputs[i]:
                finish[i] = now
                running.remove(i)
    return first, finish


@given(
    st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 60), st.floats(0.0, 0.05)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from((1, 3, 64)),
)
def test_many_passes_at_once_are_as_many_one_by_one(
    requests: list[tuple[int, int, float]], most: int
) -> None:
    table = replace(TABLE, max_num_seqs=most)
    inputs, outputs, gaps = (list(column) for column in zip(*requests, strict=True))
    arrivals = np.cumsum(gaps)
    found = simulate_requests(
        table=table,
        input_tokens=np.array(inputs),
        output_tokens=np.array(outputs),
        arrival_s=arrivals,
    )
    first, finish = one_by_one(table, inputs, outputs, arrivals.tolist())
    np.testing.assert_allclose(found.first_token_s, first, rtol=EXACT)
    np.testing.assert_allclose(found.finish_s, finish, rtol=EXACT)


def test_a_full_cache_puts_the_youngest_back_and_loses_no_token() -> None:
    table = replace(TABLE, cache_tokens=2000.0)
    found = simulate_requests(
        table=table, input_tokens=equal(8, 400), output_tokens=equal(8, 300), concurrency=8
    )
    assert found.preemptions > 0
    assert np.all(found.finish_s > found.first_token_s) and np.all(np.isfinite(found.finish_s))
    promised = simulate_requests(
        table=replace(table, promised=(1.0, 1.0)),
        input_tokens=equal(8, 400),
        output_tokens=equal(8, 300),
        concurrency=8,
    )
    assert promised.preemptions == 0
    roomy = simulate_requests(
        table=TABLE, input_tokens=equal(8, 400), output_tokens=equal(8, 300), concurrency=8
    )
    assert roomy.finish_s.max() < min(found.finish_s.max(), promised.finish_s.max())


@pytest.mark.parametrize("promised", [(0.0, 0.0), (0.7, 0.098)])
@pytest.mark.parametrize("prefill_first", [False, True])
def test_what_was_put_back_waits_until_it_can_stay(
    promised: tuple[float, float], prefill_first: bool
) -> None:
    """Long prompts near the cache's limit: admitted into the room that it just gave up, a request
    would be put back at once.
    """
    table = replace(TABLE, cache_tokens=20 * 8192.0, promised=promised, prefill_first=prefill_first)
    arrivals = np.cumsum(np.random.default_rng(1).exponential(0.75, 300))
    found = simulate_requests(
        table=table,
        input_tokens=equal(300, 8000),
        output_tokens=equal(300, 500),
        arrival_s=arrivals,
    )
    roomy = simulate_requests(
        table=replace(table, cache_tokens=1e9),
        input_tokens=equal(300, 8000),
        output_tokens=equal(300, 500),
        arrival_s=arrivals,
    )
    assert (found.preemptions > 0) == (promised[1] == 0.0) and found.preemptions < 60
    assert found.finish_s.max() < 1.1 * roomy.finish_s.max()


def in_flight(found: Served) -> float:
    """Requests between arrival and end, mean over time, counted at every change."""
    times = np.concatenate([found.arrival_s, found.finish_s])
    order = np.argsort(times, kind="stable")
    steps = np.concatenate([np.ones(len(found.arrival_s)), -np.ones(len(found.finish_s))])[order]
    times = times[order]
    return float((np.cumsum(steps)[:-1] * np.diff(times)).sum() / times[-1])


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_littles_law(concurrency: int) -> None:
    """Requests in flight are the rate times the mean latency; a closed load keeps them at its
    concurrency until the end.
    """
    n = 40 * concurrency
    found = simulate_requests(
        table=TABLE, input_tokens=equal(n, 300), output_tokens=equal(n, 40), concurrency=concurrency
    )
    rate, latency = n / found.finish_s.max(), (found.finish_s - found.arrival_s).mean()
    assert in_flight(found) == pytest.approx(rate * latency, rel=EXACT)
    assert rate * latency == pytest.approx(concurrency, rel=0.05)


def test_more_load_never_serves_faster_nor_fewer() -> None:
    rng = np.random.default_rng(7)
    inputs, outputs = rng.integers(50, 500, 600), rng.integers(10, 100, 600)
    runs = [
        simulate_requests(table=TABLE, input_tokens=inputs, output_tokens=outputs, concurrency=c)
        for c in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert np.all(np.diff([run.finish_s.max() for run in runs]) <= 0)
    assert np.all(np.diff([(run.finish_s - run.arrival_s).mean() for run in runs]) >= 0)


def test_a_slow_front_end_bounds_the_rate() -> None:
    table = replace(TABLE, request_s=0.05)
    found = simulate_requests(
        table=table, input_tokens=equal(200, 16), output_tokens=equal(200, 2), concurrency=64
    )
    assert 200 / found.finish_s.max() == pytest.approx(1 / 0.05, rel=0.05)


@pytest.mark.parametrize("length", [2048, 16384])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_prompt_alone_takes_its_forward_pass(length: int, stages: int) -> None:
    """Timed with shorter prompts, the table has more output rows. A pipeline's next prompt takes a
    stage's share.
    """
    setup = serving(input_length=length, output_length=1)
    config = replace(setup.config, pipeline_parallel_size=stages, max_num_batched_tokens=length)
    candidates, one = row(replace(setup, config=config)), np.ones(1)
    table = pass_table(case=setup.case, candidates=candidates)
    batch = Pass(tokens=length * one, decoding=0 * one, prefill_requests=one)
    alone_s = (
        forward_seconds(setup.case, candidates, batch, context=0.0)[0]
        + setup.case.engine.iteration_overhead_s
    )
    assert table.prompt[-1] == length
    assert table.row(0)[-1] + table.key_s * length**2 / 2 == pytest.approx(
        alone_s / stages, rel=1e-4
    )


@pytest.mark.parametrize("load", [1, 8, 64])
def test_requests_in_step_are_the_closed_form(load: int) -> None:
    """Equal requests whose prompts fit one pass together stay together: nothing is approximate but
    a pass's rounding.
    """
    setup = serving(input_length=128, output_length=256)
    engine = replace(
        setup.case.engine,
        schedule="prefill_first",
        request_overhead_s=0.0,
        stream_overhead_s=0.0,
        first_token_s=0.0,
    )
    case = replace(setup.case, engine=engine, prefill_group=float(load), wave_share=0.0)
    closed = serving_costs(case=case, candidates=row(setup, load))
    table = pass_table(case=case, candidates=row(setup, load))
    found = simulate_requests(
        table=table,
        input_tokens=equal(4 * load, 128),
        output_tokens=equal(4 * load, 256),
        concurrency=load,
    )
    assert found.tpot_s.mean() == pytest.approx(closed.tpot_s[0], rel=2e-3)
    # The closed form also counts the pass in which a request arrives.
    assert found.ttft_s.mean() + closed.tpot_s[0] == pytest.approx(closed.ttft_s[0], rel=0.02)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("load", [1, 16, 256])
def test_decoding_never_beats_bytes_over_bandwidth(tensor: int, load: int) -> None:
    setup = serving(input_length=512, output_length=64, precision="fp8")
    setup = replace(setup, config=replace(setup.config, tensor_parallel_size=tensor))
    model, device = setup.case.model, setup.case.cluster.gpu
    weights = (
        (total_parameters(model) - 2 * model.vocab_size * model.hidden_size)
        * setup.case.weight_bytes
        / tensor
    )
    keys = (
        2
        * model.num_hidden_layers
        * model.kv_heads
        * model.head_size
        * setup.case.kv_element_bytes
        * 512
        * load
        / tensor
    )
    least = (weights + keys) / device.memory_bandwidth_bytes_per_second
    table = pass_table(case=setup.case, candidates=row(setup))
    n = 2 * load
    found = simulate_requests(
        table=replace(table, cache_tokens=1e12),
        input_tokens=equal(n, 512),
        output_tokens=equal(n, 64),
        concurrency=load,
    )
    assert (
        found.tpot_s.min() > 0.999 * least or load == 1
    )  # the last requests of the run decode beside fewer
    assert (
        serving_costs(case=setup.case, candidates=row(setup, load)).tpot_s[0]
        > weights / device.memory_bandwidth_bytes_per_second
    )


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_arrivals_by_events_by_the_closed_form_and_as_a_fluid_agree(share: float) -> None:
    setup = serving(input_length=1024, output_length=256)
    one = row(setup)
    full = serving_costs(case=setup.case, candidates=row(setup, 256.0))
    rate = share * 256.0 / full.request_latency_s[0]
    rng = np.random.default_rng(3)
    arrivals = np.cumsum(rng.exponential(1.0 / rate, 4000))
    events = simulate_requests(
        table=pass_table(case=setup.case, candidates=one),
        input_tokens=equal(4000, 1024),
        output_tokens=equal(4000, 256),
        arrival_s=arrivals,
    )
    closed, _ = costs_at_rate(
        case=replace(setup.case, cluster=setup.case.cluster.with_num_gpus(2)),
        candidates=one,
        requests_per_second=rate,
    )
    counts = np.histogram(arrivals, bins=2000, range=(0.0, arrivals[-1]))[0].astype(float)
    fluid = simulate_flow(
        case=setup.case, candidates=one, arrivals=counts, step_s=arrivals[-1] / 2000
    )
    middle = events.tpot_s[500:].mean()
    assert closed.tpot_s[0] == pytest.approx(middle, rel=0.1) and fluid.tpot_s[0] == pytest.approx(
        middle, rel=0.1
    )
    assert fluid.in_flight[0] == pytest.approx(in_flight(events), rel=0.15)
    wait = events.ttft_s[500:].mean()
    assert closed.ttft_s[0] == pytest.approx(wait, rel=0.35) and fluid.ttft_s[0] == pytest.approx(
        wait, rel=0.35
    )
    assert fluid.completed[0] <= 4000 and fluid.completed[0] == pytest.approx(
        4000, abs=2 * fluid.in_flight[0]
    )


def test_in_an_idle_fluids_first_step_half_of_what_stays_is_there_on_average() -> None:
    """Requests come evenly over the step, and those that end leave in its middle."""
    setup = serving(input_length=1024, output_length=256)
    latency_s = serving_costs(case=setup.case, candidates=row(setup, 8.0)).request_latency_s[0]
    fluid = simulate_flow(
        case=setup.case, candidates=row(setup), arrivals=np.array([16.0]), step_s=8.0 * latency_s
    )
    assert 2.0 < fluid.completed[0] < 16.0
    assert fluid.in_flight[0] == pytest.approx(0.5 * (16.0 - fluid.completed[0]), rel=1e-12)
