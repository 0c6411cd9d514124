"""What `hp-tool export` prints is what the tool takes and what was predicted: processes, pipes,
files.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import Ended, hp_tool
from tests.conftest import skip_or_fail

CONTEXT_WORDS = {"p2p", "all_gather", "a2a", "a2a+p2p"}
"""What attn_forward_func_with_cp of Transformer Engine 2 takes
(attention/dot_product_attention/context_parallel.py).
"""
LONG = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
    "training": {"sequence_length": 32768, "global_batch_size": 32},
    "parallel": {
        "tensor_parallel_size": 2,
        "context_parallel_size": 4,
        "context_parallel_communication": "all_gather",
    },
}
BRIDGE = {
    "kind": "training",
    "model": "deepseek-v3",
    "cluster": {"gpu": "gb200-nvl72", "num_gpus": 256},
    "training": {
        "recipe": "megatron-bridge-26.08",
        "sequence_length": 4096,
        "global_batch_size": 2048,
    },
}


def run(*words: str, content: Any) -> Ended:
    return hp_tool(*words, stdin=content if isinstance(content, str) else json.dumps(content))


def exported(query: Any, format: str) -> str:
    ran = run("export", "-", "--format", format, content=query)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def imported(text: str, *words: str) -> dict[str, Any]:
    ran = run("import", "-", "--query", *words, content=text)
    assert ran.returncode == 0, ran.stderr
    query: dict[str, Any] = yaml.safe_load(ran.stdout)
    return query


@pytest.mark.parametrize("kind", sorted(CONTEXT_WORDS))
def test_context_parallelism_is_said_in_transformer_engines_words(kind: str) -> None:
    query = LONG | {"parallel": LONG["parallel"] | {"context_parallel_communication": kind}}  # type: ignore[operator]
    found = re.search(r"--cp-comm-type (\S+)", exported(query, "megatron-lm"))
    assert found is not None and found[1] == kind
    assert f"model.cp_comm_type={kind}" in exported(query, "nemo").splitlines()


@pytest.mark.parametrize("word", ["all_gather", "allgather"])
def test_context_parallelism_is_read_in_either_spelling(word: str) -> None:
    text = re.sub(r"--cp-comm-type \S+", f"--cp-comm-type {word}", exported(LONG, "megatron-lm"))
    assert (
        imported(text, "--gpu", "h100-sxm-80gb")["parallel"]["context_parallel_communication"]
        == "all_gather"
    )


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "llama-3-8b"])
def test_the_kernel_of_attention_is_left_to_transformer_engine(model: str) -> None:
    query = LONG | {"model": model, "parallel": {"tensor_parallel_size": 2}}
    query["training"] = {"sequence_length": 4096, "global_batch_size": 32}
    assert "--attention-backend auto" in exported(query, "megatron-lm")
    query["training"] |= {"attention": "unfused"}
    assert "--attention-backend unfused" in exported(query, "megatron-lm")


def test_an_answer_under_bridges_recipe_is_exported_to_bridge() -> None:
    text = exported(BRIDGE, "nemo")
    values = dict(word.lstrip("+").split("=", 1) for word in shlex.split(text, comments=True))
    states = {
        name: values[f"optimizer.{name}"]
        for name in ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")
    }
    assert states == {
        "use_precision_aware_optimizer": "true",
        "exp_avg_dtype": "torch.bfloat16",
        "exp_avg_sq_dtype": "torch.bfloat16",
    }
    # Gradients in bf16, as the recipe has them: mixed_precision is laid over ddp, and its named
    # recipes reduce in fp32.
    assert "grad_reduce_in_fp32:false" in values["mixed_precision"]


@pytest.mark.components
def test_bridges_words_are_fields_of_megatron_cores_optimizer() -> None:
    try:
        from megatron.core.optimizer import OptimizerConfig
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")
    import dataclasses

    import torch

    query = BRIDGE | {"model": "llama-3-8b", "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16}}
    query["training"] = {
        "sequence_length": 4096,
        "global_batch_size": 64,
        "optimizer_precision": "bf16",
        "exp_avg_sq_precision": "fp8",
        "master_precision": "fp16",
    }
    words = [
        word.removeprefix("optimizer.")
        for word in shlex.split(exported(query, "nemo"), comments=True)
        if word.startswith("optimizer.")
    ]
    values = dict(word.split("=", 1) for word in words)
    assert set(values) <= {field.name for field in dataclasses.fields(OptimizerConfig)}
    kinds = {
        name: getattr(torch, value.removeprefix("torch."))
        for name, value in values.items()
        if value.startswith("torch.")
    }
    assert kinds == {
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.uint8,
    }


def test_bridges_file_says_the_optimizers_precisions() -> None:
    file = {
        "model": {
            "_target_": "megatron.bridge.models.GPTModelProvider",
            "num_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "ffn_hidden_size": 14336,
            "num_query_groups": 8,
            "vocab_size": 128256,
            "tensor_model_parallel_size": 2,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "seq_length": 4096,
        },
        "train": {"micro_batch_size": 1, "global_batch_size": 64},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {
            "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
            "bf16": True,
            "grad_reduce_in_fp32": False,
        },
        "optimizer": {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "torch.bfloat16",
            "exp_avg_sq_dtype": {"_target_": "torch.uint8", "_call_": False},
        },
    }
    training = imported(yaml.safe_dump(file), "--gpu", "h100-sxm-80gb", "--num-gpus", "16")[
        "training"
    ]
    assert (training["optimizer_precision"], training["exp_avg_sq_precision"]) == ("bf16", "fp8")
    assert training["gradient_precision"] == "bf16"


RECOMPUTED: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3-8b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 8},
    "training": {"sequence_length": 4096, "global_batch_size": 64, "framework": "deepspeed"},
    "parallel": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "micro_batch_size": 1,
        "zero_stage": 3,
        "recompute": "full",
    },
}


def test_deepspeeds_file_says_what_makes_a_trainer_recompute() -> None:
    ran = run("export", "-", "--format", "deepspeed", content=RECOMPUTED)
    file = json.loads(ran.stdout)
    assert "activation_checkpointing" not in file  # a Trainer never looks at it
    assert "--gradient_checkpointing" in ran.stderr and "--gradient_checkpointing" in json.dumps(
        file
    )
    said = (
        "--gpu",
        "h100-sxm-80gb",
        "--num-gpus",
        "8",
        "--model",
        "llama-3-8b",
        "--set",
        "training.sequence_length=4096",
    )
    assert imported(ran.stdout, *said)["parallel"]["recompute"] == "full"
    kept = RECOMPUTED | {"parallel": RECOMPUTED["parallel"] | {"recompute": "none"}}
    assert (
        "gradient_checkpointing"
        not in run("export", "-", "--format", "deepspeed", content=kept).stderr
    )


def test_a_free_knob_that_a_format_cannot_say_is_left_out_with_a_word_on_its_price() -> None:
    megatron = {
        key: RECOMPUTED["training"][key] for key in ("sequence_length", "global_batch_size")
    }
    query = RECOMPUTED | {"training": megatron}
    query["parallel"] = RECOMPUTED["parallel"] | {"zero_stage": 1}
    answer = json.loads(run("recommend", "-", "--top", "1", "--json", content=query).stdout)
    assert answer["recommendations"][0]["set"]["training.cross_entropy"] == "fused"
    ran = run("export", "-", "--format", "verl", content=answer)
    (note,) = (line for line in ran.stderr.splitlines() if "training.cross_entropy" in line)
    step_s = answer["recommendations"][0]["estimate"]["time"]["step_s"]
    assert f"{step_s:.4g} s with it" in note and "without" in note
    said = query | {"training": megatron | {"cross_entropy": "fused"}}
    refused = run("export", "-", "--format", "verl", content=said)
    assert (
        refused.returncode == 2 and "training.cross_entropy" in refused.stderr
    )  # what a user asks for is never left out


@pytest.mark.long
def test_deepspeed_and_the_trainer_take_the_note(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    path = tmp_path / "ds.json"
    path.write_text(exported(RECOMPUTED, "deepspeed"), encoding="utf-8")
    program = (
        "import sys; from deepspeed.runtime import config; from accelerate.utils.deepspeed import "
        "HfDeepSpeedConfig\n"
        "config.dist.get_rank = lambda: 0; config.dist.get_world_size = lambda: 8\n"
        "print('read', config.DeepSpeedConfig(sys.argv[1]).train_batch_size, "
        "HfDeepSpeedConfig(sys.argv[1]).is_zero3())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert "read 64 True" in ran.stdout, ran.stderr


def test_a_trainer_does_not_recompute_by_deepspeeds_block(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": True},
                "activation_checkpointing": {"partition_activations": False},
            }
        )
    )
    script = (
        "torchrun --nproc-per-node 8 train.py --model_name_or_path meta-llama/Meta-Llama-3-8B "
        "--deepspeed ds.json"
        " --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_seq_length 4096"
    )
    said = ("--gpu", "h100-sxm-80gb", "--file", f"ds.json={tmp_path / 'ds.json'}")
    assert imported(script, *said)["parallel"]["recompute"] == "none"
    assert (
        imported(f"{script} --gradient_checkpointing true", *said)["parallel"]["recompute"]
        == "full"
    )
