"""Kernels of recurrent mixers and of sparse attention: laws, hand arithmetic, and the fit's own
rows where they are at hand.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.catalog import cluster, documents, model
from hp_tool.catalog.efficiency import FOLDER, engine_efficiency
from hp_tool.cost import scans
from hp_tool.cost.recurrent import state_numbers, value_heads
from hp_tool.cost.serving import mixers
from hp_tool.cost.serving.candidates import ServingCase
from hp_tool.cost.serving.operations import visible_keys
from hp_tool.domain.efficiency import MixerRoofline
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.inference import InferenceWorkload
from hp_tool.domain.model import ModelSpec
from hp_tool.questions.serving.problem import serving_case

GPUS = (
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "b300-sxm-288gb",
    "a100-sxm-80gb",
    "mi355x-288gb",
)
HYBRIDS = {
    "gated_delta": "qwen3.6-27b",
    "kimi_delta": "kimi-k3",
    "mamba2": "nemotron-3-nano-30b-a3b",
}
MAMBA = ModelSpec(
    mixer="mamba",
    mamba_inner_size=8192,
    ssm_state_size=16,
    mamba_dt_rank=256,
    num_hidden_layers=1,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=65_536,
)
SPARSE = ("deepseek-v3.2", "glm-5", "minimax-m3")
RECURRENT_KERNELS = {"convolution", "convolution_update", "scan", "update"}
KERNELS = {"sparse": {"index", "index_decode", "attention", "attention_decode"}}
counts = st.sampled_from((1.0, 3.0, 8.0, 64.0, 500.0))
lengths = st.sampled_from((1.0, 16.0, 500.0, 4096.0, 60_000.0))


def recurrent(mixer: str) -> ModelSpec:
    """The recurrent layers of a hybrid, alone."""
    return (
        MAMBA
        if mixer == "mamba"
        else next(kind for _, kind in model(HYBRIDS[mixer]).kinds if kind.mixer == mixer)
    )


def sparse(name: str) -> ModelSpec:
    """The layers of a model that have an indexer, alone."""
    return next(kind for _, kind in model(name).kinds if kind.index_topk is not None)


def case_of(layers: ModelSpec, gpu: str = "h100-sxm-80gb", **workload: Any) -> ServingCase:
    """One kind of layers, by isolated kernels."""
    load = replace(InferenceWorkload(input_length=4096, output_length=512), **workload)
    engine = engine_efficiency(engine="megatron-core", version=None)
    return serving_case(
        model=layers,
        cluster=cluster(ClusterQuery(gpu=gpu, num_gpus=1)),
        workload=load,
        engine=engine,
    )


def one(value: float) -> Any:
    return np.array([value])


def seconds(
    case: ServingCase,
    *,
    t: int = 1,
    decoding: float = 0.0,
    tokens: float = 0.0,
    prompts: float = 0.0,
    drafted: int = 0,
) -> float:
    """One recurrent layer."""
    (result,) = mixers.mixer_seconds(
        case,
        np.array([t]),
        decoding=one(decoding),
        prompt_tokens=one(tokens),
        prompts=one(prompts),
        drafted=drafted,
    )
    return float(result)


def sparse_seconds(
    case: ServingCase,
    *,
    t: int = 1,
    decoding: float = 0.0,
    context: float = 4096.0,
    tokens: float = 0.0,
    drafted: int = 0,
) -> tuple[float, float]:
    """(indexer, attention over the keys it chose) of one layer."""
    batch = {
        "decoding": one(decoding),
        "context": context,
        "prompt_tokens": one(tokens),
        "drafted": drafted,
    }
    both = (mixers.index_seconds, mixers.chosen_attention_seconds)
    index, attention = (float(each(case, np.array([t]), **batch)[0]) for each in both)
    return index, attention


@pytest.mark.parametrize("mixer", [*HYBRIDS, "mamba"])
def test_no_work_costs_nothing_and_phases_add_up(mixer: str) -> None:
    case = case_of(recurrent(mixer))
    assert seconds(case) == 0.0
    apart = seconds(case, decoding=40.0) + seconds(case, tokens=6000.0, prompts=2.0)
    assert seconds(case, decoding=40.0, tokens=6000.0, prompts=2.0) == pytest.approx(apart)
    several = mixers.mixer_seconds(
        case,
        np.array([1, 2, 4]),
        decoding=np.array([0.0, 7.0, 9.0]),
        prompt_tokens=np.zeros(3),
        prompts=np.zeros(3),
    )
    assert several.shape == (3,) and several[0] == 0.0
    assert several[2] == pytest.approx(seconds(case, t=4, decoding=9.0)), (
        "rows do not see each other"
    )


@pytest.mark.parametrize("name", SPARSE)
def test_no_sparse_work_costs_nothing(name: str) -> None:
    case = case_of(sparse(name))
    assert sparse_seconds(case) == (0.0, 0.0)
    assert all(each > 0.0 for each in sparse_seconds(case, decoding=1.0))
    assert all(each > 0.0 for each in sparse_seconds(case, tokens=4096.0))


@given(
    mixer=st.sampled_from([*HYBRIDS, "mamba"]),
    gpu=st.sampled_from(GPUS),
    sequences=counts,
    length=lengths,
    t=st.sampled_from((1, 2, 8)),
)
def test_more_work_takes_longer(
    mixer: str, gpu: str, sequences: float, length: float, t: int
) -> None:
    """In sequences, drafted tokens, prompts of one length and tokens of one number of prompts; more
    ranks never take longer.
    """
    case = case_of(recurrent(mixer), gpu)
    decode = seconds(case, t=t, decoding=sequences)
    assert (
        decode
        < seconds(case, t=t, decoding=sequences + 1.0)
        < seconds(case, t=t, decoding=sequences + 1.0, drafted=2)
    )
    prefill = seconds(case, t=t, tokens=sequences * length, prompts=sequences)
    assert prefill < seconds(case, t=t, tokens=sequences * (length + 1.0), prompts=sequences)
    assert prefill < seconds(case, t=t, tokens=(sequences + 1.0) * length, prompts=sequences + 1.0)
    assert decode >= seconds(case, t=2 * t, decoding=sequences)
    assert prefill >= seconds(case, t=2 * t, tokens=sequences * length, prompts=sequences)


@given(
    name=st.sampled_from(SPARSE),
    gpu=st.sampled_from(GPUS),
    sequences=counts,
    context=lengths,
    t=st.sampled_from((1, 2, 4)),
)
def test_more_sparse_work_takes_longer(
    name: str, gpu: str, sequences: float, context: float, t: int
) -> None:
    case, longer = (case_of(sparse(name), gpu, input_length=int(n)) for n in (context, 2 * context))
    here = sum(sparse_seconds(case, t=t, decoding=sequences, context=context))
    assert here < sum(sparse_seconds(case, t=t, decoding=sequences, context=2.0 * context))
    assert here < sum(sparse_seconds(case, t=t, decoding=sequences + 1.0, context=context))
    assert here >= sum(sparse_seconds(case, t=2 * t, decoding=sequences, context=context))
    prompts = sum(sparse_seconds(case, t=t, tokens=1000.0))
    assert prompts < sum(sparse_seconds(case, t=t, tokens=1001.0))
    assert prompts < sum(sparse_seconds(longer, t=t, tokens=1000.0)), (
        "as many tokens of longer prompts"
    )


@pytest.mark.parametrize("mixer", ["gated_delta", "kimi_delta"])
def test_ranks_divide_what_is_not_a_launch(mixer: str) -> None:
    case = case_of(recurrent(mixer))
    for work in ({"decoding": 4000.0}, {"tokens": 4e6, "prompts": 1000.0}):
        share = seconds(case, t=4, **work) / seconds(case, **work)
        assert 0.25 < share < (0.27 if mixer == "gated_delta" or "decoding" in work else 0.4), (
            "its convolutions' own seconds"
        )


def test_a_larger_state_takes_longer_to_pass() -> None:
    layers = recurrent("gated_delta")
    wide = replace(layers, linear_num_value_heads=2 * value_heads(layers))
    assert state_numbers(wide, np.array([1]))[0] > state_numbers(layers, np.array([1]))[0]
    assert seconds(case_of(wide), decoding=100.0) > seconds(case_of(layers), decoding=100.0)
    assert mixers.state_traffic(wide, 1) == 2.0 * mixers.state_traffic(layers, 1)


def test_state_is_read_once_and_written_for_every_token() -> None:
    """48 heads with a state of 128 x 128 in fp32, read and written: 6.3 MB a sequence and layer."""
    layers = recurrent("gated_delta")
    assert (value_heads(layers), layers.linear_key_head_dim) == (48, 128)
    assert mixers.state_traffic(layers, 1) == 48 * 128 * 128 * 4 * 2
    assert mixers.state_traffic(layers, 1, 3) == 48 * 128 * 128 * 4 * 5
    assert mixers.state_traffic(layers, 4) == 12 * 128 * 128 * 4 * 2


def test_work_of_a_token_by_hand() -> None:
    delta = replace(recurrent("gated_delta"), linear_num_key_heads=8, linear_num_value_heads=16)
    work = scans.scan_work(delta, 1)
    assert work.flops == 16 * (64 * (6 * 128 + 4 * 128) + 6 * 128 * 128)
    assert work.traffic == 2 * (2 * 8 * 128 + 16 * 128 + 16 * 128) + 4 * 16
    space = replace(
        recurrent("mamba2"),
        mamba_num_heads=32,
        mamba_head_dim=64,
        ssm_state_size=128,
        mamba_n_groups=4,
    )
    work = scans.scan_work(space, 1)
    assert work.flops == 4 * 2 * 128 * 128 + 32 * (2 * 128 * 64 + 4 * 128 * 64)
    assert work.traffic == 2 * (2048 + 2 * 4 * 128 + 2048) + 4 * 4 * 2048
    assert scans.convolution_work(delta, 2) == (2 * 4 * 2048, 2 * 2 * 2048)
    assert mixers.window_work(delta, 1, 2) == (2 * 6 * 4096, 4 * 6 * 4096)


@pytest.mark.parametrize(("length", "cached"), [(10, 0), (50, 0), (50, 12), (50, 40), (20, 20)])
def test_visible_keys_are_a_mean_over_positions(length: int, cached: int) -> None:
    positions = np.arange(cached, length) + 0.5 if length > cached else np.array([float(length)])
    assert visible_keys(length, cached=cached) == pytest.approx(positions.mean())
    assert visible_keys(length, cached=cached, most=16) == pytest.approx(
        np.minimum(positions, 16).mean(), rel=0.01
    )


def test_layers_that_share_an_index_compute_none() -> None:
    case = case_of(sparse("glm-5"))
    shared = case_of(replace(case.model, shares_index=True))
    index, attention = sparse_seconds(shared, decoding=8.0, tokens=100.0)
    assert index == 0.0 and attention == sparse_seconds(case, decoding=8.0, tokens=100.0)[1]


def test_fewer_places_take_less() -> None:
    """A quarter of the keys takes a quarter of all but the launches."""
    layers = sparse("deepseek-v3.2")
    case, fewer = case_of(layers), case_of(replace(layers, index_topk=512))
    (_, full), (_, quarter) = (
        sparse_seconds(each, decoding=64.0, context=8192.0) for each in (case, fewer)
    )
    launches = scans.mixer_kernel(case, case.model, "attention_decode").overhead_s
    assert quarter - launches == pytest.approx(0.25 * (full - launches))


def test_beyond_top_k_only_the_indexer_sees_more_keys() -> None:
    case = case_of(sparse("deepseek-v3.2"))
    (short, near), (long, far) = (
        sparse_seconds(case, decoding=32.0, context=n) for n in (2048.0, 131_072.0)
    )
    assert near == far
    keys = 32.0 * (131_072 - 2048) * (128 + 4)
    assert 0.5 < keys / 3.35e12 / (long - short) < 1.0, (
        "the bytes of its keys, at a share of the bandwidth"
    )


@pytest.mark.parametrize(
    ("gpu", "peak", "bandwidth"),
    [("h100-sxm-80gb", 1978.9e12, 3.35e12), ("a100-sxm-80gb", 312e12, 2.039e12)],
)
def test_the_indexer_runs_in_8_bits_where_the_gpu_has_them(
    gpu: str, peak: float, bandwidth: float
) -> None:
    """64 heads of width 128: a score takes 2 * 64 * 128 = 16,384 FLOPs, at the peak of fp8 on H100
    and of bf16 on A100.

    Half of each peak and bandwidth, launches of 1 us. A prompt of 4,096 tokens: each sees 2,048
    keys on average, whose scores are written and read in 4 bytes. Decoding 100 sequences of 8
    tokens (7 drafted) at 4,096 keys: arithmetic is the longer, as a key's 132 bytes are read once
    for 8 scores.
    """
    case = case_of(sparse("deepseek-v3.2"), gpu)
    roof = MixerRoofline(peak_fraction=0.5, bandwidth_fraction=0.5, overhead_s=1e-6)
    constants = replace(case.profile.gpu, mixers={"sparse": dict.fromkeys(KERNELS["sparse"], roof)})
    case = replace(case, profile=replace(case.profile, gpu=constants))
    pairs = 4096 * 2048
    prompt = 1e-6 + pairs * 16_384 / (0.5 * peak) + pairs * 2 * 4 / (0.5 * bandwidth)
    assert sparse_seconds(case, tokens=4096.0)[0] == pytest.approx(prompt)
    decoded = 1e-6 + 100 * 8 * 4096 * 16_384 / (0.5 * peak)
    assert sparse_seconds(case, decoding=100.0, drafted=7)[0] == pytest.approx(decoded)


ROWS = [
    # mixer, heads of values (each of 128), work, milliseconds on H100 within a fifth. A token of a
    # prompt takes about 14 ns in the convolution, 13 in the scan of full units and 9 in the norm of
    # 32 heads; a lone prompt's chunks take 47.
    ("gated_delta", 32, {"decoding": 100.0}, 0.158),
    ("gated_delta", 32, {"tokens": 16 * 4096.0, "prompts": 16.0}, 2.4),
    ("gated_delta", 32, {"tokens": 20_000.0, "prompts": 1.0}, 1.4),
    ("kimi_delta", 24, {"decoding": 200.0}, 0.25),
    ("kimi_delta", 24, {"tokens": 32 * 2048.0, "prompts": 32.0}, 4.4),
]


@pytest.mark.parametrize(("mixer", "heads", "work", "milliseconds"), ROWS)
def test_stored_constants_give_the_scale_of_timed_kernels(
    mixer: str, heads: int, work: dict[str, float], milliseconds: float
) -> None:
    keys = heads // 2 if mixer == "gated_delta" else heads
    layers = replace(recurrent(mixer), linear_num_key_heads=keys, linear_num_value_heads=heads)
    assert 1e3 * seconds(case_of(layers), **work) == pytest.approx(milliseconds, rel=0.2)


def test_every_die_has_every_kernel_with_its_doubt() -> None:
    for path in (FOLDER / "silicon").glob("*.yaml"):
        if path.stem == "cpu":
            continue
        kernels = documents.read(path)["mixers"]
        assert set(kernels) == {"gated_delta", "kimi_delta", "mamba2", "sparse"}
        for family, roofs in kernels.items():
            assert set(roofs) == KERNELS.get(family, RECURRENT_KERNELS)
            assert all(roof["log_sd"] > 0.0 for roof in roofs.values()), (path, family)
    timed, borrowed = (
        documents.read(FOLDER / "silicon" / f"{die}.yaml")["mixers"] for die in ("h100", "a100")
    )
    assert borrowed["gated_delta"]["scan"]["log_sd"] > timed["gated_delta"]["scan"]["log_sd"], (
        "of another generation"
    )
    for kernel in ("scan", "update"):
        assert timed["mamba2"][kernel]["log_sd"] > timed["gated_delta"][kernel]["log_sd"], (
            "nobody timed it"
        )


def test_a_device_near_which_nothing_was_timed_still_has_a_time() -> None:
    case = case_of(recurrent("gated_delta"))
    bare = replace(case, profile=replace(case.profile, gpu=replace(case.profile.gpu, mixers=None)))
    assert 0.3 < seconds(bare, decoding=300.0) / seconds(case, decoding=300.0) < 3.0


@pytest.mark.skipif(
    "HP_REFERENCE_DATA" not in os.environ, reason="needs the folder of measured figures"
)
def test_constants_hold_on_a_card_that_was_left_out() -> None:
    from benchmarks.accuracy.fit_mixers import fit_all

    fitted = fit_all(Path(os.environ["HP_REFERENCE_DATA"]))
    assert len(fitted.errors) == 4 * (4 + 4 + 2 + 2)
    assert [error for error in fitted.errors if error.left_out > 0.2] == []
    for die, kernels in fitted.kernels.items():
        stored = documents.read(FOLDER / "silicon" / f"{die}.yaml")["mixers"]
        for family, roofs in kernels.items():
            for name, roof in roofs.items():
                assert roof.overhead_s == pytest.approx(
                    stored[family][name]["overhead_s"], rel=0.02
                ), (die, family, name)
                assert roof.peak_fraction == pytest.approx(
                    stored[family][name]["peak_fraction"], rel=0.02
                )


@pytest.mark.parametrize(
    ("work", "launches"),
    [
        ({"decoding": 4.0}, 1.0),
        ({"tokens": 512.0, "prompts": 1.0}, 1.0),
        ({"decoding": 4.0, "tokens": 512.0, "prompts": 1.0}, 2.0),
    ],
)
def test_the_norm_is_launched_once_for_decoding_and_once_for_prompts(
    work: dict[str, float], launches: float
) -> None:
    case = case_of(recurrent("mamba2"))
    free, launched = (
        seconds(
            replace(
                case,
                profile=replace(
                    case.profile, gpu=replace(case.profile.gpu, kernel_overhead_s=overhead_s)
                ),
            ),
            **work,
        )
        for overhead_s in (0.0, 1.0)
    )
    assert launched - free == pytest.approx(launches)
