"""Formats that are written and not read: every flag or key of a random ranking's rows stands for
the row's own figure, every figure that has a word is written, and a word that no table here knows
fails.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from hp_tool.errors import HpToolError, InputError, UnsupportedError
from hp_tool.formats.exchange.export import write_text
from hp_tool.questions import schema, serving, training
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.serving.problem import resolve_serving
from hp_tool.questions.training.problem import resolve_training
from tests.formats import drawn

FEW, MANY = 3, pytest.param(8, marks=pytest.mark.long)
"""Numbers of random rankings."""
ANY = object()
"""Of a word that stands for no figure of the row: the user's own, the fused kernels of a machine, a
router's scoring.
"""
FREE = [
    "position_embedding_type",
    "make_vocab_size_divisible_by",
    "rope_type",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "ckpt_format",
    "moe_flex_dispatcher_backend",
    "rotary_base",
    "norm_epsilon",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "rotary_scaling_factor",
    "moe_router_topk_scaling_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "use_rope_scaling",
    "rope_scaling_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "rotary_percent",
    "activation_func",
    "init_method_std",
    "moe_router_dtype",
    "moe_shared_expert_overlap",
    "original_max_position_embeddings",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "attention_backend",
    "cross_entropy_fusion_impl",
    "no_check_for_nan_in_loss_and_grad",
    "moe_pad_experts_for_cuda_graph_inference",
    "cuda_graph_scope",
    "glu_linear_offset",
    "activation_func_clamp_value",
    "use_cpu_initialization",
    "quick_geglu",
    "rotary_interleaved",
    "add_qkv_bias",
    "qk_layernorm",
]
DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def megatron(configuration: Configuration) -> dict[str, Any]:
    """Megatron Core's fields of a row, None where the field must not be written; bool of
    switches.
    """
    problem, c = resolve_training(configuration.query), configuration.parallel
    m, w, s = problem.model, problem.workload, problem.strategy
    recompute = c.recompute if isinstance(c.recompute, str) else c.recompute.granularity
    modules = () if isinstance(c.recompute, str) else c.recompute.modules
    experts, latent, dense = (
        bool(m.num_experts),
        m.kv_lora_rank is not None,
        m.first_k_dense_replace,
    )
    o, grouped = w.overlap, m.kv_heads != m.num_attention_heads
    first = w.optimizer_precision or "fp32"
    second, master = w.exp_avg_sq_precision or first, w.master_precision or "fp32"
    aware = {first, second, master} != {"fp32"} or w.offload == "optimizer"
    shards, context = (
        c.data_parallel_shard_size or c.data_parallel_size,
        c.context_parallel_size > 1,
    )
    ring = s.context_parallel_communication if context else None
    moe = {
        "num_experts": m.num_experts,
        "moe_router_topk": m.num_experts_per_tok,
        "moe_ffn_hidden_size": m.moe_intermediate_size or m.ffn_size,
        "expert_model_parallel_size": c.expert_parallel_size,
        "expert_tensor_parallel_size": c.expert_tensor_parallel_size,
        "moe_token_dispatcher_type": c.moe_token_dispatcher_type or ANY,
        "moe_expert_capacity_factor": w.expert_capacity_factor,
        "moe_router_num_groups": m.n_group or None,
        "moe_router_group_topk": m.topk_group or None,
        "moe_shared_expert_intermediate_size": m.shared_expert_size
        if m.num_shared_experts
        else None,
        "moe_shared_expert_gate": m.shared_expert_gate,
        "moe_layer_freq": f"([0]*{dense}+[1]*{m.num_hidden_layers - dense})" if dense else None,
    }
    return {
        "num_layers": m.num_hidden_layers,
        "hidden_size": m.hidden_size,
        "ffn_hidden_size": m.ffn_size,
        "num_attention_heads": m.num_attention_heads,
        "kv_channels": m.head_size,
        "vocab_size": m.vocab_size,
        "max_position_embeddings": max(m.max_position_embeddings or 0, w.sequence_length),
        "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[m.normalization],
        "group_query_attention": grouped and not latent,
        "num_query_groups": m.kv_heads if grouped else None,
        "swiglu": m.gated_mlp,
        "untie_embeddings_and_output_weights": not m.tie_word_embeddings,
        "disable_bias_linear": not m.has_mlp_bias,
        "multi_latent_attention": latent,
        "kv_lora_rank": m.kv_lora_rank,
        "q_lora_rank": m.q_lora_rank if latent else None,
        "qk_head_dim": m.qk_nope_head_dim if latent else None,
        "qk_pos_emb_head_dim": m.qk_rope_head_dim if latent else None,
        "v_head_dim": m.v_head_dim if latent else None,
        "mtp_num_layers": m.num_nextn_predict_layers or None,
        "no_rope_fusion": ANY,
        **(moe if experts else dict.fromkeys(moe)),
        "tensor_model_parallel_size": c.tensor_parallel_size,
        "pipeline_model_parallel_size": c.pipeline_parallel_size,
        "context_parallel_size": c.context_parallel_size if context else None,
        "cp_comm_type": ring,
        "hierarchical_context_parallel_sizes": ANY if ring == "a2a+p2p" else None,
        "hybrid_context_parallel": None,
        "max_seqlen_per_dp_cp_rank": None,
        "sequence_parallel": c.sequence_parallel and c.tensor_parallel_size > 1,
        "num_virtual_stages_per_pipeline_rank": ANY
        if c.virtual_pipeline_parallel_size > 1
        else None,
        "num_distributed_optimizer_instances": c.data_parallel_size // shards
        if shards < c.data_parallel_size
        else None,
        "use_tp_pp_dp_mapping": problem.cluster.rank_order == "tp-cp-ep-pp-dp",
        "use_distributed_optimizer": c.zero_stage >= 1 and w.optimizer != "muon",
        "use_megatron_fsdp": c.zero_stage >= 2,
        "data_parallel_sharding_strategy": {2: "optim_grads", 3: "optim_grads_params"}.get(
            c.zero_stage
        ),
        "no_gradient_accumulation_fusion": c.zero_stage >= 2,
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_modules": " ".join(modules or ("core_attn",))
        if recompute == "selective"
        else None,
        "recompute_method": ANY if recompute == "full" else None,
        "recompute_num_layers": ANY if recompute == "full" else None,
        "seq_length": w.sequence_length,
        "micro_batch_size": c.micro_batch_size,
        "global_batch_size": w.global_batch_size,
        "attention_dropout": w.dropout,
        "hidden_dropout": w.dropout,
        "sft": w.task == "sft",
        "optimizer": "dist_muon" if w.optimizer == "muon" and c.zero_stage else w.optimizer,
        "bf16": w.precision not in ("fp16", "fp32"),
        "fp16": w.precision == "fp16",
        "fp8_format": {"fp8": "hybrid", "mxfp8": "e4m3"}.get(w.precision),
        "fp8_recipe": w.fp8_recipe or ("mxfp8" if w.precision == "mxfp8" else None),
        "fp4_format": "e2m1" if w.precision == "nvfp4" else None,
        "fp4_recipe": "nvfp4" if w.precision == "nvfp4" else None,
        "fp8_param_gather": w.parameter_precision == "fp8",
        "cuda_graph_impl": ANY if w.cuda_graphs else None,
        "cross_entropy_loss_fusion": w.loss != "unfused",
        "grad_reduce_in_bf16": w.gradient_precision == "bf16" and w.precision != "fp16",
        "accumulate_allreduce_grads_in_fp32": (w.gradient_precision or "fp32") == "fp32"
        and w.precision == "fp16",
        "use_precision_aware_optimizer": aware,
        "exp_avg_dtype": first if aware else None,
        "exp_avg_sq_dtype": second if aware else None,
        "main_params_dtype": master if master != "fp32" else None,
        "optimizer_cpu_offload": w.offload == "optimizer",
        "optimizer_offload_fraction": w.offload_fraction if w.offload == "optimizer" else None,
        "cpu_offloading_num_layers": None,  # of all layers, which Megatron Core refuses
        "no_masked_softmax_fusion": w.kernel_fusion is False,
        "no_bias_dropout_fusion": w.kernel_fusion is False,
        "overlap_grad_reduce": o is None or o.data_parallel is not False,
        "overlap_param_gather": c.zero_stage >= 1 and (o is None or o.data_parallel is not False),
        "tp_comm_overlap": False if o is not None and o.tensor_parallel is False else ANY,
        "overlap_moe_expert_parallel_comm": bool(o is not None and o.expert_parallel),
        "no_overlap_p2p_communication": o is not None and o.pipeline_parallel is False,
    }


def same(written: Any, expected: Any) -> bool:
    if expected is ANY:
        return True
    if expected is None or expected is False:
        return written is None
    if isinstance(expected, bool):
        return written in ("", "true", "True")
    try:
        return float(written) == float(expected)
    except (TypeError, ValueError):
        return written == str(expected)


def hold(written: dict[str, str], expected: dict[str, Any]) -> None:
    unknown = written.keys() - expected.keys() - set(FREE)
    assert not unknown, f"no row of this table says what these stand for: {sorted(unknown)}"
    wrong = {
        name: (written.get(name), value)
        for name, value in expected.items()
        if not same(written.get(name), value)
    }
    assert not wrong, f"(written, of the row): {wrong}"


def flags(words: list[str]) -> dict[str, str]:
    """Words after each --flag, joined, by its name with underscores."""
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = [value] if value else []
        else:
            options[next(reversed(options))].append(word)
    return {
        name.lstrip("-").replace("-", "_"): " ".join(values) for name, values in options.items()
    }


def of_kubernetes(text: str, configuration: Configuration) -> dict[str, str]:
    documents = list(yaml.safe_load_all(text))
    spec = documents[1]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    cluster = resolve_training(configuration.query).cluster
    devices = container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["completions"] == spec["parallelism"] == cluster.num_nodes
    assert spec["completions"] * devices == cluster.num_gpus
    launch = container["command"][-1].partition("\ntorchrun ")[2].replace("\\\n", " ")
    before, _, after = launch.partition("pretrain_gpt.py")
    assert f"--nnodes {cluster.num_nodes} --nproc-per-node {devices}" in before
    return flags([word for word in shlex.split(after) if not word.startswith("$")])


def of_yaml(text: str, configuration: Configuration) -> dict[str, str]:
    content = yaml.safe_load(text)
    language, parallel = content.pop("language_model"), content.pop("model_parallel")
    assert not any(name.startswith("no_") for name in (*language, *parallel, *content)), (
        "an argument's own name, not its flag's"
    )
    merged = {**content, **parallel, **language}
    for name, flag in (
        ("add_bias_linear", "disable_bias_linear"),
        ("overlap_p2p_comm", "no_overlap_p2p_communication"),
        ("apply_rope_fusion", "no_rope_fusion"),
        ("gradient_accumulation_fusion", "no_gradient_accumulation_fusion"),
        ("masked_softmax_fusion", "no_masked_softmax_fusion"),
        ("bias_dropout_fusion", "no_bias_dropout_fusion"),
    ):
        if merged.pop(name, None) is False:
            merged[flag] = True
    assert merged.pop("gated_linear_unit", False) is ("swiglu" in merged)
    renamed = {
        "num_moe_experts": "num_experts",
        "fp8": "fp8_format",
        "fp4": "fp4_format",
        "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    }
    return {
        renamed.get(name, name): "true"
        if value is True
        else " ".join(map(str, value))
        if isinstance(value, list)
        else str(value)
        for name, value in merged.items()
        if value is not False
    }


def of_nemo(text: str, configuration: Configuration) -> dict[str, str]:
    lines = [
        shlex.split(line)[0] for line in text.splitlines() if line and not line.startswith("#")
    ]
    options = dict(line.split("=", 1) for line in lines)
    assert len(options) == len(lines)
    return {
        name: value for name, value in options.items() if value not in ("false", "False", "null")
    }


def nemo(configuration: Configuration) -> dict[str, Any]:
    """Bridge's keys of a row, by those of Megatron Core: the model's shape is the recipe's own."""
    of = megatron(configuration)
    w = resolve_training(configuration.query).workload
    model = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "cp_comm_type",
        "recompute_granularity",
        "hierarchical_context_parallel_sizes",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "moe_token_dispatcher_type",
        "moe_expert_capacity_factor",
        "cuda_graph_impl",
        "cross_entropy_loss_fusion",
        "cpu_offloading_num_layers",
        "recompute_method",
        "recompute_num_layers",
        "seq_length",
    ]
    precision = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}[
        w.precision
    ]
    torch = {
        "fp32": "torch.float32",
        "bf16": "torch.bfloat16",
        "fp16": "torch.float16",
        "fp8": "torch.uint8",
    }
    aware, modules = of["use_precision_aware_optimizer"], of["recompute_modules"]
    expected: dict[str, Any] = {f"model.{name}": of[name] for name in model}
    expected |= {f"train.{name}": of[name] for name in ("micro_batch_size", "global_batch_size")}
    expected |= {
        f"ddp.{name}": of[name]
        for name in (
            "overlap_grad_reduce",
            "overlap_param_gather",
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy",
            "num_distributed_optimizer_instances",
        )
    }
    # Bridge lays its own choice over `ddp` unless comm_overlap has one (CommOverlapConfig.setup).
    expected |= {
        f"comm_overlap.{name}": of[name] for name in ("overlap_grad_reduce", "overlap_param_gather")
    }
    free = [
        "apply_rope_fusion",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_flex_dispatcher_backend",
        "cuda_graph_scope",
        "cross_entropy_fusion_impl",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    ]
    return (
        expected
        | {f"model.{name}": ANY for name in free}
        | {
            "model.context_parallel_size": configuration.parallel.context_parallel_size,
            "model.virtual_pipeline_model_parallel_size": of["num_virtual_stages_per_pipeline_rank"]
            and configuration.parallel.virtual_pipeline_parallel_size,
            "model.recompute_modules": modules and f"[{modules.replace(' ', ',')}]",
            "model.gradient_accumulation_fusion": not of["no_gradient_accumulation_fusion"],
            "model.attention_dropout": w.dropout or None,
            "model.hidden_dropout": w.dropout or None,
            "model.cpu_offloading": w.offload == "activations",
            "mixed_precision": ANY,
            "++mixed_precision": ANY,
            "precision": precision,
            "ddp.use_distributed_optimizer": configuration.parallel.zero_stage >= 1,
            "ddp.grad_reduce_in_fp32": (w.gradient_precision or "fp32") == "fp32",
            "dataset.sequence_length": w.sequence_length,
            "comm_overlap.tp_comm_overlap": of["tp_comm_overlap"],
            "comm_overlap.overlap_moe_expert_parallel_comm": of["overlap_moe_expert_parallel_comm"],
            "dist.use_tp_pp_dp_mapping": of["use_tp_pp_dp_mapping"],
            "optimizer.optimizer": None if w.optimizer == "adam" else w.optimizer,
            "optimizer.use_precision_aware_optimizer": aware,
            "optimizer.exp_avg_dtype": torch[of["exp_avg_dtype"]] if aware else None,
            "optimizer.exp_avg_sq_dtype": torch[of["exp_avg_sq_dtype"]] if aware else None,
            "optimizer.main_params_dtype": torch[
                "fp16" if of["main_params_dtype"] == "fp16" else "fp32"
            ]
            if aware
            else None,
            "optimizer.store_param_remainders": of["main_params_dtype"] == "remainder",
            "optimizer.optimizer_cpu_offload": of["optimizer_cpu_offload"],
            "optimizer.optimizer_offload_fraction": (w.offload_fraction or 1.0)
            if w.offload == "optimizer"
            else None,
            "peft.target_modules": ANY if w.lora else None,
            "peft.dim": w.lora.rank if w.lora else None,
            "peft.dropout": w.lora.dropout if w.lora else None,
            "peft.alpha": ANY if w.lora else None,
        }
    )


def nemo_words(text: str, configuration: Configuration) -> dict[str, str]:
    words = of_nemo(text, configuration)
    recipe = words.get("mixed_precision") or words["++mixed_precision"]
    computed = (
        "fp16" if "fp16" in recipe.replace("with_fp16", "") and "bf16" not in recipe else "bf16"
    )
    kinds = ("nvfp4", "mxfp8", "fp8")
    return words | {"precision": next((kind for kind in kinds if kind in recipe), computed)}


TRAINED = {
    "kubernetes": (of_kubernetes, megatron),
    "megatron-lm-yaml": (of_yaml, megatron),
    "nemo": (nemo_words, nemo),
}


def rows(query: dict[str, Any], *, format: str) -> list[tuple[str, Configuration]]:
    asked = schema.parse_query(query)
    room = serving if asked.kind == "inference" else training
    try:
        ranked = room.recommend(query=asked, top=3).recommendations
    except (InputError, UnsupportedError):
        return []
    written = []
    for row in ranked:
        configuration = Configuration.from_row(row, query=asked)
        try:
            written.append((write_text(configuration, format), configuration))
        except HpToolError as refused:
            assert isinstance(refused, UnsupportedError | InputError) and refused.field
            if (
                refused.field == "training.cuda_graphs" and refused.field in configuration.set
            ):  # the ranking took what is free
                without = configuration.without(refused.field)
                written.append((write_text(without, format), without))
    return written


@pytest.mark.parametrize("seeds", [FEW, MANY])
@pytest.mark.parametrize("format", TRAINED)
def test_each_word_of_a_training_is_the_rows_own(
    format: str, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drawn.TOOLS, format, "megatron-core")
    read, expected = TRAINED[format]
    written = [
        each
        for seed in range(seeds)
        for each in rows(drawn.training(seed, format=format), format=format)
    ]
    assert written
    for text, configuration in written:
        hold(read(text, configuration), expected(configuration))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        (
            "parallel.context_parallel_communication",
            {
                "parallel.context_parallel_size": 8,
                "parallel.context_parallel_communication": "a2a+p2p",
                "training.sequence_length": 131072,
            },
        ),
        (
            "parallel.data_parallel_shard_size",
            {"parallel.data_parallel_shard_size": 8, "parallel.zero_stage": 1},
        ),
        ("training.kernel_fusion", {"training.kernel_fusion": False}),
        ("training.overlap", {"training.overlap": {"pipeline_parallel": False}}),
        ("training.overlap", {"training.overlap": {"context_parallel": False}}),
        (
            "training.overlap",
            {"training.overlap": {"data_parallel": False}, "parallel.zero_stage": 1},
        ),
    ],
)
@pytest.mark.parametrize("format", TRAINED)
def test_what_is_rare_is_written_or_refused(
    format: str, field: str, changes: dict[str, Any]
) -> None:
    query: dict[str, Any] = {
        "kind": "training",
        "model": "llama-3-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
        "training": {"sequence_length": 8192, "global_batch_size": 64},
        "parallel": {"pipeline_parallel_size": 2},
    }
    read, expected = TRAINED[format]
    for text, configuration in rows(schema.set_paths(query, changes), format=format):
        words = read(text, configuration)
        hold(words, expected(configuration))
        overlap = configuration.query.training.overlap  # type: ignore[union-attr]
        assert overlap is None or overlap.context_parallel is None, (
            "no word says it, and it was not refused"
        )
        if overlap is not None and overlap.data_parallel is False and format == "nemo":
            switched = ("overlap_grad_reduce", "overlap_param_gather")
            assert {
                f"{part}.{name}=false" for part in ("ddp", "comm_overlap") for name in switched
            } <= set(text.splitlines())
        if overlap is not None and overlap.pipeline_parallel is False and format == "nemo":
            assert "comm_overlap.overlap_p2p_comm=false" in text.splitlines()


def engine_of(text: str) -> tuple[dict[str, str], int]:
    """A deployment's options, and its replicas."""
    if text.startswith("#!"):
        count = int(re.search(r"(?:one of )?(\d+) replicas?\b", text)[1])  # type: ignore[index]
        command = re.search(r"^trtllm-serve \S+ (.*)", text.replace("\\\n", " "), re.M)[1]  # type: ignore[index]
        options = flags([word for word in shlex.split(command) if word != "$@"])
        if options.pop("extra_llm_api_options", None):
            body = json.loads(re.search(r"<<'END'\n(.*)\nEND", text)[1])  # type: ignore[index]
            options |= {name: json.dumps(value) for name, value in body.items()}
        return options, count
    spec = yaml.safe_load(text)["spec"]
    (container,) = spec["template"]["containers"]
    options = flags(container["args"])
    options["pod"] = container["resources"]["limits"]["nvidia.com/gpu"]
    options["parallelism"] = json.dumps(spec["parallelism"])
    return options, spec["replicas"]


def engine(configuration: Configuration, *, format: str) -> tuple[dict[str, Any], int]:
    problem, c, w = (
        resolve_serving(configuration.query),
        configuration.parallel,
        configuration.query.inference,
    )
    assert w is not None
    ranks = c.tensor_parallel_size * c.attention_data_parallel_size
    fraction = problem.engine.memory_fraction
    replicas = problem.cluster.num_gpus // (ranks * c.pipeline_parallel_size)
    above, kept = c.attention_data_parallel_size, w.kv_cache_precision
    if format == "trtllm":
        slots = (problem.model.num_experts or 0) + c.redundant_experts
        balancer = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 1}}
        cache = {"dtype": "fp8"} if kept == "fp8" else {}
        return {
            "backend": ANY,
            "tp_size": ranks,
            "pp_size": c.pipeline_parallel_size,
            "max_batch_size": c.max_num_seqs,
            "max_num_tokens": c.max_num_batched_tokens,
            "max_seq_len": ANY,
            "ep_size": c.expert_parallel_size if c.expert_parallel_size > 1 else None,
            "kv_cache_free_gpu_memory_fraction": w.memory_fraction,
            "enable_attention_dp": above > 1,
            "moe_config": json.dumps(balancer) if c.redundant_experts else None,
            "kv_cache_config": json.dumps(cache) if cache else None,
        }, replicas
    return {
        "served_model_name": ANY,
        "port": ANY,
        "tensor_parallel_size": c.tensor_parallel_size,
        "pipeline_parallel_size": c.pipeline_parallel_size,
        "max_num_seqs": c.max_num_seqs,
        "max_num_batched_tokens": c.max_num_batched_tokens,
        "max_model_len": ANY,
        "gpu_memory_utilization": fraction,
        "data_parallel_size": above if above > 1 else None,
        "enable_expert_parallel": c.expert_parallel_size > 1,
        "enable_eplb": c.redundant_experts > 0,
        "all2all_backend": ANY,
        "enable_dbo": w.two_batch_overlap is True,
        "eplb_config": json.dumps({"num_redundant_experts": c.redundant_experts})
        if c.redundant_experts
        else None,
        "dtype": ANY,
        "quantization": ANY if w.precision == "fp8" else None,
        "kv_cache_dtype": ANY if kept else None,
        "pod": ranks * c.pipeline_parallel_size,
        "parallelism": json.dumps(
            {"tensor": c.tensor_parallel_size, "expert": c.expert_parallel_size > 1}
        ),
    }, replicas


@pytest.mark.parametrize("seeds", [FEW, MANY])
@pytest.mark.parametrize(("format", "served"), [("trtllm", "trtllm"), ("llm-d", "vllm")])
def test_each_word_of_a_deployment_is_the_rows_own(format: str, served: str, seeds: int) -> None:
    written = []
    for seed in range(seeds):
        query = drawn.serving(seed, format=served)
        query["inference"]["engine"] = served
        written += rows(query, format=format)
    assert written
    for text, configuration in written:
        (words, replicas), (expected, count) = engine_of(text), engine(configuration, format=format)
        hold(words, expected)
        assert replicas == count
