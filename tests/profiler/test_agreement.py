"""Every way of dividing a model trains the same model: its losses are those of one undivided
process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from hp_tool.domain.measurement import Measurement
from hp_tool.domain.parallel import Recompute
from hp_tool.domain.workload import OverlapSpec
from tests.profiler.requests import DEEPSEEK, LATENT, LLAMA, MOE
from tests.profiler.together import run_together

pytestmark = pytest.mark.components

TP2 = {"tensor_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel_size": 2}
PP2_V2 = {**PP2, "virtual_pipeline_parallel_size": 2}
DP2 = {"data_parallel_size": 2}
BLOCK = Recompute(granularity="full", method="block", num_layers=1)
DROPOUT = {"dropout": 0.1}
THREE, SIX = {"num_hidden_layers": 3}, {"num_hidden_layers": 6}
CP2 = {"context_parallel_size": 2, "context_parallel_communication": "all_gather"}
EP2 = {"expert_parallel_size": 2}


def modules(*names: str) -> dict[str, Any]:
    return {"recompute": Recompute(granularity="selective", modules=names)}  # type: ignore[arg-type]


QWEN = {**LLAMA, "query_key_norm": "head"}
AHEAD = {**LLAMA, "num_nextn_predict_layers": 1}
AHEAD_SPARSE = {**DEEPSEEK, "num_nextn_predict_layers": 1}
SERIAL = {"overlap": OverlapSpec(data_parallel=False)}

SINGLE: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt-micro-batch-2": {"parallel": {"micro_batch_size": 2}},
    "gpt-selective": {"parallel": {"recompute": "selective"}},
    "gpt-full": {"parallel": {"recompute": "full"}},
    "gpt-block": {"parallel": {"recompute": BLOCK}},
    "gpt-unfused": {"training": {"attention": "unfused"}},
    "gpt-fused-loss": {"training": {"cross_entropy": "fused"}},
    "gpt-bf16": {"training": {"precision": "bf16"}},
    "gpt-fp16": {"training": {"precision": "fp16"}},
    "llama": {"model": LLAMA},
    "llama-modules": {"model": LLAMA, "parallel": modules("mlp", "layernorm")},
    "qwen": {"model": QWEN},
    "moe": {"model": MOE},
    "moe-bf16": {"model": MOE, "training": {"precision": "bf16"}},
    "latent": {"model": LATENT},
    "deepseek": {"model": DEEPSEEK},
    "deepseek-modules": {
        "model": DEEPSEEK,
        "parallel": modules("core_attn", "layernorm", "mla_up_proj", "shared_experts"),
    },
    "deepseek-experts": {"model": DEEPSEEK, "parallel": modules("moe", "mlp")},
    "three": {"model": THREE},
    "ahead": {"model": AHEAD},
    "sparse": {"model": AHEAD_SPARSE},
    "six": {"model": SIX},
    "dropout": {"training": DROPOUT},
    "dropout-selective": {"training": DROPOUT, "parallel": {"recompute": "selective"}},
    "dropout-full": {"training": DROPOUT, "parallel": {"recompute": "full"}},
}
DOUBLE: dict[str, dict[str, Any]] = {
    "gpt-tp2": {"parallel": TP2},
    "gpt-tp2-sp": {"parallel": TP2_SP},
    "gpt-tp2-sp-selective": {
        "parallel": {**TP2_SP, "recompute": "selective"},
        "training": {"attention": "unfused"},
    },
    "gpt-pp2": {"parallel": PP2},
    "gpt-pp2-full": {"parallel": {**PP2, "recompute": "full"}},
    "gpt-pp2-v2": {"parallel": PP2_V2},
    "three-pp2": {"model": THREE, "parallel": PP2},
    "six-pp2-v4": {"model": SIX, "parallel": {**PP2, "virtual_pipeline_parallel_size": 4}},
    "gpt-dp2": {"parallel": DP2},
    "gpt-dp2-zero0": {"parallel": {**DP2, "zero_stage": 0}},
    "llama-tp2-sp": {"model": LLAMA, "parallel": TP2_SP, "breakdown": True},
    "qwen-tp2": {"model": QWEN, "parallel": TP2},
    "qwen-tp2-sp": {"model": QWEN, "parallel": TP2_SP},
    "gpt-dp2-serial": {"parallel": DP2, "training": SERIAL},
    "gpt-dp2-zero0-serial": {"parallel": {**DP2, "zero_stage": 0}, "training": SERIAL},
    "ahead-pp2": {"model": AHEAD, "parallel": PP2},
    "ahead-tp2-sp": {"model": AHEAD, "parallel": TP2_SP},
    "ahead-dp2": {"model": AHEAD, "parallel": DP2},
    "sparse-pp2-v2": {"model": AHEAD_SPARSE, "parallel": PP2_V2},
    "sparse-tp2-sp-ep2": {"model": AHEAD_SPARSE, "parallel": {**EP2, **TP2_SP}},
    "balanced-dp2-ep2": {"model": MOE, "parallel": {**EP2, **DP2}, "balanced_routing": True},
    "gpt-cp2": {"parallel": CP2},
    "llama-cp2": {"model": LLAMA, "parallel": CP2},
    "moe-ep2": {"model": MOE, "parallel": {**EP2, **DP2}},
    "moe-ep2-allgather": {
        "model": MOE,
        "parallel": {**EP2, **DP2, "moe_token_dispatcher_type": "allgather"},
    },
    "moe-tp2-sp-ep2": {"model": MOE, "parallel": {**EP2, **TP2_SP}},
    "moe-tp2-sp-etp2": {"model": MOE, "parallel": {**TP2_SP, "expert_tensor_parallel_size": 2}},
    "latent-cp2": {"model": LATENT, "parallel": CP2},
    "latent-tp2-sp": {"model": LATENT, "parallel": TP2_SP},
    "deepseek-pp2": {"model": DEEPSEEK, "parallel": PP2},
    "deepseek-tp2-sp-ep2": {"model": DEEPSEEK, "parallel": {**EP2, **TP2_SP}},
    "llama-pp2-v2-block": {"model": LLAMA, "parallel": {**PP2_V2, "recompute": BLOCK}},
    "gpt-bf16-tp2-sp": {"training": {"precision": "bf16"}, "parallel": TP2_SP},
    "gpt-bf16-pp2-v2": {"training": {"precision": "bf16"}, "parallel": PP2_V2},
    "hopeless": {"parallel": TP2, "steps": 10_000, "longest_step_s": 1e-9},
}


FEW = {
    "gpt",
    "gpt-micro-batch-2",
    "gpt-full",
    "gpt-bf16",
    "llama",
    "llama-modules",
    "moe",
    "deepseek",
    "deepseek-modules",
    "sparse",
    "dropout",
    "dropout-selective",
    "dropout-full",
    "gpt-tp2-sp",
    "gpt-tp2-sp-selective",
    "gpt-pp2-v2",
    "gpt-dp2",
    "gpt-dp2-zero0-serial",
    "llama-tp2-sp",
    "sparse-pp2-v2",
    "sparse-tp2-sp-ep2",
    "balanced-dp2-ep2",
    "llama-cp2",
    "moe-ep2",
    "moe-tp2-sp-etp2",
    "llama-pp2-v2-block",
    "gpt-bf16-tp2-sp",
    "hopeless",
}
"""One of each way to divide, recompute and round; all are `long`."""


def run(names: Collection[str], *, folders: pytest.TempPathFactory) -> dict[str, Measurement]:
    """One torchrun for each number of processes."""
    measurements = {}
    for processes, cases in ((1, SINGLE), (2, DOUBLE)):
        some = {name: case for name, case in cases.items() if name in names}
        measurements |= run_together(
            folders.mktemp(f"ranks-{processes}"), processes=processes, cases=some
        )
    return measurements


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    return run(FEW, folders=tmp_path_factory)


@pytest.fixture(scope="module")
def all_measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    return run({*SINGLE, *DOUBLE}, folders=tmp_path_factory)


def compared(names: Collection[str]) -> list[str]:
    """Those whose losses are the undivided model's."""
    return [
        name
        for name in (*SINGLE, *DOUBLE)
        if name in names and not name.startswith(("dropout", "balanced", "hopeless"))
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", compared({*SINGLE, *DOUBLE}))
def test_losses_depend_on_no_division(all_measured: dict[str, Measurement], name: str) -> None:
    agree(all_measured, name)


@pytest.mark.parametrize("name", compared(FEW))
def test_losses_do_not_depend_on_the_division(measured: dict[str, Measurement], name: str) -> None:
    agree(measured, name)


def agree(measured: dict[str, Measurement], name: str) -> None:
    undivided = measured[name.partition("-")[0]]
    tolerance = 2e-3 if "bf16" in name or "fp16" in name else 1e-5
    assert measured[name].losses == pytest.approx(undivided.losses, rel=tolerance)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_draws_the_same_dropout(
    measured: dict[str, Measurement], recompute: str
) -> None:
    assert measured[f"dropout-{recompute}"].losses == measured["dropout"].losses
    assert measured["dropout"].losses != pytest.approx(measured["gpt"].losses, rel=1e-5)


def test_training_lowers_the_loss_from_that_of_a_guess(measured: dict[str, Measurement]) -> None:
    for measurement in measured.values():
        first, *_, last = measurement.losses
        assert first == pytest.approx(5.55, abs=0.1)  # ln 256
        assert last < first


def test_a_measurement_is_complete(measured: dict[str, Measurement]) -> None:
    found = measured["gpt-tp2-sp"]
    assert found.status == "ok"
    assert len(found.step_times_s) == 2 and len(found.losses) == 3
    assert found.step_s is not None and min(found.step_times_s) <= found.step_s <= max(
        found.step_times_s
    )
    assert found.tokens_per_second_per_gpu == pytest.approx(4 * 32 / found.step_s / 2)
    assert len(found.peak_memory_bytes_per_rank) == 2 and min(found.peak_memory_bytes_per_rank) > 0
    assert found.peak_memory_source == "resident_set_growth"
    assert found.hardware is not None and (found.hardware.gpu, found.hardware.num_gpus) == (
        "cpu",
        2,
    )
    assert {"torch", "megatron-core", "python"} <= found.versions.keys()


def test_a_step_is_taken_apart_on_request(measured: dict[str, Measurement]) -> None:
    assert measured["gpt-tp2-sp"].breakdown_s is None
    found = measured["llama-tp2-sp"].breakdown_s
    assert found is not None and {"compute", "all_gather", "all_reduce", "idle"} <= found.keys()
    assert found["compute"] > 0 and min(found.values()) >= 0
    assert sum(found.values()) > 0.5 * min(measured["llama-tp2-sp"].step_times_s)


def test_a_hopeless_run_ends_after_one_step_and_says_so(measured: dict[str, Measurement]) -> None:
    found = measured["hopeless"]
    assert found.status == "ok"
    assert len(found.step_times_s) == 1 and found.step_s == found.step_times_s[0]
    assert "stopped after 1 of 10000 steps" in (found.cause or "")
