"""Readers of served runs: one replica, pools apart, queued requests; and the scatter that their
fits leave.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy.fit_experts import (
    JOINT,
    fit,
    left_out,
    moe_runs,
    predict_runs,
    prepare_batches,
    runs_without_drafts,
    with_scatter,
)
from benchmarks.accuracy.serving_runs import (
    ServingRun,
    later_runs,
    log_ratios,
    pool_runs,
    queued_runs,
)
from hp_tool.domain.engines import ExpertEfficiency
from hp_tool.domain.serving import ServingConfig

SERVED = {
    "table": "inference_measured_2",
    "source": "a report",
    "engine": "sglang",
    "engine_version": "0.5.9",
    "model": "deepseek-ai/DeepSeek-R1",
    "gpu": "h200-sxm-141gb",
    "disaggregated": "false",
    "input_length": "1024",
    "output_length": "1024",
    "concurrency": "16",
    "tensor_parallel_size": "8",
    "pipeline_parallel_size": "1",
    "expert_parallel_size": "1",
    "precision": "fp8",
    "ttft_s": "0.2859",
    "tpot_s": "0.01663",
}
SIDES = (
    "replicas",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "attention_data_parallel_size",
    "expert_parallel_size",
)
APART = SERVED | {"disaggregated": "true"} | {name: "" for name in SERVED if "parallel" in name}
QUEUED = {
    "table": "inference_trtllm_throughput",
    "source": "a report",
    "engine": "trtllm",
    "engine_version": "0.17",
    "gpu": "h200-sxm-141gb",
    "model": "mixtral-8x7b",
    "precision": "fp8",
    "kv_cache_precision": "fp8",
    "tensor_parallel_size": "2",
    "pipeline_parallel_size": "1",
    "input_length": "128",
    "output_length": "2048",
    "concurrency": "3000",
    "output_tokens_per_second_per_gpu": "14792",
}


def apart(prefill: tuple[str, ...], decode: tuple[str, ...], **changes: str) -> dict[str, str]:
    sides = {"prefill": prefill, "decode": decode}
    named = {
        f"{side}_{name}": value
        for side, values in sides.items()
        for name, value in zip(SIDES, values, strict=True)
    }
    return APART | named | changes


def write(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    (folder / "serving").mkdir()
    with (folder / "serving" / name).open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)


def test_rows_become_runs_of_one_replica_and_pools_that_are_listed_twice_count_once(
    tmp_path: Path,
) -> None:
    four_bits = SERVED | {
        "engine": "vllm",
        "model": "openai/gpt-oss-120b",
        "precision": "mxfp4",
    }
    told = apart(
        ("1", "8", "1", "1", "1"),
        ("1", "1", "1", "8", "8"),
        model="deepseek-ai/DeepSeek-V3",
        tpot_s="0.042734520",
    )
    untold = apart(("", "8", "1", "1", "1"), ("", "8", "1", "1", "8"), tpot_s="0.04273452")
    write(tmp_path, "closed_load.csv", [SERVED, four_bits, untold, told])
    runs = later_runs(tmp_path)
    assert [run.precision for run in runs] == ["fp8", "mxfp4"] and runs[1].concurrency == 16
    assert runs[0].config == ServingConfig(tensor_parallel_size=8) and runs[
        0
    ].tpot_s == pytest.approx(0.01663)
    (pools,) = pool_runs(tmp_path)
    assert (
        pools.replicas == (1, 1)
        and pools.decode.attention_data_parallel_size == pools.decode.expert_parallel_size == 8
    )


def test_runs_of_a_public_script_have_what_it_sets(tmp_path: Path) -> None:
    untold = SERVED | {
        "engine": "trtllm",
        "engine_version": "",
        "tensor_parallel_size": "4",
        "gpu": "b200-sxm-180gb",
        "client": "inferencemax",
    }
    others = [
        {"tensor_parallel_size": "8"},
        {"output_length": "8192"},
        {"engine_version": "1.0.0rc3"},
    ]
    write(tmp_path, "closed_load.csv", [untold, *(untold | other for other in others)])
    assert [run.batch_wait_iterations for run in later_runs(tmp_path)] == [20.0, 0.0, 0.0, 0.0]
    assert [run.version for run in later_runs(tmp_path)] == ["1.1", "1.1", "1.1", "1.0.0rc3"]


def test_lengths_are_the_means_that_a_client_draws(tmp_path: Path) -> None:
    client = SERVED | {"client": "inferencemax"}
    parallel = {"attention_data_parallel_size": "8", "tensor_parallel_size": "1"}
    write(tmp_path, "closed_load.csv", [client, SERVED, client | parallel])
    drawn, other, groups = later_runs(tmp_path)
    assert (drawn.input_length, drawn.output_length, drawn.equal_lengths) == (922, 922, False)
    assert other.input_length == 1024 and other.equal_lengths
    assert groups.num_gpus == groups.config.attention_data_parallel_size == 8


def test_runs_that_drafted_and_layouts_in_doubt_are_left_out() -> None:
    slow = synthetic(ExpertEfficiency())[0]
    doubtful = dataclasses.replace(
        slow,
        engine="vllm",
        config=ServingConfig(
            attention_data_parallel_size=4, expert_parallel_size=4, data_parallel_size=4
        ),
    )
    drafted = dataclasses.replace(slow, tpot_s=slow.tpot_s / 1.5)
    assert runs_without_drafts([slow, drafted, doubtful]) == [slow]


def test_queued_rows_have_their_throughput_and_number_formats(tmp_path: Path) -> None:
    write(tmp_path, "offline.csv", [QUEUED])
    (run,) = queued_runs(tmp_path)
    assert (run.gpu, run.config.tensor_parallel_size, run.throughput) == (
        "h200-sxm-141gb",
        2,
        14792.0,
    )


def synthetic(truth: ExpertEfficiency) -> list[ServingRun]:
    """Runs of two mixtures as a model with these constants has them."""
    asked = [
        ServingRun(
            engine="sglang",
            version="0.5.6.post2",
            model=model,
            gpu="h200-sxm-141gb",
            precision="fp8",
            input_length=length,
            output_length=512,
            concurrency=load,
            config=ServingConfig(tensor_parallel_size=8, expert_parallel_size=e),
            ttft_s=1.0,
            tpot_s=1.0,
        )
        for model in ("deepseek-v3", "qwen3-235b-a22b")
        for length in (512, 4096)
        for load in (1, 8, 64)
        for e in (1, 8)
    ]
    found = predict_runs(prepare_batches(asked), {JOINT: truth})
    return [dataclasses.replace(pair.run, ttft_s=pair.ttft_s, tpot_s=pair.tpot_s) for pair in found]


def test_a_fit_finds_what_made_its_runs_and_deviations_come_from_models_left_out() -> None:
    truth = ExpertEfficiency(
        grouped_slowdown=1.5, popularity_variance=1.5, prompt_layer_overhead_s=1e-4
    )
    runs = synthetic(truth)
    found = fit(runs)
    # Few runs: priors pull at what they leave open.
    assert (
        np.abs(log_ratios(predict_runs(prepare_batches(runs), {JOINT: found}), "tpot")).mean()
        < 0.02
    )
    assert 1.2 < found.grouped_slowdown < 1.8
    groups = left_out(runs, lambda run: run.model)
    assert set(groups) == {"deepseek-v3", "qwen3-235b-a22b"}
    profile = with_scatter(found, [pairs for _, pairs in groups.values()])
    worst = max(float(np.abs(log_ratios(pairs, "tpot")).max()) for _, pairs in groups.values())
    assert profile.tpot_log_sd > 0.0 and worst < 0.2


def test_a_folder_without_the_files_has_no_runs(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    assert moe_runs(tmp_path) == pool_runs(tmp_path) == queued_runs(tmp_path) == []
