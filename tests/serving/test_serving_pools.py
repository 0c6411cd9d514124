"""Disaggregated serving: rates match, parts add up, nothing bought makes it worse, and pools may
differ in kind.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.disaggregated import (
    PoolCosts,
    pool_costs,
    pool_quantiles,
    prompt_seconds,
    token_seconds,
    transfer_seconds,
)
from hp_tool.domain.inference import SpeculativeSpec
from hp_tool.domain.serving import ServingConfig
from hp_tool.errors import UnsupportedError
from hp_tool.questions import answers, schema, serving
from tests.cost.serving.serving_cases import Serving
from tests.cost.serving.serving_cases import serving as case_of
from tests.serving.test_serving_answers import query

counts = st.integers(1, 6)
loads = st.integers(1, 2000)


def costs(
    setup: Serving, *, prefill: int, decode: int, load: int, rate: float | None = None
) -> PoolCosts:
    rows = [
        ServingCandidates.from_configs(
            [ServingConfig(tensor_parallel_size=2, data_parallel_size=replicas)], concurrency=[load]
        )
        for replicas in (prefill, decode)
    ]
    pools = {
        "prefill": setup.case,
        "decode": setup.case,
        "prefillers": rows[0],
        "decoders": rows[1],
    }
    return pool_costs(**pools, requests_per_second=rate)


@given(counts, counts, loads)
def test_the_load_is_in_flight_and_no_pool_works_more_than_it_can(
    prefill: int, decode: int, load: int
) -> None:
    setup = case_of()
    found = costs(setup, prefill=prefill, decode=decode, load=load)
    assert found.request_rate_per_second * found.request_latency_s == pytest.approx(
        load
    )  # Little's law
    assert found.prefill_busy <= 1.0 + 1e-6 and found.decode_batch <= found.max_decode_batch * (
        1 + 1e-9
    )
    output = setup.case.output_length
    assert found.request_latency_s == pytest.approx(found.ttft_s + (output - 1) * found.tpot_s)
    one = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=2)], concurrency=[1])
    least = prompt_seconds(setup.case, one)[0] + transfer_seconds(setup.case, setup.case, one, one)
    assert found.ttft_s >= least * (1 - 1e-6)
    assert found.output_tokens_per_second_per_gpu * 2 * (prefill + decode) == pytest.approx(
        found.request_rate_per_second * output
    )


@given(counts, counts, loads)
def test_more_replicas_never_complete_fewer_requests(prefill: int, decode: int, load: int) -> None:
    setup = case_of()
    base = costs(setup, prefill=prefill, decode=decode, load=load).request_rate_per_second
    assert costs(
        setup, prefill=prefill + 1, decode=decode, load=load
    ).request_rate_per_second >= base * (1 - 1e-6)
    assert costs(
        setup, prefill=prefill, decode=decode + 1, load=load
    ).request_rate_per_second >= base * (1 - 1e-6)
    assert costs(
        setup, prefill=prefill, decode=decode, load=load + 50
    ).request_rate_per_second >= base * (1 - 1e-6)


def test_a_faster_network_only_shortens_the_transfer() -> None:
    setup = case_of(input_length=16_000)
    bandwidth = 10 * setup.case.cluster.inter_node_bandwidth_bytes_per_second
    fast = replace(setup.case.cluster, inter_node_bandwidth_bytes_per_second=bandwidth)
    quick = replace(setup, case=replace(setup.case, cluster=fast))
    slow, found = (costs(one, prefill=1, decode=1, load=4) for one in (setup, quick))
    assert found.transfer_s < 0.2 * slow.transfer_s and found.ttft_s < slow.ttft_s
    assert found.request_rate_per_second >= slow.request_rate_per_second


def test_at_a_rate_the_queue_grows_until_the_pools_no_longer_keep_up() -> None:
    waits = [
        costs(case_of(), prefill=1, decode=2, load=1, rate=rate) for rate in (0.5, 2.0, 6.0, 1000.0)
    ]
    firsts = [float(found.ttft_s[0]) for found in waits[:3]]
    assert (
        firsts == sorted(firsts)
        and all(found.sustained[0] for found in waits[:3])
        and not waits[3].sustained[0]
    )
    np.testing.assert_allclose(
        [float(found.request_rate_per_second[0]) for found in waits[:3]], (0.5, 2.0, 6.0)
    )


def test_an_answer_ranks_pools_beside_shared_replicas() -> None:
    load = {"disaggregated": {}, "concurrency": 256, "kv_cache_precision": "fp8"}
    asked = query(inference=load, targets={"tpot_s": 0.03, "ttft_s": 5.0})
    answer = json.loads(schema.to_json(answers.answer_recommend(asked, top=5)))
    rows = answer["disaggregated"]
    assert answer["recommendations"] and len(rows) == 5
    rates = [row["estimate"]["output_tokens_per_second_per_gpu"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    for row in rows:
        used = sum(
            row[pool]["tensor_parallel_size"] * row[pool]["replicas"]
            for pool in ("prefill", "decode")
        )
        assert used == row["estimate"]["num_gpus"] <= 8 and row["estimate"]["tpot_s"] <= 0.03
    assert answers.answer_recommend(query(), top=1).disaggregated is None


def test_pools_of_two_kinds_and_sizes_that_are_named() -> None:
    stages = [{"gpu": "h100-sxm-80gb", "num_gpus": 4}, {"gpu": "h200-sxm-141gb", "num_gpus": 4}]
    spec = {
        "prefill_tensor_parallel_size": 2,
        "decode_tensor_parallel_size": [2, 4],
        "prefill_replicas": 1,
    }
    answer = answers.answer_recommend(
        query(cluster={"stages": stages}, inference={"disaggregated": spec}), top=5
    )
    assert answer.recommendations == () and answer.disaggregated
    for row in answer.disaggregated:
        assert (row.prefill.gpu, row.decode.gpu) == ("h100-sxm-80gb", "h200-sxm-141gb")
        assert (
            row.prefill.tensor_parallel_size == 2
            and row.prefill.replicas == 1
            and row.decode.tensor_parallel_size in (2, 4)
        )


def test_default_settings_slow_pools_down() -> None:
    tpot = []
    for settings in ("tuned", "defaults"):
        load = {"disaggregated": {}, "concurrency": 64, "engine_settings": settings}
        answer = answers.answer_recommend(query(inference=load), top=1)
        assert answer.disaggregated
        pools = answer.disaggregated[0].estimate
        tpot.append(pools.tpot_s)
    assert tpot[1] > tpot[0]


def test_fewest_devices_of_both_pools() -> None:
    rate = {"concurrency": None, "request_rate_per_second": 2.0, "disaggregated": {}}
    found = serving.rank_pools(
        query=query(inference=rate, objective="min_gpus", targets={"tpot_s": 0.05})
    )
    used = [row.estimate.num_gpus for row in found]
    assert used == sorted(used) and used[0] < 8 and found[0].estimate.request_rate_per_second == 2.0


def test_pools_keep_to_targets_on_any_quantile() -> None:
    rate = {"concurrency": None, "request_rate_per_second": 3.0, "disaggregated": {}}
    free = serving.rank_pools(query=query(inference=rate), top=1)[0].estimate
    assert free.tails is not None
    tail = free.tails.ttft_s
    assert tail.p50 <= free.ttft_s * 1.001 and tail.p50 <= tail.p90 < tail.p99
    limit = 0.5 * (tail.p50 + tail.p99)
    rows = serving.rank_pools(
        query=query(inference=rate, targets={"ttft_p95_s": limit, "e2e_p99_s": 100.0}), top=5
    )
    for row in rows:
        assert (
            row.estimate.tails is not None and row.estimate.tails.ttft_s.quantiles["p95"] <= limit
        )


def test_pools_carry_the_highest_rate() -> None:
    unknown = {
        "concurrency": None,
        "disaggregated": {"prefill_replicas": 1},
        "load": {"arrival": "poisson"},
    }
    sizes = {"prefill_tensor_parallel_size": 2, "decode_tensor_parallel_size": 2}
    asked = query(
        inference=unknown | {"disaggregated": {"prefill_replicas": 1} | sizes},
        targets={"ttft_p95_s": 3.0},
    )
    (best,) = serving.rank_pools(query=asked, top=1)
    rate = best.estimate.request_rate_per_second

    def at(rate: float) -> bool:
        given = {
            "concurrency": None,
            "request_rate_per_second": rate,
            "disaggregated": {"prefill_replicas": 1} | sizes,
        }
        return bool(
            serving.rank_pools(query=query(inference=given, targets={"ttft_p95_s": 3.0}), top=1)
        )

    assert at(rate) and not at(1.02 * rate)
    listed = unknown | {
        "load": None,
        "request_rate_per_second": [0.5 * rate, 0.9 * rate, 2.0 * rate],
    }
    (row,) = serving.rank_pools(
        query=query(
            inference=listed | {"disaggregated": {"prefill_replicas": 1} | sizes},
            targets={"ttft_p95_s": 3.0},
        ),
        top=1,
    )
    assert row.estimate.request_rate_per_second == 0.9 * rate


def test_an_estimate_describes_shared_replicas_alone() -> None:
    with pytest.raises(UnsupportedError) as caught:
        serving.estimate(query=query(inference={"disaggregated": {}}))
    assert caught.value.field == "inference.disaggregated"


def test_a_front_of_throughput_comes_with_the_answer() -> None:
    answer = answers.answer_recommend(query(), top=1, pareto="throughput")
    assert answer.throughput_front and answer.throughput_front == serving.pareto_front(
        query=query()
    )
    with pytest.raises(UnsupportedError):
        answers.answer_recommend(query(), top=1, pareto="memory")


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("busy", "services"), [(0.25, 1 / 6), (0.5, 0.5), (0.8, 2.0)])
def test_prompts_wait_as_in_a_queue_of_one_server_and_constant_service(
    replicas: int, busy: float, services: float
) -> None:
    """Pollaczek and Khinchine's mean wait of M/D/1, in services: r / (2 (1 - r)). Each replica has
    its share of them.
    """
    setup = case_of()
    one = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=2)], concurrency=[1])
    alone, service = (float(seconds[0]) for seconds in prompt_seconds(setup.case, one))
    at_rate = costs(setup, prefill=replicas, decode=8, load=1, rate=busy * replicas / service)
    assert at_rate.sustained[0] and at_rate.prefill_busy[0] == pytest.approx(busy)
    assert at_rate.ttft_s[0] - alone - at_rate.transfer_s[0] == pytest.approx(services * service)


def test_drafts_that_are_refused_are_work_all_the_same() -> None:
    """Four tokens to verify for one that is kept: as long as a batch of four times as many
    sequences takes, less its host and cache; one sequence waits for the weights alone.
    """
    plain, drafting = (
        case_of(),
        case_of(speculative=SpeculativeSpec(num_speculative_tokens=3, acceptance_rate=0.0)),
    )
    one = ServingCandidates.from_configs(
        [ServingConfig(tensor_parallel_size=2, max_num_seqs=4096)], concurrency=[1]
    )

    def seconds(setup: Serving, batch: float) -> float:
        return float(token_seconds(setup.case, one, np.array([batch]))[0])

    assert seconds(drafting, 1) == pytest.approx(seconds(plain, 1), rel=0.1)
    assert 1.5 * seconds(plain, 512) < seconds(drafting, 512) < seconds(plain, 2048)


def test_drafts_that_are_kept_share_the_seconds_of_their_pass() -> None:
    """All three kept: a pass, as long as with all of them refused, yields four tokens."""
    refused, kept = (
        case_of(speculative=SpeculativeSpec(num_speculative_tokens=3, acceptance_rate=rate)).case
        for rate in (0.0, 1.0)
    )
    one = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=2)], concurrency=[1])
    alone, shared = (float(token_seconds(case, one, np.ones(1))[0]) for case in (refused, kept))
    assert shared == pytest.approx(
        alone / 4, rel=0.05
    )  # less what the front end takes of each token


def test_the_wait_of_arrivals_one_by_one_is_the_queues() -> None:
    """Lindley's recursion over 400,000 independent arrivals: each waits for what was left when the
    one before arrived.
    """
    setup = case_of()
    one = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=2)], concurrency=[1])
    alone, service = (float(seconds[0]) for seconds in prompt_seconds(setup.case, one))
    rate = 0.6 / service
    gaps = np.random.default_rng(0).exponential(1 / rate, 400_000)
    wait, waits = 0.0, []
    for gap in gaps:
        waits.append(wait)
        wait = max(wait + service - gap, 0.0)
    at_rate = costs(setup, prefill=1, decode=8, load=1, rate=rate)
    before = alone + at_rate.transfer_s[0]
    assert at_rate.ttft_s[0] - before == pytest.approx(np.mean(waits), rel=0.03)
    decoders = ServingCandidates.from_configs(
        [ServingConfig(tensor_parallel_size=2, data_parallel_size=8)], concurrency=[1]
    )
    for share in (0.5, 0.95, 0.99):
        predicted = pool_quantiles(
            prefill=setup.case,
            decode=setup.case,
            decoders=decoders,
            costs=at_rate,
            share=share,
            independent=True,
        ).ttft_s[0]
        assert predicted - before == pytest.approx(np.quantile(waits, share), rel=0.06)


@pytest.mark.parametrize(("independent", "output_length"), [(False, 512), (True, 1), (True, 512)])
def test_only_independent_requests_meet_batches_above_the_mean(
    independent: bool, output_length: int
) -> None:
    """Requests that are answered one after the other keep the batch as it is."""
    setup = case_of(input_length=512, output_length=output_length)
    at_rate = costs(setup, prefill=1, decode=1, load=8)
    found = pool_quantiles(
        prefill=setup.case,
        decode=setup.case,
        decoders=ServingCandidates.from_configs(
            [ServingConfig(tensor_parallel_size=2)], concurrency=[8]
        ),
        costs=at_rate,
        share=0.95,
        independent=independent,
    )
    above = bool(found.tpot_s[0] > at_rate.tpot_s[0])
    assert above is (independent and output_length > 1)
