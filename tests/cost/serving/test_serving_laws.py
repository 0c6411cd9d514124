"""Laws of serving that hold whatever the constants: of precisions, of GPUs, of offline loads, and
of who sends the requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from hp_tool.catalog import cluster, model
from hp_tool.catalog.efficiency import engine_efficiency, engine_profiles
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import serving_costs
from hp_tool.cost.serving.load import offline_costs
from hp_tool.domain.clients import CLIENTS
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload, LoadSpec
from hp_tool.domain.serving import ServingConfig
from hp_tool.questions.serving.problem import serving_case
from tests.cost.serving.serving_cases import Serving, serving, servings

LOADS = [1, 4, 32, 256]
ENGINES = sorted({profile.engine for profile in engine_profiles()} - {"megatron-core"})
FIGURES = ("ttft_s", "tpot_s", "request_latency_s")


def on(
    gpu: str,
    *,
    name: str = "llama-3.1-70b",
    precision: str = "bf16",
    engine: str = "vllm",
    **changes: float,
) -> Serving:
    """One model on eight GPUs of a kind, with changes to its engine's constants."""
    machine = cluster(ClusterQuery(gpu=gpu, num_gpus=8))
    profile = engine_efficiency(engine=engine, version=None, silicon=machine.gpu.silicon)
    workload = InferenceWorkload(
        input_length=2048,
        output_length=256,
        precision=precision,
        kv_cache_precision="bf16",  # type: ignore[arg-type]
    )
    case = serving_case(
        model=model(name), cluster=machine, workload=workload, engine=replace(profile, **changes)
    )
    return Serving(case=case, config=ServingConfig(tensor_parallel_size=8))


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s-48gb"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_narrower_precision_is_slower_by_its_casts_at_most(engine: str, gpu: str) -> None:
    wide = on(gpu, engine=engine, precision="bf16").costs(concurrency=LOADS)
    without = on(gpu, engine=engine, precision="fp8", cast_share=0.0).costs(concurrency=LOADS)
    cast = on(gpu, engine=engine, precision="fp8").costs(concurrency=LOADS)
    for figure in FIGURES:
        narrow, all_of_it = getattr(without, figure), getattr(cast, figure)
        free = ~(wide.kv_limited | without.kv_limited)
        assert np.all((narrow <= getattr(wide, figure) * (1 + 1e-9))[free]), figure
        assert np.all(narrow <= all_of_it * (1 + 1e-9)), figure


@pytest.mark.parametrize("name", ["llama-3.1-70b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_card_with_more_bandwidth_on_the_same_die_is_never_later(engine: str, name: str) -> None:
    cards = ("h100-sxm-80gb", "h200-sxm-141gb")
    slow, fast = (on(gpu, engine=engine, name=name).costs(concurrency=LOADS) for gpu in cards)
    assert np.all(fast.request_latency_s <= slow.request_latency_s * (1 + 1e-9))
    # A faster device leaves more of a request's wait to the front end, before its first token:
    # without one none is later. A pass that its launches bound takes as long on both.
    alone = {"request_overhead_s": 0.0, "stream_overhead_s": 0.0}
    slow, fast = (
        on(gpu, engine=engine, name=name, **alone).costs(concurrency=LOADS) for gpu in cards
    )
    for figure in FIGURES:
        assert np.all(getattr(fast, figure) <= getattr(slow, figure) * (1 + 1e-5)), figure


@given(servings())
def test_an_offline_load_is_never_slower_than_a_closed_loop_of_as_many(setup: Serving) -> None:
    for load in LOADS:
        rows = ServingCandidates.from_configs([setup.config], concurrency=[load])
        closed = serving_costs(case=setup.case, candidates=rows)
        offline = offline_costs(case=setup.case, candidates=rows, num_prompts=float(load))
        rates = offline.output_tokens_per_second_per_gpu, closed.output_tokens_per_second_per_gpu
        assert rates[0][0] >= rates[1][0] * (1 - 1e-9)


def test_prompts_come_together_only_where_the_client_sends_equal_lengths() -> None:
    named = {name: serving(load=LoadSpec(client=name)) for name in CLIENTS}  # type: ignore[arg-type]
    unnamed = serving()
    assert unnamed.case.prefill_group == 1.0 and unnamed.case.wave_share == pytest.approx(0.1)
    for name, setup in named.items():
        equal = CLIENTS[name].equal_lengths
        assert setup.case.prefill_group == (setup.case.engine.prefill_group if equal else 1.0), name
        assert setup.case.input_length == round(
            CLIENTS[name].mean_length * unnamed.case.input_length
        ), name
    assert named["aiperf"].case.wave_share == pytest.approx(0.5)  # two requests for each in flight
    # Whoever comes with others waits for their prompts too.
    together, apart = named["vllm-bench"].costs(concurrency=[32]), unnamed.costs(concurrency=[32])
    assert together.ttft_s[0] > 1.2 * apart.ttft_s[0]
