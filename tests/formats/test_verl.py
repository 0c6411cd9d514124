"""verl's actor: which workers train it, what else changes its update, and what its overrides
express.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hp_tool
from hp_tool.errors import UnsupportedError
from hp_tool.formats.reading import hyphenated, look_up, table
from tests.formats.test_silent_readings import read

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("bridge_keys.json").read_text())[
    "verl"
]
GPU = ("--gpu", "h100-sxm-80gb")
ACTOR = "actor_rollout_ref.actor"
COMMAND = (
    "python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=1024 "
    "trainer.nnodes=3 "
    f"actor_rollout_ref.model.path=Qwen/Qwen3-8B {ACTOR}.ppo_mini_batch_size=64 "
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1 "
    "actor_rollout_ref.rollout.n=8"
)
SIZES = (
    f"{ACTOR}.megatron.tensor_model_parallel_size=4 {ACTOR}.megatron.pipeline_model_parallel_size=3"
)
FILE = """data: {max_prompt_length: 1024, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, use_fused_kernels: false}
  actor: {ppo_mini_batch_size: 64, ppo_micro_batch_size_per_gpu: 1,
    use_fused_kernels: "${oc.select:actor_rollout_ref.model.use_fused_kernels,false}",
    megatron: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 3}}
  rollout: {n: 8}
trainer: {nnodes: 3, n_gpus_per_node: 8}
"""


@pytest.mark.parametrize(
    "command",
    [
        f"{COMMAND} model_engine=megatron {SIZES}",
        f"{COMMAND} --config-name=ppo_megatron_trainer {SIZES}",
        f"{COMMAND} {ACTOR}.strategy=megatron {SIZES}",
        f"{COMMAND} model_engine=megatron {ACTOR}.strategy=megatron {SIZES}",
    ],
)
def test_megatrons_workers_are_read_with_their_sizes(tmp_path: Path, command: str) -> None:
    code, query, shown = read(tmp_path, "run.sh", f"{command}\n", *GPU)
    assert code in (0, 3), shown
    assert query["training"]["framework"] == "verl" and query["cluster"]["num_gpus"] == 24
    assert (
        query["parallel"]["tensor_parallel_size"] == 4
        and query["parallel"]["pipeline_parallel_size"] == 3
    )


@pytest.mark.parametrize(
    "defaults",
    ["[ppo_trainer, {override model_engine: megatron}, _self_]", "[ppo_megatron_trainer, _self_]"],
)
def test_a_file_chooses_the_workers_in_its_defaults(tmp_path: Path, defaults: str) -> None:
    text = f"defaults: {defaults}\n{FILE}"
    code, query, shown = read(tmp_path, "mine.yaml", text, *GPU, "--format", "verl")
    assert code in (0, 3), shown
    assert (
        query["training"]["framework"] == "verl" and query["parallel"]["tensor_parallel_size"] == 4
    )
    command = f"{COMMAND} --config-path=$PWD --config-name=mine actor_rollout_ref.rollout.n=16\n"
    code, query, shown = read(
        tmp_path, "run.sh", command, *GPU, "--file", str(tmp_path / "mine.yaml")
    )
    assert code in (0, 3), shown
    assert (
        query["parallel"]["pipeline_parallel_size"] == 3
        and query["training"]["global_batch_size"] == 64 * 16
    )


def test_a_file_of_ones_own_that_is_not_at_hand_is_asked_for(tmp_path: Path) -> None:
    code, _, shown = read(
        tmp_path, "run.sh", f"{COMMAND} --config-path=conf --config-name=mine\n", *GPU
    )
    assert code == 2 and "--file mine.yaml" in shown


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (f"model_engine=dp {SIZES}", "megatron.tensor_model_parallel_size 4"),
        (SIZES, "megatron.pipeline_model_parallel_size 3"),
        ("model_engine=torchtitan", "model_engine torchtitan"),
        ("model_engine=$ENGINE", "model_engine is $ENGINE"),
        ("model_engine=megatron ~actor_rollout_ref.actor.optim", "~actor_rollout_ref.actor.optim"),
        ("actor_rollout_ref.model.lora_adapter_path=/adapters", "lora_adapter_path"),
        ("actor_rollout_ref.model.lora_rank=32", "lora_rank"),
        ("actor_rollout_ref.model.lora.rank=32", "lora.rank"),
        ("actor_rollout_ref.model.lora.adapter_path=/adapters", "lora.adapter_path"),
        ("actor_rollout_ref.model.enable_activation_offload=True", "enable_activation_offload"),
        ("actor_rollout_ref.model.tiled_mlp.enabled=True", "tiled_mlp.enabled"),
        ("+actor_rollout_ref.model.override_config.num_hidden_layers=4", "num_hidden_layers"),
        (f"{ACTOR}.optim.optimizer=SGD", "optim.optimizer"),
        (f"{ACTOR}.fsdp_config.dtype=float16", "fsdp_config.dtype"),
        (f"{ACTOR}.fsdp_config.of_a_later_release=1", "of_a_later_release"),
        (f"model_engine=megatron +{ACTOR}.megatron.override_transformer_config.fp8=hybrid", "fp8"),
        (f"model_engine=megatron {ACTOR}.megatron.use_megatron_fsdp=True", "use_megatron_fsdp"),
        (f"{ACTOR}.use_dynamic_bsz=perhaps", "use_dynamic_bsz must be true or false"),
        ("trainer.nnodes=", "trainer.nnodes must be a whole number"),
    ],
)
def test_what_changes_the_update_is_refused_by_name(tmp_path: Path, more: str, named: str) -> None:
    code, _, shown = read(tmp_path, "run.sh", f"{COMMAND}\n", *GPU)
    assert code in (0, 3), shown
    code, _, shown = read(tmp_path, "run.sh", f"{COMMAND} {more}\n", *GPU)
    assert code == 2 and named in shown, shown


def test_ulysses_and_deepep_are_read_under_their_newer_names(tmp_path: Path) -> None:
    code, query, shown = read(
        tmp_path,
        "run.sh",
        f"{COMMAND} {ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2\n",
        *GPU,
    )
    assert code in (0, 3) and query["parallel"]["context_parallel_size"] == 2, shown
    more = (
        "model_engine=megatron "
        f"+{ACTOR}.megatron.override_transformer_config.moe_enable_deepep=True"
    )
    text = COMMAND.replace("Qwen3-8B", "Qwen3-30B-A3B").replace("nnodes=3", "nnodes=2")
    code, query, shown = read(tmp_path, "run.sh", f"{text} {more}\n", *GPU)
    assert code in (0, 3) and query["parallel"]["moe_token_dispatcher_type"] == "flex", shown


@pytest.mark.parametrize("release", RECORDED)
def test_each_key_of_the_actor_has_a_line_of_its_own(release: str) -> None:
    known = table("verl")
    keys = {
        key
        for keys in RECORDED[release].values()
        for key in keys
        if key.startswith((f"{ACTOR}.", "actor_rollout_ref.model."))
    }
    assert keys and [key for key in sorted(keys) if look_up(hyphenated(key), known) is None] == []
    for section in ("model", "actor", "actor.fsdp-config", "actor.megatron", "actor.optim"):
        assert look_up(f"actor-rollout-ref.{section}.of-a-later-release", known) is None


EXPERTS = {
    "kind": "training",
    "model": "qwen3-30b-a3b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"sequence_length": 4096, "global_batch_size": 512, "framework": "torch-fsdp"},
    "parallel": {"micro_batch_size": 1, "recompute": "per_layer", "zero_stage": 3},
}


@pytest.mark.parametrize(
    ("split", "field"),
    [
        ({"expert_parallel_size": 8, "pipeline_parallel_size": 1}, "parallel.expert_parallel_size"),
        ({"tensor_parallel_size": 2}, "parallel.tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size"),
    ],
)
def test_overrides_of_fsdps_workers_drop_no_degree(split: dict[str, int], field: str) -> None:
    query = {**EXPERTS, "parallel": {**EXPERTS["parallel"], **split}}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError) as refused:
        hp_tool.export(query, format="verl")
    assert refused.value.field == field
    again = hp_tool.export(
        {**query, "parallel": dict(query["parallel"])}, format="verl", rerank=True
    )  # type: ignore[call-overload]
    assert again.parallel is not None and again.parallel[field.partition(".")[2]] == 1
    assert field in again.left_out
