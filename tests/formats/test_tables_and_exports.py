"""The tables name every argument of Megatron Core; new exports come back the same; a tool that runs
less is ranked for.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import InputError, UnsupportedError
from hp_tool.formats.exchange import assess, export, export_for_tool, read_configuration, read_query
from hp_tool.formats.reading import table
from hp_tool.formats.registry import get_format, writable
from hp_tool.formats.tools import nanotron, verl
from hp_tool.formats.tools.megatron_lm import scripts
from hp_tool.questions import schema
from tests.conftest import skip_or_fail
from tests.formats.cases import llama, same_work, setup_of

TABLES = sorted(
    path.stem
    for path in (Path(scripts.__file__).parents[2] / "tables").glob("*.yaml")
    if path.stem not in ("trained_with", "unsupported")
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
    apply_rope_fusion attention_softmax_in_fp32 inference_rng_tracker log_max_attention_logit""".split()  # noqa: E501, SIM905
)
"""Fields of TransformerConfig that the training loop gives no argument, or one of another name (its
own exclusions).
"""


@pytest.mark.components
def test_every_argument_of_megatron_core_has_its_line() -> None:
    """The loop's parser is made of Core's fields: a switch that is on by default is turned off by
    --no-... or --disable-...
    """
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
        flags = [
            each[2:] for each in field.metadata.get("argparse_meta", {}).get("arg_names", ())
        ] or flags
        for each in flags:
            assert each in arguments, each
            if field.name not in (
                "pipeline_model_parallel_layout",
                "window_size",
                "window_attn_skip_freq",
                "no_rope_freq",
                "moe_layer_freq",
                "moe_router_load_balancing_type",
                "moe_aux_loss_coeff",
                "cp_comm_type",
                "cuda_graph_scope",
            ):
                assert arguments[each].arity == (
                    "0" if switch else "+" if typing.get_origin(kind) is list else "1"
                ), each


def test_a_table_names_each_argument_once_with_a_reason(subtests: pytest.Subtests) -> None:
    for name in TABLES:
        with subtests.test(name=str(name)):
            content = yaml.safe_load(
                (Path(scripts.__file__).parents[2] / "tables" / f"{name}.yaml").read_text(
                    encoding="utf-8"
                )
            )
            said = [
                entry.partition("=")[0]
                for fate in ("read", "ignored", "refused")
                for names_ in (content.get(fate) or {}).values()
                for entry in names_.split()
            ]
            assert sorted(set(said)) == sorted(said)
            assert all(each.why for each in table(name).values())


def test_the_formats_are_those_that_help_texts_name() -> None:
    for format in writable("training"):
        with pytest.raises(InputError, match=r"the query has|serves|trains"):
            export(result=SERVING, format=format)
    assert json.dumps(schema.to_dict(llama()))


SERVING = {
    "kind": "inference",
    "model": "qwen3-32b",
    "cluster": {"gpu": "h200-sxm-141gb", "num_gpus": 8},
    "inference": {"input_length": 400, "output_length": 100, "concurrency": 8, "engine": "vllm"},
    "parallel": {"tensor_parallel_size": 4},
}


TOLD = {
    "accelerate": (
        "model",
        "training.sequence_length",
        "training.global_batch_size",
        "parallel.micro_batch_size",
        "training.attention",
        "training.dropout",
        "training.optimizer",
    ),
    "deepspeed": (
        "model",
        "training.framework",
        "training.sequence_length",
        "training.attention",
        "training.dropout",
        "training.cross_entropy",
    ),
}
"""What a script has to be told beside the file, as the importer asks for it."""
FRAMEWORK = {
    "nanotron": ("nanotron",),
    "accelerate": ("torch-fsdp",),
    "deepspeed": ("deepspeed",),
    "torchtitan": ("torch-fsdp",),
    "verl": ("verl", "verl-fsdp"),
}


@st.composite
def asked(draw: st.DrawFn, format: str) -> dict[str, Any]:
    """A configuration of a catalogue's model that this format's tool runs, and sometimes a key that
    it has no word for.
    """
    framework = draw(st.sampled_from(FRAMEWORK.get(format, ("megatron-core",))))
    fsdp = framework in ("torch-fsdp", "verl-fsdp")
    alone = format == "deepspeed" or (format == "verl" and fsdp)
    t, p, d = (1 if alone else draw(st.sampled_from((1, 2, 4))) for _ in range(3))
    d = draw(st.sampled_from((2, 4))) if alone else d
    p = 1 if format == "accelerate" else p
    parallel: dict[str, Any] = {
        "tensor_parallel_size": t,
        "pipeline_parallel_size": p,
        "virtual_pipeline_parallel_size": 2
        if p > 1 and framework != "nanotron" and draw(st.booleans())
        else 1,
        "context_parallel_size": 1
        if alone or framework == "nanotron"
        else draw(st.sampled_from((1, 2))),
        "micro_batch_size": draw(st.sampled_from((1, 2))),
        "sequence_parallel": t > 1 and (fsdp or draw(st.booleans())),
        "recompute": draw(st.sampled_from(("none", "per_layer") if fsdp else ("none", "full"))),
        "zero_stage": draw(st.sampled_from((2, 3) if fsdp else (0, 1))),
    }
    if format == "verl" and not fsdp and draw(st.booleans()):
        parallel["recompute"] = draw(
            st.sampled_from(
                ("selective", {"granularity": "selective", "modules": ["core_attn", "layernorm"]})
            )
        )
    training = {"sequence_length": 4096, "global_batch_size": 64, "framework": framework}
    unsaid: tuple[tuple[str, Any], ...] = (
        ("attention", "unfused"),
        ("dropout", 0.1),
        ("optimizer", "sgd"),
        ("gradient_precision", "bf16"),
        ("precision", "fp16"),
        ("precision", "fp8"),
        ("cross_entropy", "fused"),
        ("offload", "optimizer"),
    )
    training |= dict(draw(st.lists(st.sampled_from(unsaid), max_size=1)))
    model = draw(st.sampled_from(("llama-3-8b", "llama-2-70b", "qwen3-8b", "mixtral-8x7b")))
    gpus = t * p * d * parallel["context_parallel_size"]
    return {
        "kind": "training",
        "model": model,
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": gpus},
        "training": training,
        "parallel": parallel,
    }


@pytest.mark.parametrize(
    "format",
    [
        "megatron-lm",
        "slurm",
        "kubernetes",
        "nanotron",
        "verl",
        "accelerate",
        "deepspeed",
        "torchtitan",
    ],
)
@given(data=st.data())
def test_what_is_exported_comes_back_the_same_in_every_field(
    format: str, data: st.DataObject
) -> None:
    """A key that the tool has no word for is refused by name, never dropped."""
    query = data.draw(asked(format))
    try:
        setup = setup_of(query)
        text = get_format(format).write(setup)
    except UnsupportedError as error:
        assert error.field
        return
    if format == "kubernetes":
        text = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0][
            "command"
        ][2]
    told = {
        path: query[path.split(".")[0]]
        if path == "model"
        else query[path.split(".")[0]].get(path.split(".")[1])
        for path in TOLD.get(format, ())
    }
    overrides = {path: value for path, value in told.items() if value is not None} | {
        "cluster.gpu": "h100-sxm-80gb"
    }
    same_work(
        setup_of(read_query(text, num_gpus=query["cluster"]["num_gpus"], overrides=overrides)),
        setup,
    )


@pytest.mark.parametrize(("format", "count"), [("nanotron", 6), ("verl", 3), ("megatron-lm", 4)])
def test_what_is_left_to_fill_in_is_listed_and_marked_in_place(format: str, count: int) -> None:
    query = llama(pipeline_parallel_size=2, zero_stage=1) | {"model": "llama-3-8b"}
    query["training"]["framework"] = FRAMEWORK.get(format, ("megatron-core",))[0]
    text = get_format(format).write(setup_of(query))
    for number in range(1, count + 1):
        assert f"#   {number}. " in text and f"# FILL IN {number}" in text
    assert f"FILL IN {count + 1}" not in text


def test_nanotron_is_told_the_rotary_base_and_starts_on_random_tokens() -> None:
    query = llama(pipeline_parallel_size=2, zero_stage=1) | {"model": "llama-3-8b"}
    query["training"]["framework"] = "nanotron"
    content = nanotron.config(setup_of(query))
    assert (
        content["model"]["model_config"]["rope_theta"],
        content["model"]["model_config"]["rms_norm_eps"],
    ) == (5e5, 1e-5)
    assert content["data_stages"][0]["data"]["dataset"] is None
    wide = llama(pipeline_parallel_size=2, zero_stage=1) | {
        "model": "qwen3-4b"
    }  # its heads are wider than hidden / heads
    wide["training"]["framework"] = "nanotron"
    with pytest.raises(UnsupportedError):
        nanotron.config(setup_of(wide))


def test_verl_starts_megatron_by_its_own_configuration() -> None:
    text = verl.text(setup_of(llama() | {"model": "qwen3-8b"}))
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in text
    assert "main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml" in text
    offloaded = llama() | {"model": "qwen3-8b"}
    offloaded["training"] |= {"offload": "optimizer", "offload_fraction": 0.5, "framework": "verl"}
    setup = setup_of(offloaded)
    same_work(
        setup_of(read_query(verl.text(setup), overrides={"cluster.gpu": "h100-sxm-80gb"})), setup
    )
    waits = verl.text(setup_of(llama() | {"model": "qwen3-8b"})).replace(
        "OVERRIDES=(", "OVERRIDES=(actor_rollout_ref.actor.megatron.optimizer_offload=True"
    )
    assert (
        "offload" not in read_query(waits, overrides={"cluster.gpu": "h100-sxm-80gb"})["training"]
    )  # back for the update
    uneven = llama(pipeline_parallel_size=16, tensor_parallel_size=8, recompute="full") | {
        "model": "llama-3.1-405b"
    }
    uneven["cluster"]["num_gpus"] = 128
    assert "override_transformer_config.account_for_loss_in_pipeline_split=True" in verl.text(
        setup_of(uneven)
    )


def test_bridge_s_switches_are_written_as_hydra_prints_them() -> None:
    """DeepSeek-V3's 61 layers on two stages: the output layer counts as one, the embedding does
    not.
    """
    parallel = {"pipeline_parallel_size": 2, "expert_parallel_size": 64, "recompute": "full"}
    query = llama(**parallel) | {"model": "deepseek-v3"}
    query["cluster"]["num_gpus"] = 1024
    text = export(result=query, format="nemo")
    assert "model.account_for_embedding_in_pipeline_split=false" in text and "False" not in text


def test_a_layout_of_a_row_is_written_or_refused_never_dropped() -> None:
    query = llama(pipeline_parallel_size=16, tensor_parallel_size=8, recompute="full") | {
        "model": "llama-3.1-405b"
    }
    query["cluster"]["num_gpus"] = 128
    layout = "Ettttttttt|(tttttttt|)*13ttttttt|ttttttL"
    row = schema.to_dict(setup_of(query).parallel) | {"pipeline_layout": layout}
    result = {"query": query, "recommendations": [{"parallel": row}]}
    assert f"--pipeline-model-parallel-layout '{layout}'" in export(
        result=result, format="megatron-lm"
    )
    named = query | {"parallel": query["parallel"] | {"pipeline_layout": layout}}
    for format in ("nemo", "verl"):
        with pytest.raises(UnsupportedError, match="pipeline_layout"):
            export(result=result | {"query": named}, format=format)
    row["virtual_pipeline_parallel_size"] = 2
    with pytest.raises(
        InputError,
        match=r"has 16 chunks, but .* is 32",
    ):
        export(result=result, format="megatron-lm")


@pytest.mark.parametrize("name", ["--trust-remote-code", "evil\nevil", "evil\0"])
def test_a_name_that_a_program_would_read_otherwise_is_refused(name: str) -> None:
    model = schema.to_dict(setup_of(llama()).model) | {"name": name}
    for format in (
        "vllm",
        "sglang",
        "trtllm",
    ):  # a model that nobody published is asked for, whatever its name
        text = export(result=SERVING | {"model": model}, format=format)
        assert "\0" not in text
        assert all(
            line.startswith("#") for line in text.splitlines() if "evil" in line or "trust" in line
        )
    with pytest.raises(
        InputError,
        match="starts with a dash, or contains a line break",
    ):
        export(result=llama(context_parallel_size=1) | {"model": model}, format="verl")


def test_a_better_configuration_is_one_that_the_tool_can_be_told() -> None:
    text = json.dumps(
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
        }
    )
    said = {
        "cluster.gpu": "b200-sxm-180gb",
        "model": "llama-3-8b",
        "training.sequence_length": 4096,
    }
    reading = read_configuration(text, num_gpus=8, overrides=said)
    assessment = assess(schema.parse_query(reading.query), reading=reading)
    assert assessment.better is not None and assessment.better.parallel.tensor_parallel_size == 1
    assert "zero_optimization.stage" in {change["flag"] for change in assessment.changes}


def test_kubernetes_takes_the_manifest() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    service, job = yaml.safe_load_all(scripts.kubernetes_manifest(setup_of(llama())))
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
    chosen = export_for_tool(result=query, format="torchtitan")
    assert chosen.framework == "torch-fsdp" and chosen.left_out == ("training.cross_entropy",)
    assert chosen.best_step_s is not None and chosen.cost_fraction == pytest.approx(
        chosen.step_s / chosen.best_step_s - 1.0
    )
    again = read_query(chosen.text, num_gpus=16, overrides={"cluster.gpu": "h100-sxm-80gb"})
    assert again["parallel"]["zero_stage"] == chosen.parallel["zero_stage"]
