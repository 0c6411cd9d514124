"""The tables name every argument of Megatron Core; new exports come back the same; a tool that runs less is ranked for."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.exchange import export, export_for, read_query
from hp_tool.formats import accelerate, names, nanotron, verl
from hp_tool.formats.imports import _READERS
from hp_tool.formats.megatron_lm import scripts
from hp_tool.formats.reading import table
from hp_tool.queries import schema
from tests.conftest import skip_or_fail
from tests.formats.cases import llama, same_work, setup_of

TABLES = sorted(
    path.stem for path in (Path(scripts.__file__).parents[1] / "tables").glob("*.yaml") if path.stem != "trained_with"
)

NOT_ARGUMENTS = set(
    """timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func _cpu_offloading_context
    init_method output_layer_init_method embedding_init_method activation_func virtual_pipeline_model_parallel_size params_dtype
    enable_autocast autocast_dtype num_microbatches_with_partial_activation_checkpoints tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 pipeline_dtype variable_seq_lengths batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    cpu_offloading cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage softmax_scale gated_linear_unit bias_activation_fusion
    activation_func_fp8_input_store test_mode memory_efficient_layer_norm fused_single_qkv_rope fp8_dot_product_attention
    fp8_multi_head_attention tp_only_amax_red use_kitchen moe_token_dropping cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph disable_parameter_transpose_cache inference_sampling_seed use_inference_optimized_layers
    heterogeneous_block_specs hetereogenous_dist_checkpoint quant_recipe tp_comm_atomic_ag tp_comm_atomic_rs
    moe_router_topk_limited_devices use_te_rng_tracker barrier_with_L1_time num_moe_experts fp8_param
    gradient_accumulation_fusion overlap_p2p_comm masked_softmax_fusion persist_layer_norm bias_dropout_fusion
    apply_rope_fusion attention_softmax_in_fp32 inference_rng_tracker log_max_attention_logit""".split()  # noqa: SIM905
)
"""Fields of TransformerConfig that the training loop gives no argument, or one of another name (its own exclusions)."""


def test_every_argument_of_megatron_core_has_its_line() -> None:
    """The loop's parser is made of Core's fields: a switch that is on by default is turned off by --no-... or --disable-..."""
    try:
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError:
        skip_or_fail(component="MEGATRON", reason="megatron-core is not installed")
    arguments = table("megatron")
    for field in dataclasses.fields(TransformerConfig):
        if field.name in NOT_ARGUMENTS or not field.init:
            continue
        kind: Any = field.type
        while typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
        flag = field.name.replace("_", "-")
        switch = kind is bool
        flags = [f"no-{flag}", f"disable-{flag}"] if switch and field.default is True else [flag]
        flags = [each[2:] for each in field.metadata.get("argparse_meta", {}).get("arg_names", ())] or flags
        for each in flags:
            assert each in arguments, each
            if field.name not in ("pipeline_model_parallel_layout", "window_size", "window_attn_skip_freq", "no_rope_freq",
            "moe_layer_freq",
                                  "moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type",
                                  "cuda_graph_scope"):  # fmt: skip
                assert arguments[each].arity == ("0" if switch else "+" if typing.get_origin(kind) is list else "1"), each


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_each_argument_once_with_a_reason(name: str) -> None:
    content = yaml.safe_load((Path(scripts.__file__).parents[1] / "tables" / f"{name}.yaml").read_text(encoding="utf-8"))
    said = [
        entry.partition("=")[0]
        for fate in ("read", "ignored", "refused")
        for names_ in (content.get(fate) or {}).values()
        for entry in names_.split()
    ]
    assert sorted(set(said)) == sorted(said)
    assert all(each.why for each in table(name).values())


def test_the_formats_are_those_that_help_texts_name() -> None:
    assert set(_READERS) == set(names.IMPORTS)
    for format in names.EXPORTS:
        with pytest.raises(InputError, match=r"the query has|serves|trains"):
            export(result=SERVING, format=format)
    assert json.dumps(schema.to_dict(llama()))


SERVING = {
    "kind": "inference", "model": "qwen3-32b", "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {"input_length": 400, "output_length": 100, "concurrency": 8, "engine": "vllm"},
    "parallel": {"tensor_parallel_size": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"sequence_parallel": False}, {"recompute": "full", "zero_stage": 0}, {"pipeline_parallel_size": 1}]
)
def test_nanotron_comes_back_the_same(changes: dict[str, Any]) -> None:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1} | changes
    query = llama(**parallel) | {"model": "llama-3-8b"}
    query["training"]["framework"] = "nanotron"
    setup = setup_of(query)
    same_work(setup_of(read_query(nanotron.text(setup), overrides={"cluster.gpu": "h100-sxm-80gb"})), setup)


@pytest.mark.parametrize(
    ("framework", "parallel"),
    [
        ("megatron-core", {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2,
        "recompute": "full"}),
        ("megatron-core", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 2,
        "zero_stage": 0}),
        ("torch-fsdp", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3, "recompute": "per_layer"}),
        ("torch-fsdp", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 2,
        "data_parallel_shard_size": 8}),
    ],
)  # fmt: skip
def test_verl_comes_back_the_same(framework: str, parallel: dict[str, Any]) -> None:
    query = llama(**parallel) | {"model": "qwen3-8b"}
    query["training"]["framework"] = framework
    setup = setup_of(query)
    same_work(setup_of(read_query(verl.text(setup), overrides={"cluster.gpu": "h100-sxm-80gb"})), setup)


@pytest.mark.parametrize(
    "parallel", [{"zero_stage": 3}, {"zero_stage": 2, "recompute": "per_layer"}, {"zero_stage": 3, "context_parallel_size": 2}]
)
def test_accelerate_comes_back_with_what_its_script_is_told(parallel: dict[str, Any]) -> None:
    query = llama(**({"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "recompute": "none"} | parallel))
    query["training"]["framework"] = "torch-fsdp"
    setup = setup_of(query)
    told = {
        "cluster.gpu": "h100-sxm-80gb", "model": "llama-3-70b", "training.sequence_length": 8192,
        "training.global_batch_size": 128,
        "parallel.micro_batch_size": 1,
    }  # fmt: skip
    same_work(setup_of(read_query(accelerate.text(setup), overrides=told)), setup)


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    service, job = yaml.safe_load_all(scripts.kubernetes(setup_of(llama())))
    for each in (service, job):
        validate.validate(each, "1.30", strict=True)
    assert job["spec"]["completions"] == 8
    assert "FILL IN 1" in job["spec"]["template"]["spec"]["containers"][0]["command"][2]


def test_a_recommendation_is_ranked_again_for_a_tool_that_cannot_run_it() -> None:
    query = llama() | {"model": "llama-3-8b"}
    query["cluster"]["num_gpus"] = 16
    query["parallel"] = {}
    query["training"]["cross_entropy"] = "fused"
    with pytest.raises(UnsupportedError):
        export(result=query, format="torchtitan")
    chosen = export_for(result=query, format="torchtitan")
    assert chosen.framework == "torch-fsdp" and chosen.left_out == ("training.cross_entropy",)
    assert chosen.best_step_s is not None and chosen.cost_fraction == pytest.approx(chosen.step_s / chosen.best_step_s - 1.0)
    again = read_query(chosen.text, num_gpus=16, overrides={"cluster.gpu": "h100-sxm-80gb"})
    assert again["parallel"]["zero_stage"] == chosen.parallel["zero_stage"]
