"""The plain-torch engine: every way of dividing a model trains the same model, and what it does not
run is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from hp_tool.cluster.profiler.support import check_training
from hp_tool.domain.measurement import Measurement
from hp_tool.errors import InputError, UnsupportedError
from tests.profiler.requests import LLAMA, MOE, request
from tests.profiler.together import run_together


def fsdp(*, parallel: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A request's changes for this engine: ZeRO 3 unless said otherwise."""
    training = {"framework": "torch-fsdp", **changes.pop("training", {})}
    return {"parallel": {"zero_stage": 3, **(parallel or {})}, "training": training, **changes}


QWEN = {**LLAMA, "query_key_norm": "head"}
THREE = {**LLAMA, "num_hidden_layers": 3}
TP2 = {"tensor_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_parallel_size": 2}
DP2 = {"data_parallel_size": 2}
SINGLE = {
    "gpt": fsdp(),
    "gpt-per_op": fsdp(parallel={"recompute": "per_op"}),
    "gpt-bf16": fsdp(training={"precision": "bf16"}),
    "llama": fsdp(model=LLAMA),
    "llama-per_layer": fsdp(
        model=LLAMA, parallel={"recompute": "per_layer", "micro_batch_size": 2}
    ),
    "qwen": fsdp(model=QWEN),
    "three": fsdp(model=THREE),
}
DOUBLE = {
    "gpt-dp2": fsdp(parallel=DP2),
    "gpt-tp2": fsdp(parallel=TP2),
    "gpt-tp2-sp": fsdp(parallel=TP2_SP),
    "llama-dp2-zero2": fsdp(model=LLAMA, parallel={**DP2, "zero_stage": 2}),
    "llama-hsdp": fsdp(model=LLAMA, parallel={**DP2, "data_parallel_shard_size": 1}),
    "llama-tp2-per_op": fsdp(model=LLAMA, parallel={**TP2, "recompute": "per_op"}),
    "llama-pp2": fsdp(model=LLAMA, parallel=PP2),
    "llama-pp2-v2": fsdp(model=LLAMA, parallel={**PP2, "virtual_pipeline_parallel_size": 2}),
    "three-pp2": fsdp(model=THREE, parallel=PP2),
    "qwen-tp2-sp": fsdp(model=QWEN, parallel=TP2_SP, breakdown=True),
}


FEW = ("gpt", "gpt-per_op", "llama", "qwen", "gpt-dp2", "llama-hsdp", "llama-pp2-v2", "qwen-tp2-sp")
"""One of each way to divide; all are `long`."""


def run(names: Collection[str], *, folders: pytest.TempPathFactory) -> dict[str, Measurement]:
    """One torchrun for each number of processes."""
    measurements = {}
    for processes, cases in ((1, SINGLE), (2, DOUBLE)):
        some = {name: case for name, case in cases.items() if name in names}
        measurements |= run_together(
            folders.mktemp(f"native-{processes}"), processes=processes, cases=some
        )
    return measurements


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    return run(FEW, folders=tmp_path_factory)


@pytest.fixture(scope="module")
def all_measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    return run({*SINGLE, *DOUBLE}, folders=tmp_path_factory)


@pytest.mark.components
@pytest.mark.long
@pytest.mark.parametrize("name", [*SINGLE, *DOUBLE])
def test_losses_depend_on_no_division(all_measured: dict[str, Measurement], name: str) -> None:
    agree(all_measured, name)


@pytest.mark.components
@pytest.mark.parametrize("name", FEW)
def test_losses_do_not_depend_on_the_division(measured: dict[str, Measurement], name: str) -> None:
    agree(measured, name)


def agree(measured: dict[str, Measurement], name: str) -> None:
    undivided = measured[name.partition("-")[0]]
    assert measured[name].losses == pytest.approx(
        undivided.losses, rel=2e-3 if "bf16" in name else 1e-5
    )
    first, *_, last = measured[name].losses
    assert first == pytest.approx(5.55, abs=0.1)  # ln 256
    assert last < first


@pytest.mark.components
def test_a_measurement_is_complete(measured: dict[str, Measurement]) -> None:
    found = measured["qwen-tp2-sp"]
    assert found.status == "ok" and len(found.step_times_s) == 2 and len(found.losses) == 3
    assert found.tokens_per_second_per_gpu == pytest.approx(4 * 32 / (found.step_s or 0.0) / 2)
    assert len(found.peak_memory_bytes_per_rank) == 2 and min(found.peak_memory_bytes_per_rank) > 0
    parts = found.breakdown_s
    assert (
        parts is not None and {"compute", "idle"} < parts.keys()
    )  # and what gloo calls its collectives
    assert parts["compute"] > 0 and sum(parts.values()) > 0.5 * min(found.step_times_s)


@pytest.mark.parametrize("case", [*SINGLE.values(), *DOUBLE.values()])
def test_what_it_runs(case: dict[str, Any]) -> None:
    check_training(request(**case))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (fsdp(model=MOE), "num_experts"),
        (fsdp(training={"dropout": 0.1}), "training.dropout: .* under torch-fsdp"),
        (fsdp(training={"precision": "fp16"}), "precision: fp16 under torch-fsdp"),
        (
            fsdp(training={"precision": "bf16", "parameter_precision": "bf16"}),
            "parameter_precision: bf16",
        ),
        (fsdp(training={"attention": "unfused"}), "attention: unfused"),
        (fsdp(training={"cross_entropy": "fused"}), "cross_entropy: fused"),
        (fsdp(parallel={"zero_stage": 1}), "zero_stage: 1 under torch-fsdp"),
        (fsdp(parallel={"recompute": "full"}), "recompute: full"),
        (fsdp(parallel=PP2), "a pipeline whose ends share their weight"),
        (
            fsdp(
                parallel={
                    "context_parallel_size": 2,
                    "context_parallel_communication": "all_gather",
                }
            ),
            "parallel.context_parallel_size: 2",
        ),
    ],
)
def test_what_it_does_not_run(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_training(request(**changes))


def test_shards_divide_the_replicas() -> None:
    with pytest.raises(InputError, match="not divisible by data_parallel_shard_size 3"):
        check_training(
            request(**fsdp(parallel={"data_parallel_size": 2, "data_parallel_shard_size": 3}))
        )
