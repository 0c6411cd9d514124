"""What follows a ranking: `export` writes the format of the query's framework, and `import` reads
the log of whatever a script starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_tool.catalog.models import published_precision
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.result import Faster
from hp_tool.wording.familiarity import faster_words

Run = Callable[..., Any]
QUERY = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 2048, "global_batch_size": 16},
}
SERVED = {
    "kind": "inference",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1},
    "inference": {"input_length": 100, "output_length": 100, "concurrency": 4},
}


@pytest.mark.parametrize(
    ("query", "written"),
    [
        (QUERY, "# Megatron-LM"),
        (
            QUERY
            | {
                "training": QUERY["training"]
                | {"framework": "hf-trainer", "cross_entropy": "chunked"}
            },
            "# TRL",
        ),  # type: ignore[operator]
        (QUERY | {"training": QUERY["training"] | {"framework": "torch-fsdp"}}, "torchtitan"),  # type: ignore[operator]
        (SERVED, "vllm serve"),
        (SERVED | {"inference": SERVED["inference"] | {"engine": "sglang"}}, "sglang"),  # type: ignore[operator]
    ],
    ids=["megatron", "trainer", "fsdp", "vllm", "sglang"],
)
def test_a_result_is_written_for_its_own_framework(
    entry_point: Run, tmp_path: Path, query: dict[str, Any], written: str
) -> None:
    file = tmp_path / "query.json"
    file.write_text(json.dumps(query))
    shown = entry_point("export", str(file))
    assert shown.returncode == 0 and written in shown.stdout, shown.stderr


def test_a_framework_without_a_format_is_named(entry_point: Run, tmp_path: Path) -> None:
    file = tmp_path / "query.json"
    training = {**QUERY["training"], "framework": "torchtune"}  # type: ignore[dict-item]
    file.write_text(json.dumps(QUERY | {"training": training}))
    shown = entry_point("export", str(file))
    assert shown.returncode == 2 and "no export format for torchtune" in shown.stderr


@pytest.mark.parametrize(
    "line",
    [
        "{'train_samples_per_second': 4.0, 'train_steps_per_second': 0.25}",
        "[INFO] [timer.py:260:stop] epoch=0/micro_step=8/global_step=8, "
        "RunningAvgSamplesPerSec=4.0, CurrSamplesPerSec=4.0, MemAllocated=20.0GB, "
        "MaxMemAllocated=40.0GB",
    ],
    ids=["trainer", "deepspeed"],
)
def test_a_script_of_accelerates_has_either_log(
    entry_point: Run, tmp_path: Path, line: str
) -> None:
    script, log = tmp_path / "run.sh", tmp_path / "run.log"
    script.write_text(
        "accelerate launch --use_fsdp --fsdp_version 2 --mixed_precision bf16 --num_processes 8 "
        "-m trl.scripts.sft --model_name_or_path meta-llama/Meta-Llama-3-8B "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_length 2048\n"
    )
    log.write_text(line + "\n")
    shown = entry_point(
        "import", str(script), "--log", str(log), "--gpu", "h100-sxm-80gb", "--json"
    )
    assert json.loads(shown.stdout)["logged"]["step_s"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("qwen2.5-72b-awq", "int4"),
        ("llama-3.1-8b-gptq", "int4"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "int4"),
        ("llama-3.1-70b-fp8", "fp8"),
        ("llama-3.1-8b", "bf16"),
    ],
)
def test_the_format_in_a_models_name_is_its_precision(name: str, precision: str) -> None:
    assert published_precision(name) == precision


def test_a_layout_that_nobody_measured_is_told_by_what_differs() -> None:
    best = ParallelConfig(context_parallel_size=2, data_parallel_size=4)
    other = ParallelConfig(
        context_parallel_size=2, data_parallel_size=4, context_parallel_communication="all_gather"
    )
    name = "parallel.context_parallel_communication"
    faster = Faster(parallel=other, unmeasured=(name,), expected_step_s=1.0, gain_fraction=0.011)
    assert faster_words(faster, than=best) == (
        "Possibly 1.1% faster than rank 1, but not validated (no published run uses it): "
        f"{name} all_gather"
    )


def test_set_changes_the_exported_query_and_result(entry_point: Run, tmp_path: Path) -> None:
    file = tmp_path / "query.json"
    layout = {"parallel": {"tensor_parallel_size": 2, "micro_batch_size": 1}}
    file.write_text(json.dumps(QUERY | layout))
    options = ("--set", "training.global_batch_size=32", "--set", "parallel.zero_stage=0")
    shown = entry_point("export", str(file), "--format", "megatron-lm", *options)
    assert shown.returncode == 0, shown.stderr
    assert "--global-batch-size 32" in shown.stdout
    assert "--use-distributed-optimizer" not in shown.stdout
    file.write_text(entry_point("estimate", str(file), "--json").stdout)
    again = entry_point("export", str(file), *options)
    assert "--global-batch-size 32" in again.stdout and again.returncode == 0, again.stderr
    assert "--tensor-model-parallel-size 2" in again.stdout
    assert "--use-distributed-optimizer" not in again.stdout
