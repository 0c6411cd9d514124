"""Every export says each field, or refuses it by name: none is dropped in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

import hp_tool
from hp_tool.domain.result import Estimate
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import read_configuration
from hp_tool.formats.exchange.export import export
from hp_tool.formats.registry import get_format, writable
from hp_tool.questions.answers import answer_recommend
from hp_tool.questions.schema import parse_query, to_json
from tests.formats.cases import setup_of

DENSE = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "virtual_pipeline_parallel_size": 1,
    "context_parallel_size": 2,
    "micro_batch_size": 1,
    "sequence_parallel": True,
    "recompute": "none",
    "zero_stage": 1,
}
EXPERTS = DENSE | {
    "context_parallel_size": 1,
    "expert_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
}
PLAIN = DENSE | {"context_parallel_size": 1, "pipeline_parallel_size": 1, "recompute": "none"}
OF: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "torchtitan": ("llama-3-8b", {"framework": "torch-fsdp"}, PLAIN | {"zero_stage": 3}),
    "torchtitan-python": (
        "llama-3-8b",
        {"framework": "torch-fsdp"},
        PLAIN
        | {
            "zero_stage": 3,
            "context_parallel_size": 2,
            "context_parallel_communication": "all_gather",
        },
    ),
    "accelerate": (
        "llama-3-8b",
        {"framework": "torch-fsdp"},
        PLAIN | {"zero_stage": 3, "sequence_parallel": False},
    ),
    **{
        name: (
            "llama-3-8b",
            {"framework": "hf-trainer", "parameter_precision": "fp32"} | loss,
            PLAIN | {"zero_stage": 3, "tensor_parallel_size": 1},
        )
        for name, loss in (
            ("trl", {"cross_entropy": "chunked"}),
            ("axolotl", {}),
            ("llama-factory", {}),
        )
    },
    "deepspeed": (
        "llama-3-8b",
        {"framework": "deepspeed"},
        PLAIN | {"tensor_parallel_size": 1, "sequence_parallel": False},
    ),
    "nanotron": ("llama-3-8b", {"framework": "nanotron"}, DENSE | {"context_parallel_size": 1}),
    "verl": ("llama-3-8b", {}, DENSE),
}
"""Model, training and parallel that a tool can run; those of Megatron by default."""
SHARDED = PLAIN | {"zero_stage": 3, "tensor_parallel_size": 1, "sequence_parallel": False}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    *((format, *case) for format, case in OF.items()),
    *((format, "llama-3-8b", {}, DENSE) for format in writable("training") if format not in OF),
    *((format, "mixtral-8x7b", {}, EXPERTS) for format in writable("training") if format not in OF),
    *(
        (
            format,
            "qwen3-30b-a3b",
            trained | ({"cross_entropy": "chunked"} if format == "trl" else {}),
            SHARDED,
        )
        for trained, formats in (
            ({"framework": "torch-fsdp"}, ("torchtitan-python", "accelerate", "verl")),
            (
                {"framework": "hf-trainer", "parameter_precision": "fp32"},
                ("trl", "axolotl", "llama-factory"),
            ),
        )
        for format in formats
    ),
    ("verl", "llama-3-8b", {"framework": "torch-fsdp"}, SHARDED),
]
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("training", {}, {"precision": "fp16"}),
    ("training", {"precision": "fp8"}, {"fp8_recipe": "blockwise"}),
    ("training", {}, {"gradient_precision": "bf16"}),
    ("training", {}, {"optimizer_precision": "bf16"}),
    ("training", {}, {"exp_avg_sq_precision": "fp8"}),
    ("training", {}, {"master_precision": "fp16"}),
    ("training", {}, {"attention": "unfused"}),
    ("training", {}, {"kernel_fusion": False}),
    ("training", {}, {"optimizer": "sgd"}),
    ("training", {}, {"cross_entropy": "fused"}),
    ("training", {}, {"cross_entropy": "in_place"}),
    ("training", {}, {"offload": "optimizer"}),
    ("training", {"offload": "optimizer"}, {"offload_fraction": 0.5}),
    ("training", {}, {"offload": "activations"}),
    ("training", {}, {"cuda_graphs": True}),
    ("training", {"cuda_graphs": True}, {"cuda_graph_modules": ["attn"]}),
    ("training", {}, {"overlap": {"data_parallel": False}}),
    ("training", {}, {"gradient_reduction": "run"}),
    ("training", {}, {"gated_product": "recomputed"}),
    ("training", {}, {"task": "sft"}),
    ("training", {}, {"expert_capacity_factor": 1.25}),
    ("parallel", {}, {"virtual_pipeline_parallel_size": 2}),
    ("parallel", {}, {"recompute": "full"}),
    ("parallel", {}, {"recompute": {"granularity": "full", "method": "block", "num_layers": 3}}),
    (
        "parallel",
        {"recompute": "full"},
        {"recompute": {"granularity": "full", "method": "block", "num_layers": 3}},
    ),
    ("parallel", {"recompute": "full"}, {"recompute": {"granularity": "full", "num_layers": 2}}),
    ("parallel", {}, {"recompute": {"granularity": "selective", "modules": ["layernorm"]}}),
    ("parallel", {}, {"tensor_parallel_size": 4}),
    ("parallel", {}, {"pipeline_parallel_size": 4}),
    ("parallel", {}, {"context_parallel_size": 4}),
    ("parallel", {}, {"expert_parallel_size": 4}),
    ("parallel", {}, {"data_parallel_shard_size": 2}),
    ("parallel", {}, {"zero_stage": 0}),
    ("parallel", {}, {"rank_order": "tp-cp-ep-pp-dp"}),
    ("parallel", {}, {"pipeline_layout": "Et*15|t*17L"}),
    ("parallel", {}, {"context_parallel_communication": "a2a"}),
    ("parallel", {}, {"expert_tensor_parallel_size": 2}),
    ("parallel", {}, {"moe_token_dispatcher_type": "allgather"}),
]
IN_THE_SCRIPT = {
    ("accelerate", "attention"),
    ("deepspeed", "attention"),
    ("verl", "attention"),
    ("deepspeed", "overlap"),
    ("trl", "task"),
}
"""What the tool leaves to the training script, which the file does not start."""


def test_no_field_is_dropped_in_silence(subtests: pytest.Subtests) -> None:
    for format, model, training, parallel in CASES:
        with subtests.test(format=str(format), model=str(model)):
            dropped, written, rejected = [], 0, ""
            for section, before, change in CHANGES:
                texts = []
                for changes in (before, before | change):
                    query = {
                        "kind": "training",
                        "model": model,
                        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 32},
                        "training": {"sequence_length": 8192, "global_batch_size": 128} | training,
                        "parallel": dict(parallel),
                    }
                    query[section] = query[section] | changes  # type: ignore[operator]
                    try:
                        texts.append(get_format(format).write(setup_of(query)))
                    except (UnsupportedError, InputError) as error:
                        rejected = str(error)
                        texts.append("")
                name, written = next(iter(change)), written + bool(texts[0])
                idle = name.startswith(("expert_", "moe_")) and model == "llama-3-8b"
                idle |= (
                    name == "context_parallel_communication"
                    and parallel["context_parallel_size"] == 1
                )
                if (
                    texts[0]
                    and not idle
                    and texts[0] == texts[1]
                    and (format, name) not in IN_THE_SCRIPT
                ):
                    dropped.append(change)
            assert written, f"{format} writes no layout of this test, see OF: {rejected}"
            assert not dropped, f"{format} writes the same file with and without {dropped}"


def test_the_offload_that_a_search_chose_is_exported() -> None:
    query = {
        "kind": "training",
        "model": "llama-3-70b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 16},
        "training": {"sequence_length": 8192, "global_batch_size": 128},
    }
    parallel = DENSE | {"tensor_parallel_size": 8, "context_parallel_size": 1}
    row = {"parallel": parallel, "set": {"training.offload": "optimizer"}}
    result = {"query": query, "recommendations": [row]}
    assert "--optimizer-cpu-offload" in export(result=result, format="megatron-lm")
    assert "optimizer.optimizer_cpu_offload=true" in export(result=result, format="nemo")
    assert "--optimizer-cpu-offload" not in export(
        result=result | {"recommendations": [row | {"set": {}}]}, format="megatron-lm"
    )


def test_an_export_states_the_settings_that_its_ranking_assumes() -> None:
    """Rank 1 of a mixture assumes today's recipe; without it, it may not fit."""
    query = {
        "kind": "training",
        "model": "deepseek-v3",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 256},
        "training": {"sequence_length": 4096, "global_batch_size": 512},
    }
    answer = json.loads(to_json(answer_recommend(parse_query(query), top=1)))
    (row,) = answer["recommendations"]
    assert row["estimate"]["provenance"]["usual"]["set"] and not row["set"]
    script = export(result=answer, format="megatron-lm")
    assert "--grad-reduce-in-bf16" in script and "--exp-avg-dtype bf16" in script
    read = read_configuration(script, format=None, overrides={"cluster.gpu": "h100-sxm-80gb"}).query
    again = hp_tool.estimate(read).estimate
    assert isinstance(again, Estimate)
    assert again.time is not None and again.memory is not None
    assert again.time.step_s == pytest.approx(row["estimate"]["time"]["step_s"], rel=1e-9)
    assert again.memory.total_bytes == pytest.approx(row["estimate"]["memory"]["total_bytes"])
